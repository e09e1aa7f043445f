"""What the verifier records about its requests: metrics as they run, one span tree at their end.

Loop thread only. Knows metric and span names, neither grpc nor protobuf nor torch.
"""

import time
from collections.abc import Iterable

from common.telemetry import M, S, Telemetry
from verifier_svc.events import Delta, Finished, Gauges
from verifier_svc.request import Request


class Observer:
    """Everything is skipped while telemetry is off."""

    def __init__(self, telemetry: Telemetry, model: str) -> None:
        self._telemetry, self._model = telemetry, model
        self._last_delta: dict[Request, float] = {}

    def gauges(self, gauges: Gauges) -> None:
        """After every step."""
        if not self._telemetry.counts:
            return
        record = self._telemetry.record
        record(M.RUNNING, gauges.num_running)
        record(M.WAITING, gauges.num_waiting)
        record(M.KV_USAGE, 1 - gauges.num_free_kv_blocks / gauges.num_kv_blocks)

    def delta(self, request: Request, event: Delta) -> None:
        """A round's tokens go out."""
        if not self._telemetry.counts:
            return
        now, num_tokens = time.monotonic(), len(event.token_ids)
        last = self._last_delta.get(request)
        if last is None:
            self._telemetry.record(M.FIRST_TOKEN, now - request.times.arrived)
        else:
            self._telemetry.record(M.INTER_TOKEN, (now - last) / num_tokens)
        self._last_delta[request] = now
        self._telemetry.record(M.GENERATION_TOKENS, num_tokens)

    def finished(self, event: Finished) -> None:
        """The engine's last word on a request; its counters are final."""
        if not self._telemetry.counts:
            return
        record, counters = self._telemetry.record, event.counters
        record(M.REQUEST_SUCCESS, finished_reason=event.reason.value)
        record(M.REQUEST_LATENCY, event.times.finished - event.times.arrived)
        record(M.PROMPT_TOKENS, event.num_prompt_tokens)
        record(M.DRAFTS, counters.num_drafted_rounds)
        record(M.DRAFT_TOKENS, counters.num_draft_tokens)
        record(M.ACCEPTED_TOKENS, counters.num_accepted_tokens)
        record(M.FALLBACK_ROUNDS, counters.num_fallback_rounds)
        self._round(event)
        for position, count in enumerate(counters.accepted_by_position):
            record(M.ACCEPTED_PER_POS, count, position=str(position))

    def _round(self, event: Finished) -> None:
        times, num_rounds = event.times, event.counters.num_rounds
        if not num_rounds:
            return
        parts = {
            "draft_wait": times.draft_wait,
            "drafter": times.drafter,
            "forward": times.forward,
            "verify": times.verify,
            "all": times.round,
        }
        for part, seconds in parts.items():
            self._telemetry.record(M.ROUND, seconds / num_rounds, part=part)

    def slow_consumer(self) -> None:
        """A client left too much unread."""
        self._telemetry.record(M.SLOW_CONSUMERS)

    def ended(self, request: Request, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """The call is over, however it went. `metadata` may carry the caller's traceparent."""
        self._last_delta.pop(request, None)
        if not self._telemetry.traces:
            return
        times, counters = request.times, request.counters
        end = times.finished or time.monotonic()
        marks = (times.arrived, times.scheduled or end, times.first_token or end, end)
        reason = request.finish_reason
        self._telemetry.span(
            S.GENERATE,
            times.arrived,
            end,
            metadata=metadata,
            attributes={
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": request.request_id,
                "gen_ai.usage.input_tokens": request.num_prompt,
                "gen_ai.usage.output_tokens": request.num_output,
                "dspark.finish_reason": reason.value if reason else "cancelled",
                "dspark.num_rounds": counters.num_rounds,
                "dspark.num_draft_tokens": counters.num_draft_tokens,
                "dspark.num_accepted_tokens": counters.num_accepted_tokens,
            },
            children=[
                (name, start, stop)
                for name, start, stop in zip(
                    (S.QUEUE, S.PREFILL, S.DECODE), marks, marks[1:], strict=False
                )
                if stop > start
            ],
        )
