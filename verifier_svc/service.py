"""The verifier's gRPC face: protobuf in, admission, events out; health and drain of the service.

Sees protobuf, as only the drafter's side (`draft_link.py`, `drafter_client.py`) does beside it.
Runs on the event loop and computes nothing: the engine's thread does.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from common.errors import InvalidRequest, Unavailable
from common.health import PROCESS, Health
from common.loading.tokenizer import Tokenizer
from common.logs import fields
from common.pb.v1 import verifier_pb2 as pb
from common.pb.v1 import verifier_pb2_grpc
from common.threads import stop_within
from verifier_svc.admission import Admission, Ask
from verifier_svc.drafting import DrafterStatus
from verifier_svc.events import Delta, Event, Finished, Gauges
from verifier_svc.observing import Observer
from verifier_svc.request import Counters, Request, SamplingMode, Times, TokenLogprobs
from verifier_svc.stream import Stream, Streams

log = logging.getLogger(__name__)

DRAFT_PATH = "draft-path"  # health name: SERVING while drafts can come
LONG_TEXT_CHARS = 2_000  # tokenised off the loop above this
HEAD_CHARS_PER_TOKEN = 16  # so much of a text for each token of context says if it is too long
CUT_GRACE_S = 2.0  # for the engine to end what is cut, and for the ends to be delivered
PULSE_S = 0.1  # how often health is looked at


class Engine(Protocol):
    """What the service needs from the engine; every method is callable from the loop thread."""

    def start(self) -> None: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request: Request) -> None: ...
    def gauges(self) -> Gauges: ...
    def problem(self, stall_seconds: float) -> str | None: ...
    def stop(self) -> None: ...


class DraftPath(Protocol):
    """The drafter's side that lives on the loop thread."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def status(self) -> DrafterStatus: ...


@dataclass(frozen=True)
class ModelInfo:
    """What GetInfo says about the loaded checkpoint."""

    model: str
    plan_json: str
    load_report_json: str


