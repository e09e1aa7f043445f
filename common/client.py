"""A small synchronous client of the verifier: what the command line, the demo and the benches use.

An edge: it imports the stubs so that its callers need not. Yields the protobuf messages it gets.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.errors import Unavailable
from common.pb.v1 import verifier_pb2, verifier_pb2_grpc

MAX_MESSAGE_BYTES = 4 * 1024 * 1024


@dataclass
class Generation:
    """One finished stream, collected."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: Any = None  # verifier_pb2.Finished
    first_token_s: float = 0.0  # from the call to the first delta
    total_s: float = 0.0  # from the call to the end of the stream


class VerifierClient:
    """One channel to one verifier; `address` is unix:PATH or HOST:PORT."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        self.address = address
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = verifier_pb2_grpc.VerifierServiceStub(self._channel)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        coupled: bool = False,
        drafting: bool = True,
        timeout_s: float | None = None,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
    ) -> Iterator[Any]:
        """Yields GenerateResponse messages. Raises grpc.RpcError with the server's status."""
        request = verifier_pb2.GenerateRequest(
            sampling=verifier_pb2.Sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                mode="SAMPLING_MODE_COUPLED" if coupled else "SAMPLING_MODE_REJECTION",
            ),
            stopping=verifier_pb2.Stopping(max_tokens=max_tokens, ignore_eos=ignore_eos, stop=stop),
            speculation=verifier_pb2.Speculation(enabled=drafting),
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        yield from self._stub.Generate(request, timeout=timeout_s)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Runs `stream` to its end."""
        result, started = Generation(), time.perf_counter()
        for response in self.stream(prompt, **options):
            kind = response.WhichOneof("event")
            if kind == "delta":
                result.first_token_s = result.first_token_s or time.perf_counter() - started
                result.token_ids.extend(response.delta.token_ids)
                result.text += response.delta.text
            elif kind == "finished":
                result.finished = response.finished
                result.text += response.finished.text
        result.total_s = time.perf_counter() - started
        return result

    def info(self, timeout_s: float = 5.0) -> Any:
        """GetVerifierInfoResponse. Raises Unavailable when nothing answers."""
        try:
            return self._stub.GetInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise Unavailable(f"no verifier answers at {self.address}: {error.details()}") from None

    def wait_for_drafter(self, timeout_s: float = 30.0) -> None:
        """Returns once the verifier's link to its drafter is ready. Raises Unavailable."""
        deadline = time.monotonic() + timeout_s
        while True:
            drafter = self.info().drafter
            if drafter.state == verifier_pb2.DrafterStatus.STATE_READY:
                return
            if time.monotonic() > deadline:
                state = verifier_pb2.DrafterStatus.State.Name(drafter.state)
                raise Unavailable(
                    f"the verifier at {self.address} has no drafter after {timeout_s:g} s: "
                    f"{state} at {drafter.address!r} {drafter.detail}"
                )
            time.sleep(0.05)

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()
