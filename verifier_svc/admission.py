"""Turns what a client asked for into a Request, or says exactly why it can never work.

Pure: knows neither torch, grpc nor the tokenizer; the service tokenises text before it asks here.
Every refusal is an InvalidRequest naming the field, its value, what is allowed and the next step.
Field meanings, defaults and limits are those of proto/dspark/v1/verifier.proto.
"""

import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import InvalidRequest
from verifier_svc.request import (
    Request,
    SamplingMode,
    SamplingParams,
    SpeculationParams,
    StopParams,
)

MAX_LOGIT_BIAS_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_LOGPROBS = 20
# Beyond these a logit may overflow, and a row of infinities is no distribution any more.
MIN_REPETITION, MAX_REPETITION = 1e-3, 1e3
MAX_REQUEST_ID_CHARS = 256


@dataclass(frozen=True)
class Limits:
    """What the loaded model and the KV cache allow."""

    vocab_size: int
    max_context_len: int  # tokens; min(model context, KV capacity): no request can ever hold more
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class Ask:
    """One generation as the client asked for it; None takes the documented default."""

    request_id: str
    prompt_ids: Sequence[int]
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    mode: SamplingMode = SamplingMode.REJECTION
    logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop_str: bool | None = None
    speculation_enabled: bool | None = None
    max_draft_tokens: int | None = None
    min_survival: float | None = None


