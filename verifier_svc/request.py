"""The nouns of the verifier: what travels between service, scheduler, engine, runner and verify.

Pure: knows neither torch nor grpc. A comment behind a field names its only writer and its unit.
"""

import enum
import time
from dataclasses import dataclass, field


class SamplingMode(enum.Enum):
    """How tokens are drawn at temperature > 0; both emit exactly the target's distribution."""

    REJECTION = "rejection"
    COUPLED = "coupled"


class FinishReason(enum.Enum):
    """Why a request ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    ABORT = "abort"


GREEDY_BELOW = 1e-5  # temperatures under this are arg-max


@dataclass(frozen=True)
class SamplingParams:
    """Validated by admission; every value is inside its documented range."""

    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # uint64; admission draws one when the client gives none
    mode: SamplingMode = SamplingMode.REJECTION
    logprobs: int | None = None  # top-n beside the chosen token

    @property
    def greedy(self) -> bool:
        """Arg-max decoding: target and draft distributions are one-hot."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """The target distribution depends on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@dataclass(frozen=True)
class StopParams:
    """When a request ends."""

    max_tokens: int = 16
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str: bool = False


@dataclass(frozen=True)
class SpeculationParams:
    """A request's wishes about drafting; the server's own limits also apply."""

    enabled: bool = True
    max_draft_tokens: int | None = None
    min_survival: float | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logs of the raw target distribution (no temperature, no penalties)."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass
class Counters:
    """Written by the scheduler's commit; token counts are of verified drafts only."""

    num_rounds: int = 0
    num_drafted_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_fallback_rounds: int = 0
    accepted_by_position: list[int] = field(default_factory=list)


@dataclass
class Times:
    """Seconds on the monotonic clock, or sums of seconds over decode rounds."""

    arrived: float = field(default_factory=time.monotonic)  # admission
    scheduled: float = 0.0  # scheduler
    first_token: float = 0.0  # scheduler
    finished: float = 0.0  # scheduler
    draft_wait: float = 0.0  # engine, sum over rounds
    drafter: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    round: float = 0.0


@dataclass(eq=False)
class Request:
    """One admitted generation. Identity is the object; the engine thread owns it after admission.

    Invariant between rounds of a decoding request: `num_computed == len(token_ids) - 1`, that is,
    every token but the anchor (the last one) has its KV and its feature row.
    """

    request_id: str
    session_id: int  # unique for this process; names the request to the drafter
    token_ids: list[int]  # prompt, then output; scheduler.commit appends
    num_prompt: int
    sampling: SamplingParams
    stopping: StopParams
    speculation: SpeculationParams
    eos_token_ids: frozenset[int]
    max_len: int  # tokens: min(context length, num_prompt + max_tokens)
    num_computed: int = 0  # scheduler: tokens whose KV is in the cache
    block_table: list[int] = field(default_factory=list)  # kv_blocks only
    finish_reason: FinishReason | None = None  # scheduler.commit or abort
    matched_stop: str = ""
    counters: Counters = field(default_factory=Counters)
    times: Times = field(default_factory=Times)

    @property
    def num_output(self) -> int:
        """Emitted tokens so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV: 1 for a decoding request, more while prefilling."""
        return len(self.token_ids) - self.num_computed

    @property
    def decoding(self) -> bool:
        """Only the anchor is left to compute, and it was emitted by us."""
        return self.num_uncomputed == 1 and self.num_output > 0


@dataclass(frozen=True)
class Entry:
    """One request's share of a step: positions [start, start + num_tokens) go through the model."""

    request: Request
    start: int  # first position computed = request.num_computed
    num_tokens: int  # known tokens; 1 = the anchor of a decoding request
    samples: bool  # reaches the last known token, so a new token comes out
    max_drafts: int  # drafts that fit this round (KV, limits, wishes); 0 = none wanted


@dataclass(frozen=True)
class Plan:
    """What one step runs. Frozen: the runner and verify only read it."""

    step_id: int
    entries: tuple[Entry, ...]

    @property
    def wants_drafts(self) -> bool:
        """Some entry can use drafts."""
        return any(entry.max_drafts for entry in self.entries)


@dataclass(frozen=True)
class Outlook:
    """What is known of a decoding request before the step in progress is decided."""

    request: Request
    start: int  # feature rows before this position are there
    # A guess: then `start` is where its next anchor will be. None: no guess, only rows.
    anchor_id: int | None = None
    max_drafts: int = 0  # drafts that the next round will want; 0 without a guess


@dataclass(frozen=True)
class Verdict:
    """What verification decided for one entry that samples.

    `token_ids` = accepted drafts, then one correction or bonus token of the target's own; not yet
    cut at stops, which is `scheduler.commit`'s job, token by token.
    """

    num_drafts: int  # drafts that went through the target
    num_accepted: int  # leading drafts that were kept
    token_ids: tuple[int, ...]  # length num_accepted + 1
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id when asked for
