"""Settings shared by the training commands.

The defaults make in one run what made the shipped drafter in three; its README tells them.
"""

import argparse
import logging
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Settings:
    """Where things lie and how much to make; every field is a `--flag`."""

    target: Path = Path("~/.cache/dspark-split/smollm2-135m-instruct")
    data: Path = Path("~/.cache/dspark-split/training")
    # 0-based outputs of decoder layers; the last layer is forbidden (DeepSpec).
    taps: list[int] = field(default_factory=lambda: [2, 9, 16, 23, 28])
    num_slots: int = 96
    max_prompt: int = 160  # tokens, template included
    max_new: int = 176  # tokens; more texts teach more than longer ones
    tokens: int = 3_000_000  # answer tokens
    minutes: float = 600.0
    threads: int = 1
    # The drafter: small enough that a block costs a few ms on one CPU thread.
    num_layers: int = 2
    num_kv_heads: int = 9
    intermediate_size: int = 640
    draft_vocab_size: int = 16384  # fewer would be cheaper, but every missing token ends a round
    drafter_taps: list[int] = field(default_factory=lambda: [2, 16, 28])  # some of `taps`
    block_size: int = 4
    markov_rank: int = 48
    mask_token_id: int = 16  # <|empty_output|>: the tokenizer never writes it into text
    # Training.
    num_anchors: int = 160  # per text and visit
    num_columns: int = 4608  # of the draft vocabulary that a step looks at
    texts_per_step: int = 8
    # The loss compares with the target at this sampling temperature. Most of its users decode at
    # or near 0, where the flat part of a distribution does not count; at 0 itself a row would
    # teach one token only.
    temperature: float = 0.3
    # Until then, blocks of two rows over all anchors of 1.5 times as many texts: the same work
    # with twice the anchors, for the part all rows share.
    short_until: float = 0.32  # share of the steps
    steps: int = 10_000
    warmup: int = 60
    distill: float = 1.0  # weight at the start of an extra cross entropy against the target
    distill_until: float = 0.5  # share of the steps after which the loss is the paper's alone
    decay: float = 0.71  # share of the steps, at the end, in which the rate falls to zero
    learning_rate: float = 2.5e-3
    markov_rate: float = 3.0  # times the learning rate: its rows are seen rarely
    clip: float = 1.0
    seed: int = 0
    report_minutes: float = 5.0
    start: Path | None = None  # an exported drafter whose weights the run starts from
    out: Path = Path(__file__).parent.parent / "drafters" / "smollm2-135m"


def parse_settings(description: str | None, argv: list[str] | None = None) -> Settings:
    """Reads the flags, one per field of `Settings`, and switches logging on."""
    parser = argparse.ArgumentParser(description=description)
    defaults = Settings()
    for name, value in vars(defaults).items():
        kind = int if isinstance(value, list) else type(value)
        if value is None or isinstance(value, Path):
            kind = Path
        nargs = "+" if isinstance(value, list) else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, nargs=nargs)
    settings = Settings(**vars(parser.parse_args(argv)))
    settings.target = settings.target.expanduser()
    settings.data = settings.data.expanduser()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    return settings
