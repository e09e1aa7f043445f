"""All steps of training in order: target, texts, drafter, report, calibration. Resumable.

    python -m drafter_svc.training [--data DIR] [--out DRAFTER]

Takes the same flags as the single steps; texts stop at --tokens or --minutes, training at --steps.
"""

import logging
import sys

from common.loading.gguf_convert import default_target
from drafter_svc.training import calibrate, generate, report, train
from drafter_svc.training.settings import Settings, parse_settings
from drafter_svc.training.shards import list_shards, read_meta

log = logging.getLogger("dspark.training")


def main(argv: list[str]) -> None:
    """Runs every step that is not finished yet."""
    settings = parse_settings(__doc__, argv)
    if settings.target == Settings().target.expanduser():
        default_target(settings.target.parent)
    shards = list_shards(settings.data)
    written = read_meta(shards[-1]).get("num_tokens", 0) if shards else 0
    if written < settings.tokens:
        generate.main(argv)
    train.main(argv)
    calibrate.main(argv)
    report.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
