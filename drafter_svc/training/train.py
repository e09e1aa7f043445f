"""Step 2 of training: fits the drafter to the shards; resumable from its last checkpoint.

    python -m drafter_svc.training.train --data DIR [--steps N]

Reads shards that generation is still adding to: each epoch takes what is there when it begins.
Writes `train.safetensors` and `train.json` beside the shards, and the drafter itself to --out at
every report.
"""

import json
import logging
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter_svc.training.data import (
    Corpus,
    choose_anchors,
    draft_vocabulary,
    packer_for,
    read_text,
)
from drafter_svc.training.export import export
from drafter_svc.training.loss import dspark_loss, survival
from drafter_svc.training.model import Drafter
from drafter_svc.training.optimiser import Optimiser
from drafter_svc.training.report import evaluate, summary
from drafter_svc.training.settings import Settings, parse_settings
from drafter_svc.training.start import HEAD, adopt, drafter_config, new_drafter, target_tensors

log = logging.getLogger("dspark.train")

SAMPLE_TEXTS = 60
SHORT_BLOCK = 2
STATE, PLACE = "train.safetensors", "train.json"


class Trainer:
    """One run. Its state: tensors (weights, moments), step, epoch and shard count."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.target = target_tensors(settings.target)
        self.step = self.epoch = self.cursor = 0
        saved = self._read_place()
        self.corpus = Corpus(settings.data, saved.get("num_shards"))
        config = drafter_config(settings)
        tensors = load_file(settings.data / STATE) if saved else {}
        d2t = tensors["d2t"] if saved else self._draft_vocabulary(config.draft_vocab_size)
        self.packer = packer_for(settings, config, self.target[HEAD], d2t)
        self.drafter: Drafter = new_drafter(config, self.target, d2t, self._sample(), settings.seed)
        named = self.drafter.named_parameters()
        self.weights = {name: weight for name, weight in named if weight.requires_grad}
        self.optimiser = Optimiser(self.weights, settings.markov_rate)
        if saved:
            self._restore(tensors, saved)
        elif settings.start is not None:
            adopt(self.drafter, settings.start)
        self.order = self._shuffled()

    def _draft_vocabulary(self, size: int) -> Tensor:
        counts = self.corpus.count_ids(self.target[HEAD].shape[0])
        generation = json.loads((self.settings.target / "generation_config.json").read_text())
        d2t = draft_vocabulary(counts, size, list(generation["eos_token_id"]))
        share = counts[d2t].sum() / counts.sum()
        log.info("draft vocabulary of %d covers %.2f %% of the answers", size, 100 * share)
        return d2t

    def _shuffled(self) -> list[int]:
        rng = torch.Generator().manual_seed(self.settings.seed * 1000 + self.epoch)
        return torch.randperm(len(self.corpus.training), generator=rng).tolist()

    def _sample(self) -> Tensor:
        """Tapped rows [n, m * d] of some texts, for the start; the first row of a text is odd."""
        texts = [read_text(ref) for ref in self.corpus.training[:SAMPLE_TEXTS]]
        return torch.cat([self.packer.features(text)[1:] for text in texts])

    def distill(self) -> float:
        """Weight of the extra cross entropy in this step: falls linearly to zero."""
        s = self.settings
        return s.distill * max(0.0, 1 - self.step / max(1.0, s.distill_until * s.steps))

    def rate(self) -> float:
        """Learning rate of this step: linear warm-up, constant, linear decay to zero."""
        s = self.settings
        left = (s.steps - self.step) / max(1.0, s.decay * s.steps)
        return s.learning_rate * min(1.0, (self.step + 1) / s.warmup, left)

    def train_step(self) -> dict[str, float]:
        """One optimiser step over `texts_per_step` texts; returns loss figures."""
        short = self.step < self.settings.short_until * self.settings.steps
        num_texts = self.settings.texts_per_step * (3 if short else 2) // 2
        if self.cursor + num_texts > len(self.order):
            self.epoch, self.cursor = self.epoch + 1, 0
            self.corpus = Corpus(self.settings.data)
            self.order = self._shuffled()
        picks = self.order[self.cursor : self.cursor + num_texts]
        texts = [read_text(self.corpus.training[i]) for i in picks]
        rng = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.step)
        limit = None if short else self.settings.num_anchors
        anchors = [choose_anchors(text, limit, rng) for text in texts]
        examples = self.packer.pack(
            texts, anchors, SHORT_BLOCK if short else None, self.settings.num_columns, rng
        )
        logits, confidence = self.drafter(examples.blocks, examples.columns)
        parts = dspark_loss(
            logits,
            confidence,
            examples.target_probs,
            examples.labels,
            examples.valid,
            distill=self.distill(),
        )
        parts.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), self.settings.clip)
        self.optimiser.step(self.rate())
        self.step += 1
        self.cursor += num_texts
        return {
            "loss": parts.loss.item(),
            "ce": parts.cross_entropy.item(),
            "l1": parts.mean_distance.item(),
            "bce": parts.confidence.item(),
            "tau": 1 + survival(parts.distance, examples.valid).sum(-1).mean().item(),
            "norm": norm.item(),
        }

    def save(self) -> None:
        """Checkpoint: tensors first, then the small file that names the step they belong to."""
        tensors: dict[str, Tensor] = dict(self.drafter.state_dict())
        tensors |= self.optimiser.state()
        tensors["step"] = torch.tensor(self.step)
        save_file(tensors, self.settings.data / f"{STATE}.partial")
        os.replace(self.settings.data / f"{STATE}.partial", self.settings.data / STATE)
        place = {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "num_shards": self.corpus.num_shards,
            "step": self.step,
        }
        partial = self.settings.data / f"{PLACE}.partial"
        partial.write_text(json.dumps(place))
        os.replace(partial, self.settings.data / PLACE)

    def _read_place(self) -> dict[str, int]:
        path: Path = self.settings.data / PLACE
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _restore(self, tensors: dict[str, Tensor], place: dict[str, int]) -> None:
        self.step, self.epoch, self.cursor = place["step"], place["epoch"], place["cursor"]
        assert int(tensors["step"]) == self.step, (
            f"checkpoint tensors of step {int(tensors['step'])} beside a place of step {self.step}"
        )
        self.drafter.load_state_dict({name: tensors[name] for name in self.drafter.state_dict()})
        self.optimiser.restore(tensors, self.step)


def run(settings: Settings) -> None:
    """Trains up to `steps`, reporting and exporting every `report_minutes` and at the end."""
    trainer = Trainer(settings)
    texts = trainer.corpus.validation
    log.info("%d training texts, %d validation texts", len(trainer.corpus.training), len(texts))
    began = reported = time.monotonic()
    sums: dict[str, float] = {}
    first = trainer.step
    while trainer.step < settings.steps:
        for name, value in trainer.train_step().items():
            sums[name] = sums.get(name, 0.0) + value / 50
        if trainer.step % 50 == 0:
            speed = (time.monotonic() - began) / (trainer.step - first)
            figures = " ".join(f"{name} {value:.3f}" for name, value in sums.items())
            log.info("step %d %s lr %.1e %.2f s", trainer.step, figures, trainer.rate(), speed)
            sums = {}
        if (
            time.monotonic() - reported > settings.report_minutes * 60
            or trainer.step == settings.steps
        ):
            trainer.save()
            report = evaluate(trainer.drafter, trainer.packer, settings, trainer.corpus)
            log.info("step %d %s", trainer.step, summary(report))
            export(trainer.drafter, settings.out)
            reported = time.monotonic()


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m drafter_svc.training.train`."""
    settings = parse_settings(__doc__, argv)
    torch.set_num_threads(settings.threads)
    torch.set_flush_denormal(True)  # tiny probabilities would slow every step threefold
    run(settings)


if __name__ == "__main__":
    main()