class Admission:
    """Validates against one model's limits and numbers the sessions of this process."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._session_ids = itertools.count(1)

    def admit(self, ask: Ask) -> Request:
        """The request, ready for the engine. Raises InvalidRequest."""
        if not 1 <= len(ask.request_id) <= MAX_REQUEST_ID_CHARS:
            raise _refusal("request_id", f"of {len(ask.request_id)} characters", "1 to 256")
        self._check_prompt(ask.prompt_ids)
        num_prompt = len(ask.prompt_ids)
        stopping = self._stopping(ask, num_prompt)
        return Request(
            request_id=ask.request_id,
            session_id=next(self._session_ids),
            token_ids=list(ask.prompt_ids),
            num_prompt=num_prompt,
            sampling=self._sampling(ask),
            stopping=stopping,
            speculation=_speculation(ask),
            eos_token_ids=self.limits.eos_token_ids,
            max_len=min(self.limits.max_context_len, num_prompt + stopping.max_tokens),
        )

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise _refusal("prompt", "empty", "at least one token", "send text or token_ids")
        room = self.limits.max_context_len
        if len(prompt_ids) >= room:
            raise _refusal(
                "prompt",
                f"{len(prompt_ids)} tokens long",
                f"at most {room - 1}, so that one token fits into the context of {room}",
                "shorten it",
            )
        self._check_ids("prompt.token_ids", prompt_ids)

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        vocab_size = self.limits.vocab_size
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            index = next(i for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
            raise _refusal(
                f"{name}[{index}]",
                token_ids[index],
                f"0 to {vocab_size - 1}",
                "use the tokenizer of this model",
            )

    def _sampling(self, ask: Ask) -> SamplingParams:
        top_k = 0 if ask.top_k is None else ask.top_k
        if top_k < 0:
            raise _refusal("sampling.top_k", top_k, "0 (off) or more")
        seed = secrets.randbits(64) if ask.seed is None else ask.seed
        if not 0 <= seed < 1 << 64:
            raise _refusal("sampling.seed", seed, "0 to 2^64 - 1")
        if ask.logprobs is not None and not 0 <= ask.logprobs <= MAX_LOGPROBS:
            raise _refusal("logprobs", ask.logprobs, f"0 to {MAX_LOGPROBS}")
        return SamplingParams(
            temperature=_number("sampling.temperature", ask.temperature, 1.0, 0.0, math.inf),
            top_k=min(top_k, self.limits.vocab_size),
            top_p=_number("sampling.top_p", ask.top_p, 1.0, 0.0, 1.0, above_low=True),
            min_p=_number("sampling.min_p", ask.min_p, 0.0, 0.0, 1.0),
            repetition_penalty=_number(
                "sampling.repetition_penalty",
                ask.repetition_penalty,
                1.0,
                MIN_REPETITION,
                MAX_REPETITION,
            ),
            frequency_penalty=_number(
                "sampling.frequency_penalty", ask.frequency_penalty, 0.0, -2.0, 2.0
            ),
            presence_penalty=_number(
                "sampling.presence_penalty", ask.presence_penalty, 0.0, -2.0, 2.0
            ),
            logit_bias=self._logit_bias(ask.logit_bias),
            seed=seed,
            mode=ask.mode,
            logprobs=ask.logprobs,
        )

    def _logit_bias(self, bias: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
        if len(bias) > MAX_LOGIT_BIAS_IDS:
            raise _refusal(
                "sampling.logit_bias", f"of {len(bias)} ids", f"at most {MAX_LOGIT_BIAS_IDS}"
            )
        self._check_ids("sampling.logit_bias", list(bias))
        return tuple(
            (token, _number(f"sampling.logit_bias[{token}]", value, 0.0, -100.0, 100.0))
            for token, value in sorted(bias.items())
        )

    def _stopping(self, ask: Ask, num_prompt: int) -> StopParams:
        room = self.limits.max_context_len - num_prompt
        # Without a wish the context is the limit, and then it is also the reason to finish.
        no_limit = self.limits.max_context_len
        max_tokens = no_limit if ask.max_tokens is None else ask.max_tokens
        min_tokens = 0 if ask.min_tokens is None else ask.min_tokens
        if max_tokens < 1:
            raise _refusal("stopping.max_tokens", max_tokens, "1 or more")
        if not 0 <= min_tokens <= min(max_tokens, room):
            raise _refusal(
                "stopping.min_tokens",
                min_tokens,
                f"0 to {min(max_tokens, room)} (max_tokens is {max_tokens}, the context has room "
                f"for {room})",
                "lower it or raise max_tokens",
            )
        stopping = StopParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_strings=self._stop_strings(ask.stop_strings),
            stop_token_ids=tuple(ask.stop_token_ids),
            ignore_eos=bool(ask.ignore_eos),
            include_stop_str=bool(ask.include_stop_str),
        )
        self._check_stop_ids(stopping)
        return stopping

    def _check_stop_ids(self, stopping: StopParams) -> None:
        stop_ids = stopping.stop_token_ids
        if len(stop_ids) > MAX_STOP_IDS:
            raise _refusal(
                "stopping.stop_token_ids", f"of {len(stop_ids)} ids", f"at most {MAX_STOP_IDS}"
            )
        self._check_ids("stopping.stop_token_ids", stop_ids)
        ending = set(stop_ids) | (set() if stopping.ignore_eos else self.limits.eos_token_ids)
        if stopping.min_tokens and len(ending) >= self.limits.vocab_size:
            raise _refusal(
                "stopping.stop_token_ids",
                "every token of the vocabulary",
                "at least one token that does not stop while min_tokens > 0",
                "drop min_tokens",
            )

    def _stop_strings(self, stop_strings: Sequence[str]) -> tuple[str, ...]:
        if len(stop_strings) > MAX_STOP_STRINGS:
            raise _refusal(
                "stopping.stop", f"of {len(stop_strings)} strings", f"at most {MAX_STOP_STRINGS}"
            )
        for index, stop in enumerate(stop_strings):
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise _refusal(
                    f"stopping.stop[{index}]",
                    f"{len(stop)} characters long",
                    f"1 to {MAX_STOP_CHARS} characters",
                )
        return tuple(stop_strings)


def _speculation(ask: Ask) -> SpeculationParams:
    cap = ask.max_draft_tokens
    if cap is not None and cap < 0:
        raise _refusal("speculation.max_draft_tokens", cap, "0 (plain decoding) or more")
    survival = ask.min_survival
    return SpeculationParams(
        enabled=ask.speculation_enabled is not False,
        max_draft_tokens=cap,
        min_survival=None
        if survival is None
        else _number("speculation.min_survival", survival, 0.0, 0.0, 1.0),
    )


def _number(
    name: str, value: float | None, default: float, low: float, high: float, above_low: bool = False
) -> float:
    """`value` inside [low, high], or (low, high]; an infinite bound is never reached itself."""
    if value is None:
        return default
    inside = low < value <= high if above_low else low <= value <= high
    if not (math.isfinite(value) and inside):
        bound = f"{'above' if above_low else 'at least'} {low:g}"
        bound += f" and at most {high:g}" if math.isfinite(high) else " and finite"
        raise _refusal(name, value, bound)
    return value


def _refusal(name: str, value: object, allowed: str, hint: str = "") -> InvalidRequest:
    next_step = hint or "change or leave out the field"
    return InvalidRequest(f"{name} is {value}; allowed: {allowed}; {next_step}")
