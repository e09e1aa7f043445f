"""What the engine tells the outside: about a request, the pure shape of its Generate stream.

Pure: knows neither torch nor grpc. A request gets Deltas, then exactly one Finished or Failed.
"""

from dataclasses import dataclass

from common.errors import DsparkError
from verifier_svc.request import Counters, FinishReason, Times, TokenLogprobs


@dataclass(frozen=True)
class Delta:
    """What one step emitted for one request: at least one token."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str  # final text only: never half a character, never rewritten later
    text_ends: tuple[int, ...]  # per token: code points of `text` that are final with it
    num_accepted_drafts: int  # the first so many token_ids were drafted
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for


@dataclass(frozen=True)
class Finished:
    """The normal end, Abort included. Counters and times are final: nobody writes to them."""

    request_id: str
    reason: FinishReason
    matched_stop: str
    matched_token_id: int  # for EOS and STOP_TOKEN, else 0
    num_prompt_tokens: int
    num_output_tokens: int
    seed: int
    text: str  # held back for stop strings or half characters until now
    counters: Counters
    times: Times


@dataclass(frozen=True)
class Failed:
    """The end of a request that the engine could not finish."""

    request_id: str
    error: DsparkError


Event = Delta | Finished | Failed


@dataclass(frozen=True)
class Gauges:
    """How full the engine is. Each value is right by itself, maybe not beside the others."""

    num_running: int
    num_waiting: int
    num_free_kv_blocks: int
    num_kv_blocks: int
