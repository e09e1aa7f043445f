"""All steps of training in order: target, texts, drafter, calibration, report. Resumable.

    python -m drafter_svc.training [--data DIR] [--out DRAFTER]

Takes the same flags as the single steps; texts stop at --tokens or --minutes, training at --steps.
"""

import sys

from common.loading.gguf_convert import default_target
from drafter_svc.training import calibrate, generate, report, train
from drafter_svc.training.settings import Settings, parse_settings
from drafter_svc.training.shards import num_answer_tokens


def main(argv: list[str]) -> None:
    """Runs every step that is not finished yet."""
    settings = parse_settings(__doc__, argv)
    if settings.target == Settings().target.expanduser():
        default_target(settings.target.parent)
    if num_answer_tokens(settings.data) < settings.tokens:
        generate.main(argv)
    train.main(argv)
    calibrate.main(argv)
    report.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
