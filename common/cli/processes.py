"""Starts a service as a child process, waits for its health, and always ends it.

Used by the demo, the benches and the loopback tests; knows nothing of what the service does.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import StartupError

SERVING = health_pb2.HealthCheckResponse.SERVING
STOP_GRACE_S = 10.0


def exit_on_sigterm() -> None:
    """SIGTERM ends this process by SystemExit, so that its services are ended too; main thread."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class ServiceProcess:
    """One `python -m MODULE FLAGS` in its own session, so that Ctrl-C reaches only the parent.

    Its output goes to `log`. Use as a context manager: leaving it sends SIGTERM, then SIGKILL.
    """

    def __init__(self, module: str, flags: list[str], *, listen: str, log: Path) -> None:
        self.module, self.listen, self.log = module, listen, log
        command = [sys.executable, "-P", "-m", module, *flags, "--listen", listen]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Returns once the service reports SERVING. Raises StartupError with its last output."""
        deadline = time.monotonic() + timeout_s
        with grpc.insecure_channel(self.listen) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    raise StartupError(self._failure(f"exited with {self.process.returncode}"))
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                except grpc.RpcError:
                    time.sleep(0.05)
                    continue
                if answer.status == SERVING:
                    return
                time.sleep(0.05)
        raise StartupError(self._failure(f"was not ready within {timeout_s:g} s"))

    def stop(self) -> int:
        """SIGTERM, a grace period, SIGKILL; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            # A stopped process cannot act on SIGTERM before it continues.
            self.process.send_signal(signal.SIGCONT)
            try:
                self.process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def tail(self, num_lines: int = 15) -> str:
        """The last lines the service printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def _failure(self, what: str) -> str:
        return f"{self.module} on {self.listen} {what}; its last output:\n{self.tail()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
