"""`dspark-verifier`: parse, decide from config files, then load and serve. Holds no logic."""

import logging
import sys

from common.config import limit_threads, parse, run, unread_variables
from common.logs import fields, setup
from common.server import Service, serve
from common.telemetry import Telemetry
from verifier_svc.config import VerifierConfig
from verifier_svc.planning import decide
from verifier_svc.service import VerifierService

PROG = "dspark-verifier"
MAX_MESSAGE_BYTES = 4 << 20  # the longest prompt as text is far below

log = logging.getLogger(__name__)


def main() -> int:
    """Serves until a signal; returns the exit code, 2 for settings that cannot work."""
    return run(PROG, _start)


def _start() -> None:
    config = parse(
        VerifierConfig, prog=PROG, description="Runs the target model and streams tokens."
    )
    limit_threads(config.service.threads)
    setup("verifier", config.service.log_format, config.service.log_level)
    if unread := unread_variables(VerifierConfig):
        log.warning("variables that no setting reads", extra=fields(names=", ".join(unread)))
    decision = decide(config)
    for level, line in decision.lines():
        log.log(level, line)

    def build(telemetry: Telemetry) -> Service:
        from verifier_svc.build import build_service  # imports torch

        return build_service(config, decision, telemetry)

    serve(
        config.service,
        build,
        name="verifier",
        health_names=VerifierService.health_names,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )


if __name__ == "__main__":
    sys.exit(main())
