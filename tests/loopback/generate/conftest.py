"""One real verifier with one real drafter on Unix sockets, shared by this folder's tests.

After every test both must hold nothing: no request, no KV block, no draft session.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.cli.processes import ServiceProcess
from common.pb.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2_grpc
from common.pb.v1 import verifier_pb2 as pb
from common.testing.tiny import tiny_drafter, tiny_target

MAX_RUNNING, MAX_WAITING, MAX_LEN = 4, 2, 8192
FLAGS = ["--dtype", "fp32", "--max-running", str(MAX_RUNNING), "--max-waiting", str(MAX_WAITING)]
FLAGS += ["--max-stream-events", "16", "--draft-timeout-ms", "2000"]


class Served:
    """Addresses, stubs and checkpoints of the running pair."""

    max_running, max_waiting, max_len = MAX_RUNNING, MAX_WAITING, MAX_LEN

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = tiny_target(folder / "target", max_len=MAX_LEN)
        self.draft = tiny_drafter(folder / "draft", self.target)
        drafter = ["--model", str(self.draft), "--target-model", str(self.target)]
        self.drafter = self.start("drafter_svc", "d", *drafter, "--dtype", "fp32")
        self.flags = ["--model", str(self.target), "--draft-model", str(self.draft), *FLAGS]
        self.flags += ["--drafter", self.drafter.listen]
        self.verifier = self.start("verifier_svc", "v", *self.flags)
        self.channel = grpc.insecure_channel(self.verifier.listen)
        self.stub = verifier_pb2_grpc.VerifierServiceStub(self.channel)
        self.drafter_channel = grpc.insecure_channel(self.drafter.listen)
        self.drafter_stub = drafter_pb2_grpc.DrafterServiceStub(self.drafter_channel)

    def start(self, module: str, name: str, *flags: str) -> ServiceProcess:
        """Another process in the same folder; not waited for."""
        return ServiceProcess(
            module,
            list(flags),
            listen=f"unix:{self.folder}/{name}",
            log=self.folder / f"{name}.log",
        )

    def wait_ready(self) -> None:
        """Both serve and have found each other."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ServiceProcess.wait_ready, (self.drafter, self.verifier)))
        self.eventually(lambda: self.info().drafter.state == pb.DrafterStatus.STATE_READY)

    def info(self) -> pb.GetVerifierInfoResponse:
        """What the verifier says of itself."""
        return self.stub.GetInfo(pb.GetVerifierInfoRequest(), timeout=5)

    def generate(self, **fields: Any) -> list[pb.GenerateResponse]:
        """A whole stream; greedy unless asked otherwise."""
        return list(self.stub.Generate(ask(**fields), timeout=60))

    def refused(self, **fields: Any) -> grpc.RpcError:
        """The error of a call that must fail."""
        with pytest.raises(grpc.RpcError) as caught:
            self.generate(**fields)
        return caught.value

    def assert_empty(self) -> None:
        """Nothing leaked on either side."""

        held: tuple[int, ...] = ()

        def empty() -> bool:
            nonlocal held
            info = self.info()
            sessions = self.drafter_stub.GetInfo(
                drafter_pb2.GetDrafterInfoRequest(), timeout=5
            ).num_sessions
            taken = info.num_kv_blocks - info.num_free_kv_blocks
            held = (info.num_running, info.num_waiting, taken, sessions)
            return not any(held)

        try:
            self.eventually(empty)
        except AssertionError:
            raise AssertionError(
                f"left behind: (running, waiting, blocks, sessions) {held}"
            ) from None

    @staticmethod
    def eventually(happens: Callable[[], bool], seconds: float = 10.0) -> None:
        """Waits until it holds, and fails if it never does."""
        deadline = time.monotonic() + seconds
        while not happens():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends both."""
        self.channel.close()
        self.drafter_channel.close()
        codes = [process.stop() for process in (self.verifier, self.drafter)]
        assert codes == [0, 0], self.verifier.tail() + self.drafter.tail()


def ask(*, endless: bool = False, **fields: Any) -> pb.GenerateRequest:
    """A request; `endless` runs to the end of the context."""
    fields.setdefault("sampling", {"temperature": 0.0})
    if endless:
        fields["stopping"] = {"ignore_eos": True}
    if not {"text", "token_ids"} & set(fields):
        fields["text"] = "hello"
    return pb.GenerateRequest(**fields)


@pytest.fixture(scope="session")
def make_ask() -> Callable[..., pb.GenerateRequest]:
    """`ask`: test files cannot import each other."""
    return ask


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("pair"))
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


@pytest.fixture
def served(pair: Served) -> Iterator[Served]:
    """The pair, and after the test nothing left in it and no bug in its log."""
    num_bytes = pair.verifier.log.stat().st_size
    yield pair
    pair.assert_empty()
    log = pair.verifier.log.read_bytes()[num_bytes:].decode()
    assert "Traceback" not in log, log
