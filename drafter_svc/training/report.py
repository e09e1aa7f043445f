"""Held-out figures of a drafter: what it would accept on texts it was not trained on.

    python -m drafter_svc.training.report --data DIR [--out DRAFTER]

Two figures. `tau`: expected tokens per round at the training's temperature,
1 + Σ∏(1 − ½‖q − p‖₁). `greedy`: rounds replayed at temperature 0 over texts that the target wrote
greedily: the drafts of each round are compared with what the target wrote, so the count equals what
a serving round would accept, up to rounding.
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter_svc.training.data import Corpus, Packer, choose_anchors, packer_for, read_text
from drafter_svc.training.heldout import held_out_texts
from drafter_svc.training.loss import accepted_greedy, survival
from drafter_svc.training.model import Drafter, DrafterConfig
from drafter_svc.training.settings import Settings, parse_settings
from drafter_svc.training.shards import Text
from drafter_svc.training.start import EMBED, HEAD, target_tensors

log = logging.getLogger("dspark.report")

MAX_VALIDATION_TEXTS = 40


@dataclass
class Record:
    """One untruncated block: confidence logits [B], drafts accepted, drafts that count."""

    logits: list[float]
    accepted: int
    num_valid: int


@dataclass
class Figures:
    """Sums over a set of texts. `reached` and `kept` are per position: unconditional prefixes."""

    name: str
    num_blocks: int = 0
    expected: float = 0.0
    rounds: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Expected tokens per round at the packer's temperature, over all anchors."""
        return 1 + self.expected / max(1, self.num_blocks)

    @property
    def acceptance_len(self) -> float:
        """Tokens per round at temperature 0, bonus counted, over replayed rounds."""
        return self.emitted / max(1, self.rounds)

    @property
    def by_position(self) -> list[float]:
        """Share of blocks whose first k drafts are all accepted, over greedy texts' anchors."""
        return [
            kept / max(1, reached) for kept, reached in zip(self.kept, self.reached, strict=True)
        ]


@torch.no_grad()
def measure(name: str, texts: list[Text], drafter: Drafter, packer: Packer) -> Figures:
    """Figures over `texts`, every answer position taken as an anchor."""
    size = packer.block_size
    figures = Figures(name, reached=[0] * size, kept=[0] * size)
    rng = torch.Generator()
    for text in texts:
        examples = packer.pack([text], [choose_anchors(text, None, rng)])
        logits, confidence = drafter(examples.blocks)
        probs = logits.float().softmax(-1)
        distance = (probs - examples.target_probs.float()).abs().sum(-1)
        distance = distance + (1 - examples.target_probs.float().sum(-1)).clamp(min=0)
        figures.num_blocks += len(distance)
        figures.expected += survival(distance, examples.valid).sum().item()
        if text.greedy:
            accepted = accepted_greedy(logits, examples.labels, examples.valid)
            _count(figures, accepted, examples.valid, confidence)
    return figures


def _count(figures: Figures, accepted: Tensor, valid: Tensor, confidence: Tensor) -> None:
    """Adds one greedy text: every anchor to the positions and records, one walk to the rounds."""
    lengths, counts = valid.sum(-1).tolist(), accepted.tolist()
    for k in range(len(figures.kept)):
        figures.reached[k] += sum(length > k for length in lengths)
        figures.kept[k] += sum(count > k for count in counts)
    for logits, count, length in zip(confidence.tolist(), counts, lengths, strict=True):
        figures.records.append(Record(logits, count, length))
    place = 0
    while place < len(counts):
        # The last round has no room for a bonus token once the text is complete.
        emitted = min(counts[place] + 1, len(counts) - place)
        figures.rounds += 1
        figures.emitted += emitted
        place += emitted


def evaluate(drafter: Drafter, packer: Packer, settings: Settings, corpus: Corpus) -> list[Figures]:
    """Figures on the committed held-out prompts, by kind and together, and on validation texts."""
    drafter.eval()
    greedy = [ref for ref in corpus.validation if ref.greedy][:MAX_VALIDATION_TEXTS]
    groups = held_out_texts(settings)
    figures = [measure(kind, texts, drafter, packer) for kind, texts in groups.items()]
    figures.append(measure("validation", [read_text(ref) for ref in greedy], drafter, packer))
    drafter.train()
    return figures


def summary(report: list[Figures]) -> str:
    """One line; `held-out` is the bar's figure: all rounds of the 30 prompts together."""
    parts = []
    held = [f for f in report if f.name != "validation"]
    overall = sum(f.emitted for f in held) / max(1, sum(f.rounds for f in held))
    for figures in report:
        places = " ".join(f"{share:.2f}" for share in figures.by_position)
        parts.append(
            f"{figures.name}: greedy {figures.acceptance_len:.3f} tau {figures.tau:.3f} [{places}]"
        )
    return f"held-out {overall:.3f} | " + " | ".join(parts)


def load_drafter(folder: Path, target: dict[str, Tensor]) -> Drafter:
    """An exported drafter, for measuring; computes in the dtype of the features."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = DrafterConfig(**{name: raw[name] for name in DrafterConfig.__dataclass_fields__})
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] += torch.arange(config.draft_vocab_size)  # stored as offsets, see `export`
    drafter = Drafter(config, target[EMBED], target[HEAD], tensors["d2t"])
    drafter.load_state_dict(
        {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    )
    return drafter.eval()


def open_drafter(settings: Settings) -> tuple[Drafter, Packer]:
    """The exported drafter of `settings.out` with the packer that fits it."""
    target = target_tensors(settings.target)
    drafter = load_drafter(settings.out, target)
    return drafter, packer_for(settings, drafter.config, target[HEAD], drafter.d2t)


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m drafter_svc.training.report`."""
    settings = parse_settings(__doc__, argv)
    torch.set_num_threads(settings.threads)
    drafter, packer = open_drafter(settings)
    log.info("%s", summary(evaluate(drafter, packer, settings, Corpus(settings.data))))


if __name__ == "__main__":
    main()
