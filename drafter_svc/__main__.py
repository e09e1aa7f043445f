"""The drafter process: parse, build, serve. Importing it does nothing."""

import logging
import sys
from typing import TYPE_CHECKING

from common.config import limit_threads, parse, run, torchrun_world, unread_variables
from common.cores import use_cores
from common.logs import fields, setup
from common.parallel import Parallel, joined
from drafter_svc.config import DrafterConfig
from drafter_svc.planning import Decision, decide

if TYPE_CHECKING:
    from common.telemetry import Telemetry
    from drafter_svc.service import DrafterService

PROG = "dspark-drafter"

log = logging.getLogger(__name__)


def main() -> int:
    """Console script; returns the exit code: 2 for bad settings, 1 if the engine died."""
    return run(PROG, _start)


def _start() -> None:
    config = parse(DrafterConfig, prog=PROG, description="Serves a DSpark drafter to verifiers.")
    world = torchrun_world()
    setup(world.named("drafter"), config.service.log_format, config.service.log_level)
    limit_threads(config.service.threads)  # before torch is imported
    use_cores(config.service.cores)
    decision = decide(config)
    if world.size > 1:
        from common.models.drafters import check_ranks  # imports torch

        check_ranks(config.model, config.target_model, world.size)
    with joined(world, config.device) as parallel:
        if parallel.rank == 0:
            _serve(config, decision, parallel)
        else:
            from drafter_svc.build import follow

            follow(config, parallel)


def _serve(config: DrafterConfig, decision: Decision, parallel: Parallel) -> None:
    for name in unread_variables(DrafterConfig):
        log.warning("environment variable is not a setting", extra=fields(name=name))
    for level, line in decision.lines():
        log.log(level, line)

    from common.contract import MAX_MESSAGE_BYTES
    from common.server import serve
    from drafter_svc.build import load  # imports torch
    from drafter_svc.service import FULL_NAME, DrafterService

    built: list[DrafterService] = []

    def build(telemetry: "Telemetry") -> "DrafterService":
        drafter = load(config, decision, parallel)
        built.append(
            DrafterService(
                drafter,
                telemetry,
                max_verifiers=config.max_verifiers,
                max_step_rows=config.max_step_rows,
            )
        )
        return built[0]

    serve(
        config.service,
        build,
        name="dspark-drafter",
        health_names=(FULL_NAME,),
        max_message_bytes=MAX_MESSAGE_BYTES,
    )
    if built and built[0].failed:
        raise parallel.lost or SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
