"""What ranks send each other, and what they say when one of them is gone."""

import threading
from array import array

import pytest
import torch

from common.config import World, torchrun_world
from common.device import device_of
from common.errors import RankLost, StartupError
from common.parallel import ALONE, HEAD_LEN, Parallel, joined
from common.testing.ranks import run_ranks

LENGTHS = (1, 2, HEAD_LEN - 2, HEAD_LEN - 1, HEAD_LEN, HEAD_LEN + 1, 5 * HEAD_LEN)


def test_a_process_alone_sends_and_copies_nothing() -> None:
    x = torch.randn(3, dtype=torch.bfloat16)
    assert ALONE.sum(x) is x and ALONE.share(x) is x and ALONE.gather(7) == (7,)
    ALONE.stop()
    with joined(World(), "cpu") as parallel:
        assert parallel is ALONE


def test_messages_of_any_length_arrive_whole() -> None:
    sent = [array("q", range(-3, length - 3)) for length in LENGTHS]

    def work(parallel: Parallel) -> list[list[int]]:
        if parallel.rank == 0:
            for values in sent:
                parallel.send(values)
            parallel.stop()
            parallel.stop()  # said once
            return []
        received: list[list[int]] = []
        while message := parallel.receive():
            received.append(message)
        return received

    wanted = [list(message) for message in sent]
    assert run_ranks(3, work) == [[], wanted, wanted]


def test_sums_are_the_same_bits_everywhere() -> None:
    parts = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))

    def work(parallel: Parallel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = parts[parallel.rank]
        rounded = parallel.sum(own.bfloat16())
        in_order = parallel.sum(own.clone(), in_rank_order=True)
        return parallel.sum(own.clone()), in_order, rounded

    results = run_ranks(4, work)
    for total, in_order, rounded in results:
        assert torch.equal(total, results[0][0])
        assert torch.allclose(total, parts.sum(0), atol=1e-5)
        assert torch.equal(in_order, parts[0] + parts[1] + parts[2] + parts[3])
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, parts.bfloat16().float().sum(0).bfloat16())


def test_shared_tensors_and_gathered_numbers() -> None:
    def work(parallel: Parallel) -> tuple[torch.Tensor, tuple[int, ...]]:
        x = torch.full((2, 3), float(parallel.rank + 5))
        return parallel.share(x), parallel.gather(10 * parallel.rank)

    for x, numbers in run_ranks(3, work):
        assert torch.equal(x, torch.full((2, 3), 5.0)) and numbers == (0, 10, 20)


@pytest.mark.parametrize("hangs", [False, True], ids=["dies", "hangs"])
def test_a_lost_rank_is_noticed_and_named(hangs: bool) -> None:
    """A death at once, since connections close; a rank that hangs after the time limit."""
    told, noticed = threading.Event(), threading.Event()

    def work(parallel: Parallel) -> RankLost | None:
        if parallel.rank == 1:
            if hangs:
                assert noticed.wait(10)
            return None
        parallel.on_lost = told.set
        with pytest.raises(RankLost, match="rank 0 of 2 lost another rank") as lost:
            parallel.sum(torch.ones(2))
        noticed.set()
        parallel.stop()  # nobody to stop any more: no error, no wait
        return lost.value

    assert run_ranks(2, work, timeout_s=0.3 if hangs else 10.0)[0] is not None
    assert told.is_set()


def test_an_idle_rank_notices_that_rank_0_died() -> None:
    def work(parallel: Parallel) -> None:
        if parallel.rank:
            with pytest.raises(RankLost, match="rank 1 of 2 lost another rank"):
                parallel.receive()

    run_ranks(2, work)


def test_the_world_comes_from_torchrun() -> None:
    full = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "h"}
    full["MASTER_PORT"] = "1"
    assert torchrun_world({}) == torchrun_world({"WORLD_SIZE": "1"}) == World(0, 1, 0)
    assert torchrun_world(full) == World(3, 4, 1)
    assert (World().named("verifier"), World(3, 4, 1).named("verifier")) == (
        "verifier",
        "verifier[3]",
    )
    with pytest.raises(StartupError, match="WORLD_SIZE is 4 but LOCAL_RANK, MASTER_PORT is not"):
        torchrun_world({k: v for k, v in full.items() if k not in ("LOCAL_RANK", "MASTER_PORT")})
    with pytest.raises(StartupError, match=r"whole numbers .*'x'"):
        torchrun_world(full | {"RANK": "x"})


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda:1") == device_of("cuda", 1) == torch.device("cuda", 1)
    assert device_of("cpu", 5) == torch.device("cpu")
    with pytest.raises(StartupError, match="cuda:1 names one device for all ranks"):
        device_of("cuda:1", 1)
    with pytest.raises(StartupError, match="local rank 2 has no device: 2 are visible"):
        device_of("cuda", 2)
