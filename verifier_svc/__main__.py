"""`dspark-verifier`: parse, decide from config files, then load and serve. Holds no logic."""

import logging
import os
import signal
import sys

from common.config import limit_threads, parse, run, torchrun_world, unread_variables
from common.cores import use_cores
from common.logs import fields, setup
from common.parallel import Parallel, joined
from common.server import Service, serve
from common.telemetry import Telemetry
from verifier_svc.config import VerifierConfig
from verifier_svc.planning import Decision, decide
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
    use_cores(config.service.cores)
    world = torchrun_world()
    setup(world.named("verifier"), config.service.log_format, config.service.log_level)
    decision = decide(config)
    if world.size > 1:
        from common.models.registry import check_ranks  # imports torch

        check_ranks(config.model, world.size)
    with joined(world, config.device) as parallel:
        if parallel.rank == 0:
            _serve(config, decision, parallel)
        else:
            from verifier_svc.build import follow

            follow(config, parallel)


def _serve(config: VerifierConfig, decision: Decision, parallel: Parallel) -> None:
    if unread := unread_variables(VerifierConfig):
        log.warning("variables that no setting reads", extra=fields(names=", ".join(unread)))
    for level, line in decision.lines():
        log.log(level, line)

    def build(telemetry: Telemetry) -> Service:
        from verifier_svc.build import build_service  # imports torch

        service = build_service(config, decision, telemetry, parallel)
        if parallel.size > 1:
            parallel.on_lost = _end
        return service

    try:
        serve(
            config.service,
            build,
            name="verifier",
            health_names=VerifierService.health_names,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
    finally:
        parallel.on_lost = None  # nobody catches that signal any more


def _end() -> None:
    """The ordinary way out, see common.server: rank 0 alone can compute nothing."""
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
