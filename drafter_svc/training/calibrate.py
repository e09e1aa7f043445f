"""Step 4 of training: sequential temperature scaling (STS) of the confidence head, to `sts.json`.

    python -m drafter_svc.training.calibrate --data DIR [--out DRAFTER]

For k = 1..B in order, T_k is the grid value with the least expected calibration error of
∏_{i≤k} σ(z_i / T_i) against "the first k drafts were all accepted", earlier T fixed (DSpark paper).
Fitted on untruncated blocks of validation texts; positions past a text's end count nowhere.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter_svc.training.data import Corpus, read_text
from drafter_svc.training.report import Record, measure, open_drafter
from drafter_svc.training.settings import parse_settings

log = logging.getLogger("dspark.calibrate")

FORMAT = "dspark-sts-v1"
NUM_BINS = 20  # equal width, as DeepSpec's evaluator
GRID = torch.logspace(-1, 1, 201, dtype=torch.float64)  # 0.1 .. 10


@dataclass
class Fit:
    """Temperatures [B] and calibration error per position before and after, with its sample

    sizes."""

    temperatures: list[float]
    ece_before: list[float]
    ece_after: list[float]
    counts: list[int]


def expected_calibration_error(predicted: Tensor, happened: Tensor) -> float:
    """Mean |average prediction − frequency| over equal-width bins, weighted by bin size. [n]

    each."""
    if not len(predicted):
        return 0.0
    bins = (predicted * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    gap = torch.zeros(NUM_BINS, dtype=torch.float64)
    gap.scatter_add_(0, bins, predicted.double() - happened.double())
    return float(gap.abs().sum() / len(predicted))


def fit(logits: Tensor, accepted: Tensor, num_valid: Tensor) -> Fit:
    """logits: [n, B] raw confidence logits; accepted, num_valid: [n] drafts accepted and judged."""
    logits = logits.double()
    plain = torch.ones(len(logits), dtype=torch.float64)
    scaled = plain.clone()
    result = Fit([], [], [], [])
    for k in range(logits.shape[1]):
        judged = num_valid > k
        happened = accepted[judged] > k
        plain = plain * logits[:, k].sigmoid()
        result.ece_before.append(expected_calibration_error(plain[judged], happened))
        options = scaled * (logits[:, k] / GRID[:, None]).sigmoid()
        errors = torch.tensor(
            [expected_calibration_error(option, happened) for option in options[:, judged]]
        )
        best = int(errors.argmin())
        scaled = options[best]
        result.temperatures.append(round(float(GRID[best]), 4))
        result.ece_after.append(float(errors[best]))
        result.counts.append(int(judged.sum()))
    return result


def fit_records(records: list[Record]) -> Fit:
    """`fit` over the records of a report."""
    return fit(
        torch.tensor([record.logits for record in records]),
        torch.tensor([record.accepted for record in records]),
        torch.tensor([record.num_valid for record in records]),
    )


def write(found: Fit, folder: Path) -> None:
    """Writes `sts.json` beside the drafter."""
    content = {
        "format": FORMAT,
        "block_size": len(found.temperatures),
        "mode": "greedy",
        "temperatures": found.temperatures,
        "num_blocks": found.counts,
        "ece_before": [round(error, 5) for error in found.ece_before],
        "ece_after": [round(error, 5) for error in found.ece_after],
    }
    (folder / "sts.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m drafter_svc.training.calibrate`."""
    settings = parse_settings(__doc__, argv)
    torch.set_num_threads(settings.threads)
    drafter, packer = open_drafter(settings)
    texts = [read_text(ref) for ref in Corpus(settings.data).validation if ref.greedy]
    found = fit_records(measure("validation", texts, drafter, packer).records)
    write(found, settings.out)
    log.info("temperatures %s", found.temperatures)
    log.info("ECE %s -> %s", found.ece_before, found.ece_after)


if __name__ == "__main__":
    main()
