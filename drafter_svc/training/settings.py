"""Settings shared by the training commands, with the values that made the shipped drafter."""

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
    max_new: int = 320  # tokens
    tokens: int = 2_000_000  # answer tokens
    minutes: float = 600.0
    threads: int = 1


def parse_settings(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> Settings:
    """Reads the flags, one per field of `Settings`, and switches logging on."""
    defaults = Settings()
    for name, value in vars(defaults).items():
        kind = int if isinstance(value, list) else type(value) if not isinstance(value, Path) else Path
        nargs = "+" if isinstance(value, list) else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, nargs=nargs)
    settings = Settings(**vars(parser.parse_args(argv)))
    settings.target = settings.target.expanduser()
    settings.data = settings.data.expanduser()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    return settings