class VerifierService(verifier_pb2_grpc.VerifierServiceServicer):
    """Implements `common.server.Service`."""

    full_name = pb.DESCRIPTOR.services_by_name["VerifierService"].full_name
    health_names = (full_name, DRAFT_PATH)

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        tokenizer: Tokenizer,
        info: ModelInfo,
        observer: Observer,
        draft_path: DraftPath | None,
        *,
        max_live: int,
        max_stream_events: int,
        stall_seconds: float,
    ) -> None:
        self._engine, self._admission, self._tokenizer = engine, admission, tokenizer
        self._info, self._observer, self._draft_path = info, observer, draft_path
        self._stall_seconds = stall_seconds
        self._streams = Streams(max_live, max_stream_events, engine.abort)
        self._draining = False
        self._pulse: asyncio.Task[None] | None = None

    # -- common.server.Service ------------------------------------------------------------------

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the three rpcs."""
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)

    async def start(self, health: Health) -> None:
        """Serves from now on; health follows the engine and the draft path."""
        self._engine.start()
        if self._draft_path is not None:
            await self._draft_path.start()
        self._look(health)
        self._pulse = asyncio.create_task(self._look_again(health))

    def stop_admission(self) -> None:
        """New Generate calls get UNAVAILABLE."""
        self._draining = True

    async def drained(self) -> None:
        """Returns when no request is left."""
        await self._streams.idle()

    async def close(self) -> None:
        """Ends what is still running with ABORT, lets it be delivered, stops the engine."""
        self._draining = True
        self._streams.abort_all()
        try:
            async with asyncio.timeout(CUT_GRACE_S):
                await self._streams.idle()
        except TimeoutError:
            log.error("requests did not end", extra=fields(num_live=len(self._streams)))
        if self._pulse is not None:
            self._pulse.cancel()
        if not await stop_within(CUT_GRACE_S, self._engine.stop):
            log.error("the engine's step does not end; leaving it behind")
        if self._draft_path is not None:
            await self._draft_path.stop()

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes one engine step's events; called on the loop thread."""
        self._streams.deliver(events)
        for event in events:
            if isinstance(event, Finished):
                self._observer.finished(event)
        self._observer.gauges(self._engine.gauges())

    def _drafter_status(self) -> DrafterStatus:
        return DrafterStatus("NONE") if self._draft_path is None else self._draft_path.status()

    def _look(self, health: Health) -> None:
        problem = self._engine.problem(self._stall_seconds)
        if problem is not None and health.serving():
            log.error("engine not well", extra=fields(problem=problem))
        health.set(problem is None, PROCESS, self.full_name)
        health.set(self._drafter_status().state == "READY", DRAFT_PATH)

    async def _look_again(self, health: Health) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            self._look(health)

    # -- rpcs -----------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Streams one request; whatever ends the call early also ends the request."""
        self._check_serving()
        stream = await self._streams.open(_request_id(request))
        reader = asyncio.current_task()
        assert reader is not None
        try:
            admitted = await self._admit(request, stream.request_id)
            self._check_serving()  # admission may have taken a while
            stream.request = admitted
            self._engine.submit(admitted)
            await context.send_initial_metadata((("x-request-id", admitted.request_id),))
            await context.write(_started(admitted))
            # Not sooner: gRPC cannot send a status any more when its first write is cancelled.
            stream.attach(reader)
            await self._relay(admitted, stream, context)
        except asyncio.CancelledError:
            if stream.error is None:
                raise  # the client left or its deadline passed
            reader.uncancel()
            self._observer.slow_consumer()
            raise stream.error from None
        finally:
            self._streams.leave(stream)
            if stream.request is not None:
                self._observer.ended(stream.request, context.invocation_metadata())

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Asks the engine; the streams end by themselves."""
        return pb.AbortResponse(aborted_ids=self._streams.abort(request.request_ids))

    async def GetInfo(
        self, request: pb.GetVerifierInfoRequest, context: Any
    ) -> pb.GetVerifierInfoResponse:
        """Reads, never computes."""
        limits, gauges = self._admission.limits, self._engine.gauges()
        drafter = self._drafter_status()
        return pb.GetVerifierInfoResponse(
            model=self._info.model,
            plan_json=self._info.plan_json,
            load_report_json=self._info.load_report_json,
            max_context_len=limits.max_context_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=sorted(limits.eos_token_ids),
            drafter=pb.DrafterStatus(
                state=f"STATE_{drafter.state}",
                address=drafter.address,
                detail=drafter.detail,
                incarnation=drafter.incarnation,
            ),
            num_running=gauges.num_running,
            num_waiting=gauges.num_waiting,
            num_free_kv_blocks=gauges.num_free_kv_blocks,
            num_kv_blocks=gauges.num_kv_blocks,
        )

    def _check_serving(self) -> None:
        if self._draining:
            raise Unavailable("this verifier is shutting down; try another replica")
        if (problem := self._engine.problem(self._stall_seconds)) is not None:
            raise Unavailable(f"{problem}; try another replica")

    async def _admit(self, request: pb.GenerateRequest, request_id: str) -> Request:
        """Tokenises off the loop what takes longer than about a millisecond."""
        prompt_ids: Sequence[int] = request.token_ids.ids
        if request.WhichOneof("prompt") == "text":
            text, special = request.text, request.add_special_tokens
            if len(text) <= LONG_TEXT_CHARS:
                prompt_ids = self._tokenizer.encode(text, special)
            else:
                prompt_ids = await asyncio.to_thread(self._encode_long, text, special)
        return self._admission.admit(_ask(request, request_id, prompt_ids))

    def _encode_long(self, text: str, special: bool) -> Sequence[int]:
        """What is far too long is refused after its head: the rest could take many seconds."""
        room = self._admission.limits.max_context_len
        head = text[: room * HEAD_CHARS_PER_TOKEN]
        if len(head) < len(text) and len(self._tokenizer.encode(head, special)) > 2 * room:
            raise InvalidRequest(
                f"prompt is over {2 * room} tokens long; allowed: at most {room - 1}, so that one "
                f"token fits into the context of {room}; shorten it"
            )
        return self._tokenizer.encode(text, special)

    async def _relay(self, request: Request, stream: Stream, context: Any) -> None:
        """Writes events until the final one."""
        while True:
            event = await stream.next()
            if isinstance(event, Delta):
                self._observer.delta(request, event)
                await context.write(_delta(event))
            elif isinstance(event, Finished):
                await context.write(pb.GenerateResponse(finished=_finished(event)))
                return


def _request_id(request: pb.GenerateRequest) -> str:
    """The client's, or a new one. It travels in metadata and logs, hence the limits."""
    if not request.request_id:
        return uuid.uuid4().hex
    if not (request.request_id.isascii() and request.request_id.isprintable()):
        raise InvalidRequest(
            f"request_id {request.request_id!r} must be printable ASCII; choose another"
        )
    return request.request_id


