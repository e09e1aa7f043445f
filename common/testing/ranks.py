"""Several ranks as threads of one process, connected by gloo as processes would be.

Starting threads takes milliseconds, starting a process that imports torch takes a second.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from common.parallel import Parallel

T = TypeVar("T")


def run_ranks(num_ranks: int, work: Callable[[Parallel], T], timeout_s: float = 20.0) -> list[T]:
    """`work` of every rank at once; returns its results in rank order, or raises the first error.

    timeout_s: of every exchange. However `work` ends, its rank's connections close.
    """
    store, meeting = distributed.HashStore(), threading.Barrier(num_ranks)

    def rank(number: int) -> T:
        torch.set_num_threads(1)
        work_group, orders_group = (
            distributed.ProcessGroupGloo(
                distributed.PrefixStore(name, store),
                number,
                num_ranks,
                timedelta(seconds=timeout_s),
            )
            for name in ("work", "orders")
        )
        parallel = Parallel(number, num_ranks, work_group, orders_group)
        del work_group, orders_group
        meeting.wait(timeout_s)
        try:
            return work(parallel)
        finally:
            parallel.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(rank, number) for number in range(num_ranks)]
        return [future.result() for future in futures]
