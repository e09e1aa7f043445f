"""Many streams of one verifier at once, and a moment in the middle when something happens.

For loopback tests that disturb a service while its clients read; knows not what is disturbed.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.client import Generation, VerifierClient

START_TIMEOUT_S = 60.0
Case = tuple[Sequence[int], Mapping[str, Any]]  # prompt ids, options of `VerifierClient.stream`


def generate_together(
    client: VerifierClient,
    cases: Sequence[Case],
    *,
    under_way_after: int,
    on_start: Callable[[], None] | None = None,
) -> list[Generation]:
    """Runs all cases at once and returns their results in order.

    `on_start` runs once every stream has given more than `under_way_after` tokens, which all must.
    Raises what a stream raises, or BrokenBarrierError if one does not get that far in a minute.
    """
    under_way = threading.Barrier(len(cases) + 1)

    def run(case: Case) -> Generation:
        prompt, options = case
        result, reached = Generation(), False
        for response in client.stream(prompt, **options):
            result.token_ids.extend(response.delta.token_ids)
            if not reached and len(result.token_ids) > under_way_after:
                reached = True
                under_way.wait(START_TIMEOUT_S)
            if response.HasField("finished"):
                result.finished = response.finished
        return result

    with ThreadPoolExecutor(len(cases)) as pool:
        futures = [pool.submit(run, case) for case in cases]
        under_way.wait(START_TIMEOUT_S)
        if on_start is not None:
            on_start()
        return [future.result() for future in futures]
