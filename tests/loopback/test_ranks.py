"""Both services over two ranks each, started by torchrun, on a tiny quantised V4 checkpoint.

On CPUs with gloo; where there are two CUDA devices, on those with NCCL as well.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from common.cli.processes import ServiceProcess
from common.client import VerifierClient
from common.models.registry import load_target
from common.nn.attention import AttentionBatch, Segment
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.streams import generate_together

HCA, NUM_TOKENS = 16, 24
PROMPTS = [[3, 9, 27, 5], [i * 5 % 90 for i in range(40)]]
FLAGS = ["--dtype", "fp32", "--threads", "1", "--drain-seconds", "20"]
# Clean-up of two services, their torchruns and a stream in progress on a busy machine.
END_S = 20.0


class Ranks(ServiceProcess):
    """One service under torchrun, two ranks."""

    def __init__(self, module: str, flags: list[str], folder: Path) -> None:
        launcher = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
        launcher += ["--shutdown-timeout", "10"]  # seconds from torchrun's SIGTERM to its SIGKILL
        super().__init__(
            "torch.distributed.run",
            [*launcher, "-m", module, *flags],
            listen=f"unix:{folder}/{module}.sock",
            log=folder / f"{module}.log",
        )

    def pids(self) -> dict[int, int]:
        """Rank -> process."""
        found: dict[int, int] = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
                environ = (process / "environ").read_bytes().split(b"\0")
            except OSError:  # gone meanwhile
                continue
            if parent == self.process.pid:
                found |= {int(v[5:]): int(process.name) for v in environ if v.startswith(b"RANK=")}
        return found

    def wait_end(self, pids: dict[int, int]) -> int:
        """torchrun's exit code, once it and all ranks are gone."""
        code = self.process.wait(END_S)
        assert not [pid for pid in pids.values() if os.path.exists(f"/proc/{pid}")]
        return code


def greedy(checkpoint: Path, prompt: list[int]) -> list[int]:
    """The ids of one process, decoded plainly."""
    model, _ = load_target(checkpoint, torch.float32)
    kv, table, ids, start = model.new_kv(8, HCA), list(range(8)), list(prompt), 0
    while len(ids) < len(prompt) + NUM_TOKENS:
        stop = len(ids)
        positions = torch.arange(start, stop)
        slots = torch.tensor(kv.slots_of(table, start, stop))
        batch = AttentionBatch([Segment(0, stop - start, stop, table)], slots, positions)
        hidden, _ = model.forward(torch.tensor(ids[start:]), kv, batch)
        ids.append(int(model.logits(hidden[-1:]).argmax()))
        start = stop
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_deepseek_v4(tmp_path_factory.mktemp("v4"), compress_rate_hca=HCA)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> list[list[int]]:
    return [greedy(checkpoint, prompt) for prompt in PROMPTS]


NO_TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(
    scope="module",
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_TWO_DEVICES])],
)
def pair(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ranks, Ranks, VerifierClient]]:
    """Verifier, drafter, and a client of the verifier."""
    folder, path = tmp_path_factory.mktemp("pair"), str(checkpoint)
    both = [*FLAGS, "--device", request.param]
    flags = ["--model", path, "--draft-model", path, "--drafter", f"unix:{folder}/drafter_svc.sock"]
    flags += ["--max-running", "4", "--max-batch-tokens", "32", "--draft-timeout-ms", "5000"]
    with (
        Ranks("verifier_svc", [*flags, *both], folder) as verifier,
        Ranks("drafter_svc", ["--model", path, "--target-model", path, *both], folder) as drafter,
    ):
        drafter.wait_ready()
        verifier.wait_ready()
        client = VerifierClient(verifier.listen)
        client.wait_for_drafter()
        yield verifier, drafter, client
        client.close()


OPTIONS: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "timeout_s": 60,
}


def test_two_ranks_stream_the_ids_of_one(
    pair: tuple[Ranks, Ranks, VerifierClient], plain: list[list[int]]
) -> None:
    verifier, drafter, client = pair
    done = generate_together(client, [(p, OPTIONS) for p in PROMPTS], under_way_after=1)
    assert [g.token_ids for g in done] == plain
    assert all(g.finished.speculation.num_accepted_tokens for g in done)
    report = json.loads(client.info().load_report_json)
    assert [peak > 0 for peak in report["peak_bytes_of_ranks"]] == [True, True]
    assert report["num_elsewhere"] > 0
    for service, what in ((verifier, "target"), (drafter, "drafter")):
        lines = re.findall(rf"{what} loaded rank=(\d) num_bytes=(\d+)", service.log.read_text())
        assert sorted(rank for rank, _ in lines) == ["0", "1"]
        read = dict(lines)
        assert int(read["1"]) < int(read["0"])  # rank 0 has the head too


def test_a_drafter_that_lost_a_rank_ends_and_costs_no_stream(
    pair: tuple[Ranks, Ranks, VerifierClient], plain: list[list[int]]
) -> None:
    _, drafter, client = pair
    pids = drafter.pids()

    def kill() -> None:
        os.kill(pids[1], signal.SIGKILL)

    cases = [(prompt, OPTIONS) for prompt in PROMPTS]
    done = generate_together(client, cases, under_way_after=1, on_start=kill)
    assert [g.token_ids for g in done] == plain
    assert drafter.wait_end(pids) == 1


def test_sigterm_to_rank_0_drains_and_ends_all_ranks(
    pair: tuple[Ranks, Ranks, VerifierClient], plain: list[list[int]]
) -> None:
    verifier, _, client = pair
    pids = verifier.pids()

    def end() -> None:
        # As torchrun does with its own SIGTERM: all ranks get it.
        for pid in (pids[1], pids[0]):
            os.kill(pid, signal.SIGTERM)

    done = generate_together(client, [(PROMPTS[1], OPTIONS)], under_way_after=1, on_start=end)
    assert [g.token_ids for g in done] == plain[1:]
    assert verifier.wait_end(pids) == 0, verifier.tail()


@pytest.mark.slow
def test_a_verifier_that_lost_a_rank_ends_with_one_line(checkpoint: Path, tmp_path: Path) -> None:
    with Ranks("verifier_svc", ["--model", str(checkpoint), *FLAGS], tmp_path) as verifier:
        verifier.wait_ready()
        pids, client = verifier.pids(), VerifierClient(verifier.listen)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as error:
            for i, _ in enumerate(client.stream(PROMPTS[0], **OPTIONS | {"max_tokens": 4000})):
                if i == 3:
                    os.kill(pids[1], signal.SIGKILL)
        client.close()
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert verifier.wait_end(pids) == 1
        assert time.monotonic() - began < END_S
    lines = [line for line in verifier.log.read_text().splitlines() if "dspark-verifier: " in line]
    assert len(lines) == 1 and "rank 0 of 2 lost another rank" in lines[0]


def test_a_number_of_ranks_that_does_not_divide_is_refused(checkpoint: Path) -> None:
    """Before the ranks look for each other, so nobody waits."""
    environ = {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = ["verifier_svc", "--model", str(checkpoint)]
    done = subprocess.run(
        [sys.executable, "-m", *command], env=os.environ | environ, capture_output=True, text=True
    )
    assert done.returncode == 2 and "must divide its o_groups 2" in done.stderr
