"""Start-up that must fail, health that stays live, and drains: real processes, ended by signals."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.cli.processes import ServiceProcess
from common.pb.v1 import verifier_pb2 as pb
from common.pb.v1 import verifier_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def fail_to_start(listen: str, *flags: str) -> str:
    """Runs a verifier that must refuse its settings; returns the line it says so with."""
    command = [sys.executable, "-P", "-m", "verifier_svc", "--listen", listen, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("dspark-verifier: "), done.stderr
    return line


def without(folder: Path, copy: Path, name: str) -> Path:
    """A copy of a checkpoint folder that lacks one file."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(name))
    return copy


BAD_SETTINGS: dict[str, tuple[Callable[[Any, Path], list[str]], list[str]]] = {
    "no model": (lambda pair, tmp: [], ["--model (or DSPARK_MODEL) is required"]),
    "unknown flag": (lambda pair, tmp: ["--modell", "x"], ["--modell", "--help"]),
    "unknown folder": (lambda pair, tmp: ["--model", "/no/such"], ["/no/such", "cannot be opened"]),
    "folder without config": (
        lambda pair, tmp: ["--model", str(without(pair.target, tmp / "c", "config.json"))],
        ["has no config.json"],
    ),
    "truncated weights": (
        lambda pair, tmp: ["--model", str(truncated(pair, tmp))],
        ["safetensors"],
    ),
    "drafter without its config": (
        lambda pair, tmp: ["--model", str(pair.target), "--drafter", "unix:/x"],
        ["--drafter unix:/x needs --draft-model"],
    ),
    "draft model that is none": (
        lambda pair, tmp: [
            *("--model", str(pair.target), "--drafter", "unix:/x"),
            *("--draft-model", str(pair.target)),
        ],
        ["has nothing"],
    ),
    "K below the block": (
        lambda pair, tmp: [
            *("--model", str(pair.target), "--drafter", "unix:/x"),
            *("--draft-model", str(pair.draft), "--num-speculative-tokens", "2"),
        ],
        ["num_speculative_tokens", "2", "4"],
    ),
    "two sizes for the KV cache": (
        lambda pair, tmp: ["--model", "m", "--kv-blocks", "8", "--kv-memory-mb", "8"],
        ["--kv-blocks 8", "--kv-memory-mb 8"],
    ),
    "socket of a running server": (
        lambda pair, tmp: ["--model", str(pair.target), "--listen", pair.verifier.listen],
        ["in use by a running server"],
    ),
}


def truncated(pair: Any, tmp: Path) -> Path:
    """A checkpoint whose weight file ends early."""
    copy = tmp / "c"
    shutil.copytree(pair.target, copy)
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return copy


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_end_with_one_line_and_code_2(pair: Any, case: str, tmp_path: Path) -> None:
    flags, fragments = BAD_SETTINGS[case]
    line = fail_to_start(f"unix:{tmp_path}/s", *flags(pair, tmp_path))
    for fragment in fragments:
        assert fragment in line, line


class Verifier:
    """A verifier process of one test, with a client."""

    def __init__(self, pair: Any, folder: Path, *flags: str) -> None:
        self.socket = folder / "v"
        command = ["--model", str(pair.target), "--dtype", "fp32", *flags]
        self.process = ServiceProcess(
            "verifier_svc", command, listen=f"unix:{self.socket}", log=folder / "log"
        )
        self.process.wait_ready()
        self.channel = grpc.insecure_channel(self.process.listen)
        self.stub = verifier_pb2_grpc.VerifierServiceStub(self.channel)

    def watch(self, name: str) -> list[int]:
        """The statuses of a health name, growing as they come; the first has come."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=name))
        seen: list[int] = []

        def read() -> None:
            try:
                for answer in call:
                    seen.append(answer.status)
            except grpc.RpcError:
                pass  # the server has ended

        threading.Thread(target=read, daemon=True).start()
        eventually(lambda: bool(seen))
        return seen

    def term(self) -> None:
        self.process.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        return self.process.process.wait(20)


def eventually(happens: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


@pytest.fixture
def start(pair: Any, tmp_path: Path) -> Iterator[Callable[..., Verifier]]:
    made: list[Verifier] = []

    def make(*flags: str) -> Verifier:
        made.append(Verifier(pair, tmp_path, *flags))
        return made[-1]

    yield make
    for verifier in made:
        verifier.process.stop()
        verifier.channel.close()


@pytest.mark.slow
def test_a_drain_finishes_streams_and_cuts_what_takes_too_long(
    start: Callable[..., Verifier], make_ask: Any
) -> None:
    port = free_port()
    flags = ["--drain-seconds", "3", "--metrics-port", str(port), "--log-format", "json"]
    verifier = start(*flags)
    process, service = verifier.watch(""), verifier.watch("dspark.v1.VerifierService")
    list(verifier.stub.Generate(make_ask(stopping={"max_tokens": 5, "ignore_eos": True})))
    endless = verifier.stub.Generate(make_ask(endless=True))
    next(endless), next(endless)
    metrics = scrape(port)
    assert 'vllm:request_success_total{finished_reason="max_tokens"} 1.0' in metrics
    assert "vllm:num_requests_running 1.0" in metrics
    assert "vllm:time_to_first_token_seconds_count 2.0" in metrics
    short = verifier.stub.Generate(make_ask(stopping={"max_tokens": 100, "ignore_eos": True}))
    for call in (endless, short):
        next(call), next(call)
    verifier.term()
    eventually(lambda: process[-1] == service[-1] == NOT_SERVING)
    with pytest.raises(grpc.RpcError) as refused:
        list(verifier.stub.Generate(make_ask(), timeout=5))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in refused.value.details()
    assert list(short)[-1].finished.reason == pb.FINISH_REASON_MAX_TOKENS
    assert list(endless)[-1].finished.reason == pb.FINISH_REASON_ABORT
    assert verifier.exit_code() == 0
    assert not verifier.socket.exists()
    assert process == [SERVING, NOT_SERVING]
    logged = [json.loads(line) for line in verifier.process.log.read_text().splitlines()]
    assert [entry["message"] for entry in logged][-3:] == ["serving", "draining", "stopped"]


@pytest.mark.slow
def test_health_follows_the_draft_path_and_a_second_signal_cuts_at_once(
    pair: Any, start: Callable[..., Verifier], make_ask: Any, tmp_path: Path
) -> None:
    flags = ["--model", str(pair.draft), "--target-model", str(pair.target), "--dtype", "fp32"]
    listen, log = f"unix:{tmp_path}/d", tmp_path / "d.log"
    with ServiceProcess("drafter_svc", flags, listen=listen, log=log):
        verifier = start("--draft-model", str(pair.draft), "--drafter", listen)
        process, path = verifier.watch(""), verifier.watch("draft-path")
        eventually(lambda: path[-1] == SERVING, seconds=30)
    eventually(lambda: path[-1] == NOT_SERVING)
    assert process == [SERVING], "a verifier without a drafter still serves"
    endless = verifier.stub.Generate(make_ask(endless=True))
    next(endless), next(endless)
    verifier.term()  # to drain, which may take 30 s
    eventually(lambda: process[-1] == NOT_SERVING)
    verifier.term()
    started = time.monotonic()
    assert list(endless)[-1].finished.reason == pb.FINISH_REASON_ABORT
    assert verifier.exit_code() == 0
    assert time.monotonic() - started < 10