def _ask(request: pb.GenerateRequest, request_id: str, prompt_ids: Sequence[int]) -> Ask:
    """Absent optionals become None; admission knows the defaults."""
    sampling, stopping, speculation = request.sampling, request.stopping, request.speculation
    return Ask(
        request_id=request_id,
        prompt_ids=prompt_ids,
        temperature=_optional(sampling, "temperature"),
        top_k=_optional(sampling, "top_k"),
        top_p=_optional(sampling, "top_p"),
        min_p=_optional(sampling, "min_p"),
        repetition_penalty=_optional(sampling, "repetition_penalty"),
        frequency_penalty=_optional(sampling, "frequency_penalty"),
        presence_penalty=_optional(sampling, "presence_penalty"),
        logit_bias=dict(sampling.logit_bias),
        seed=_optional(sampling, "seed"),
        mode=_mode(sampling.mode),
        logprobs=_optional(request, "logprobs"),
        max_tokens=_optional(stopping, "max_tokens"),
        min_tokens=_optional(stopping, "min_tokens"),
        stop_strings=list(stopping.stop),
        stop_token_ids=list(stopping.stop_token_ids),
        ignore_eos=_optional(stopping, "ignore_eos"),
        include_stop_str=_optional(stopping, "include_stop_str"),
        speculation_enabled=_optional(speculation, "enabled"),
        max_draft_tokens=_optional(speculation, "max_draft_tokens"),
        min_survival=_optional(speculation, "min_survival"),
    )


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _mode(mode: int) -> SamplingMode:
    if mode in (pb.SAMPLING_MODE_UNSPECIFIED, pb.SAMPLING_MODE_REJECTION):
        return SamplingMode.REJECTION
    if mode == pb.SAMPLING_MODE_COUPLED:
        return SamplingMode.COUPLED
    raise InvalidRequest(
        f"sampling.mode is {mode}; allowed: {', '.join(pb.SamplingMode.keys())}; choose one"
    )


def _started(request: Request) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.Started(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt,
            seed=request.sampling.seed,
        )
    )


def _delta(event: Delta) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        delta=pb.Delta(
            token_ids=event.token_ids,
            text=event.text,
            text_ends=event.text_ends,
            num_accepted_drafts=event.num_accepted_drafts,
            logprobs=[_logprobs(entry) for entry in event.logprobs],
        )
    )


def _logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=entry.logprob, top_ids=entry.top_ids, top_logprobs=entry.top_logprobs
    )


def _finished(event: Finished) -> pb.Finished:
    return pb.Finished(
        reason=f"FINISH_REASON_{event.reason.name}",
        matched_stop=event.matched_stop,
        matched_token_id=event.matched_token_id,
        num_prompt_tokens=event.num_prompt_tokens,
        num_output_tokens=event.num_output_tokens,
        seed=event.seed,
        text=event.text,
        speculation=_speculation(event.counters),
        timings=_timings(event.times, event.counters.num_rounds),
    )


def _speculation(counters: Counters) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        num_rounds=counters.num_rounds,
        num_drafted_rounds=counters.num_drafted_rounds,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        accepted_by_position=counters.accepted_by_position,
        num_fallback_rounds=counters.num_fallback_rounds,
    )


def _timings(times: Times, num_rounds: int) -> pb.Timings:
    """Microseconds; what never happened (an abort in the queue) is 0."""
    scheduled = times.scheduled or times.finished
    first = times.first_token or times.finished
    rounds = max(1, num_rounds)
    other = times.round - times.draft_wait - times.forward - times.verify
    return pb.Timings(
        queue_us=_us(scheduled - times.arrived),
        prefill_us=_us(first - scheduled),
        decode_us=_us(times.finished - first),
        mean_round=pb.RoundSplit(
            draft_wait_us=_us(times.draft_wait / rounds),
            drafter_us=_us(times.drafter / rounds),
            forward_us=_us(times.forward / rounds),
            verify_us=_us(times.verify / rounds),
            other_us=_us(other / rounds),
        ),
    )


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
