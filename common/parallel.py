"""The processes ("ranks") that compute one model together: what they send each other, and its end.

Rank 0 is asked for work; it tells the others (`send`, `receive`), and all sum what each of them
computed of a layer (`sum`). torchrun starts the ranks; a process that it did not start is alone,
and everything here costs it nothing. Knows no model and no message.
"""

import re
import signal
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from common.config import World
from common.errors import RankLost

if TYPE_CHECKING:
    from torch import Tensor

# Inside a forward all ranks do nearly the same at the same time; whoever waits longer than this for
# another one waits for a process that hangs. (A death is noticed at once: its connections close.)
FORWARD_TIMEOUT_S = 120.0
# Between forwards ranks wait for a request to come, or for the slowest to have read its weights.
IDLE_TIMEOUT_S = 365 * 86_400.0
HEAD_LEN = 512  # values of a message that travel at once; what is longer takes a second transfer

Message = Sequence[int]  # int64 values; an empty one says that it is over


class Parallel:
    """One rank's view. `work`: the group that tensors go through, on the device. `orders`: the one
    for messages, on the CPU and without a time limit. Both are torch.distributed process groups.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        work: Any = None,
        orders: Any = None,
        local_rank: int | None = None,
    ) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.lost: RankLost | None = None  # set once, then nothing works any more
        self.on_lost: Callable[[], None] | None = None
        self._work, self._orders = work, orders
        self._sending = threading.Lock()
        self._over = False

    def sum(self, x: "Tensor", *, in_rank_order: bool = False) -> "Tensor":
        """x, of one shape on all ranks, added up in float32; x itself may be overwritten.

        Every rank gets the same bits: what follows, such as the choice of experts, is computed on
        each of them. in_rank_order: the order of additions must not depend on where an element lies
        in x either, as it does in a ring.
        """
        if self.size == 1:
            return x
        import torch

        total = x.float().contiguous()
        with self._watched():
            if not in_rank_order:
                self._work.allreduce([total]).wait()
                return total.to(x.dtype)
            parts = [torch.empty_like(total) for _ in range(self.size)]
            self._work.allgather([parts], [total]).wait()
        for part in parts[1:]:
            parts[0] += part
        return parts[0].to(x.dtype)

    def share(self, x: "Tensor") -> "Tensor":
        """Rank 0's x, into the x of every other rank."""
        if self.size > 1:
            with self._watched():
                self._work.broadcast([x], _from_rank_0()).wait()
        return x

    def gather(self, value: int) -> tuple[int, ...]:
        """Every rank's value. Returns when all have called it, however long that takes."""
        if self.size == 1:
            return (value,)
        import torch

        parts = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        with self._watched():
            self._orders.allgather([parts], [torch.tensor([value])]).wait()
        return tuple(int(part) for part in parts)

    def send(self, message: "array[int]") -> None:
        """From rank 0 to all others, each of which must `receive`."""
        import torch

        with self._sending:
            assert not self._over, "nobody listens any more"
            self._over = not message
            head = torch.zeros(HEAD_LEN, dtype=torch.int64)
            head[0] = len(message)
            if message:
                values = torch.frombuffer(message, dtype=torch.int64)
                first = values[: HEAD_LEN - 1]
                head[1 : 1 + len(first)] = first
            with self._watched():
                self._orders.broadcast([head], _from_rank_0()).wait()
                if len(message) >= HEAD_LEN:
                    self._orders.broadcast([values[HEAD_LEN - 1 :]], _from_rank_0()).wait()

    def receive(self) -> list[int]:
        """Rank 0's next message; waits for it as long as it takes."""
        import torch

        with self._watched():
            head = torch.empty(HEAD_LEN, dtype=torch.int64)
            self._orders.broadcast([head], _from_rank_0()).wait()
            length, *values = head.tolist()
            if length >= HEAD_LEN:
                rest = torch.empty(length - (HEAD_LEN - 1), dtype=torch.int64)
                self._orders.broadcast([rest], _from_rank_0()).wait()
                values += rest.tolist()
        return values[:length]

    def stop(self) -> None:
        """Rank 0, at the end: lets the others go, unless some are lost or it was said before."""
        if self.size > 1 and self.rank == 0 and self.lost is None and not self._over:
            self.send(array("q"))

    def close(self) -> None:
        """Drops the connections, which the other ranks notice."""
        self._work = self._orders = None

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Whatever torch.distributed raises means that a rank died or hangs."""
        try:
            yield
        except RuntimeError as error:
            cause = re.sub(r"^\[\S+\] ", "", str(error)).split(". ")[0]
            self.lost = RankLost(
                f"rank {self.rank} of {self.size} lost another rank ({cause}): all ranks end; see "
                "that rank's log, then start all of them again"
            )
            if self.on_lost is not None:
                self.on_lost()
            raise self.lost from error


ALONE = Parallel()


@contextmanager
def joined(world: World, device: str, timeout_s: float = FORWARD_TIMEOUT_S) -> Iterator[Parallel]:
    """The ranks of `world`, connected: NCCL between CUDA devices, gloo between CPUs.

    On leaving rank 0 lets the others go. Raises StartupError for a device that this rank does not
    have, RankLost if a rank did not come or was lost meanwhile.
    """
    if world.size == 1:
        yield ALONE
        return
    parallel = _connected(world, device, timeout_s)
    yield parallel
    parallel.stop()
    if parallel.lost is not None:
        raise parallel.lost
    parallel.close()
    _disconnect()


def leave_signals_to_rank_0() -> None:
    """For the other ranks, whose end is rank 0's: a signal to all of them begins its drain."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _connected(world: World, device: str, timeout_s: float) -> Parallel:
    import torch
    from torch import distributed

    from common.device import device_of

    place = device_of(device, world.local_rank)
    limit = timedelta(seconds=timeout_s)
    try:
        if place.type == "cuda":
            torch.cuda.set_device(place)
            distributed.init_process_group("nccl", timeout=limit, device_id=place)
        else:
            distributed.init_process_group("gloo", timeout=limit)
        orders = distributed.new_group(backend="gloo", timeout=timedelta(seconds=IDLE_TIMEOUT_S))
    except RuntimeError as error:
        raise RankLost(
            f"rank {world.rank} of {world.size} could not connect to the others: {error}"
        ) from error
    return Parallel(world.rank, world.size, distributed.group.WORLD, orders, world.local_rank)


def _disconnect() -> None:
    from torch import distributed

    distributed.destroy_process_group()


def _from_rank_0() -> Any:
    from torch import distributed

    options = distributed.BroadcastOptions()
    options.rootRank = 0
    return options
