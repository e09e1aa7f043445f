"""The real drafter process on a Unix socket, and the real client as a verifier's engine has it."""

import asyncio
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import torch

from common.contract import Contract
from common.models.contracts import read_contract
from common.models.dspark_qwen3 import load_drafter
from common.pb.v1 import drafter_pb2 as pb
from common.pb.v1 import drafter_pb2_grpc
from common.telemetry import M, Metric, Telemetry
from common.tensors import to_bytes
from common.testing.tiny import tiny_drafter, tiny_target
from verifier_svc.draft_link import LinkSettings
from verifier_svc.drafter_client import DrafterClient
from verifier_svc.drafting import Drafts
from verifier_svc.request import (
    Entry,
    Plan,
    Request,
    SamplingParams,
    SpeculationParams,
    StopParams,
)

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ["--dtype", "fp32", "--max-step-rows", "32", "--max-sessions", "6", "--max-verifiers", "3"]
TIMEOUT_S = 0.5
T = TypeVar("T")


class Pair:
    """Checkpoints, their contract, and what the drafter says of a request when asked alone."""

    def __init__(self, folder: Path) -> None:
        self.target = tiny_target(folder / "target", layers=3)
        self.draft = tiny_drafter(folder / "draft", self.target, "vanilla", good=False)
        self.contract = read_contract(self.draft, self.target)
        self.model = load_drafter(self.draft, self.target, torch.float32)[0]

    def rows(self, request: Request, start: int, stop: int) -> torch.Tensor:
        """Made-up taps, a function of request and position."""
        draw = torch.Generator().manual_seed(request.session_id)
        return torch.randn(400, self.model.config.feature_width, generator=draw)[start:stop]

    def read(self, spans: list[tuple[Request, int, int]]) -> bytes:
        return b"".join(to_bytes(self.rows(*span), "fp32") for span in spans)

    def expected(self, request: Request) -> tuple[int, ...]:
        """Greedy drafts after the request's last token."""
        model, length = self.model, len(request.token_ids) - 1
        kv, positions = model.new_kv(1, length + 4), torch.arange(length)
        model.ingest(model.project(self.rows(request, 0, length)), kv, positions, positions)
        token = torch.tensor([request.token_ids[-1]])
        hidden, logits = model.block(token, torch.tensor([length]), 4, kv, [[0]])
        drafts = []
        for k in range(4):
            bias, _ = model.bias(token, hidden[:, k], None)
            assert bias is not None
            token = model.to_target_ids((logits[:, k] + bias).argmax(-1))
            drafts.append(int(token))
        return tuple(drafts)


class Process:
    """`python -m drafter_svc` in its own session; always ended."""

    def __init__(self, pair: Pair, listen: str, log: Path) -> None:
        flags = ["--model", str(pair.draft), "--target-model", str(pair.target), *FLAGS]
        command = [sys.executable, "-m", "drafter_svc", "--listen", listen, *flags]
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        self.listen = listen

    def info(self, timeout_s: float = 30.0) -> pb.GetDrafterInfoResponse:
        """Waits until the process answers."""
        with grpc.insecure_channel(self.listen) as channel:
            stub = drafter_pb2_grpc.DrafterServiceStub(channel)
            request = pb.GetDrafterInfoRequest()
            return stub.GetInfo(request, timeout=timeout_s, wait_for_ready=True)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(10)


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="package")
def drafter(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("drafter")
    process = Process(pair, f"unix:{folder}/d.sock", folder / "log")
    try:
        process.info()
        yield process
    finally:
        assert process.end(signal.SIGTERM) == 0


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(5)
    made.close()


def on_loop(loop: asyncio.AbstractEventLoop, work: Awaitable[T]) -> T:
    async def run() -> T:
        return await work

    return asyncio.run_coroutine_threadsafe(run(), loop).result(10)


class Lateness(Telemetry):
    """Counts late steps by reason."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Counter[str]()

    def record(self, metric: Metric, value: float = 1, **labels: str) -> None:
        if metric == M.DRAFT_LATE:
            self.of[labels["reason"]] += int(value)


class Verifier:
    """The engine's side of one client, with requests that grow."""

    numbers, timeout_s = itertools.count(1), TIMEOUT_S

    def __init__(
        self, loop: asyncio.AbstractEventLoop, pair: Pair, listen: str, contract: Contract
    ) -> None:
        self.loop, self.pair, self.changes = loop, pair, list[bool]()
        self.late = Lateness()
        settings = LinkSettings(listen, draft_timeout_ms=TIMEOUT_S * 1e3, feature_dtype="fp32")

        async def make() -> DrafterClient:
            client = DrafterClient(settings, contract, self.late, self.changes.append)
            await client.start()
            return client

        self.client = on_loop(loop, make())

    @property
    def state(self) -> str:
        return self.client.status().state

    def request(self, length: int = 9, **sampling: Any) -> Request:
        number = next(self.numbers)
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        tokens = [(number + i) % 60 for i in range(length + 1)]
        return Request(
            str(number), number, tokens, length, params, StopParams(), SpeculationParams(),
            frozenset(), 400, num_computed=length,
        )  # fmt: skip

    def propose(self, *requests: Request) -> Drafts:
        entries = tuple(Entry(r, r.num_computed, 1, True, 4) for r in requests)
        return self.client.propose(Plan(1, entries), self.pair)

    def drafts(self, *requests: Request) -> Drafts:
        """Rounds until all requests have a draft: long contexts catch up first."""
        deadline = time.monotonic() + 10
        while len((drafts := self.propose(*requests)).by_session) < len(requests):
            assert time.monotonic() < deadline, self.client.status()
            time.sleep(0.002)
        return drafts

    def grow(self, request: Request, num_tokens: int) -> None:
        request.token_ids += [(7 * i + request.session_id) % 60 for i in range(num_tokens)]
        request.num_computed = len(request.token_ids) - 1

    def stop(self) -> None:
        on_loop(self.loop, self.client.stop())


@pytest.fixture
def connect(loop: asyncio.AbstractEventLoop, pair: Pair) -> Iterator[Callable[..., Verifier]]:
    made: list[Verifier] = []

    def make(process: Process, contract: Contract = pair.contract) -> Verifier:
        made.append(Verifier(loop, pair, process.listen, contract))
        return made[-1]

    yield make
    for verifier in made:
        verifier.stop()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """`eventually(predicate)` waits until it holds, and fails if it never does."""

    def wait(happens: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not happens():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.01)

    return wait


@pytest.fixture
def start(pair: Pair) -> Iterator[Callable[[str, Path], Process]]:
    """`start(listen, log)`: another process, killed at the end if it still runs."""
    made: list[Process] = []

    def make(listen: str, log: Path) -> Process:
        made.append(Process(pair, listen, log))
        made[-1].info()
        return made[-1]

    yield make
    for process in made:
        process.process.kill()
        process.process.wait()
