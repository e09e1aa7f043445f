"""How many of the proposed drafts go through the target: a static cap and a survival threshold.

Pure. The decision on draft j uses confidences of drafts 1..j only, which depend on tokens before
j, so cutting there leaves the output law untouched (paper section 3.7); nothing here may look at a
draft's own probability. Confidences are calibrated by sequential temperature scaling (paper, STS).
"""

import json
import math
from dataclasses import dataclass

from common.errors import StartupError
from verifier_svc.drafting import Draft, Drafts
from verifier_svc.request import Plan

STS_FORMAT = "dspark-sts-v1"


def load_sts(text: str, name: str, num_drafts: int) -> tuple[float, ...]:
    """One temperature per draft position; `text` is the calibration file's, `name` for messages.

    The file is `{"format": "dspark-sts-v1", "temperatures": [T_1, T_2, ...]}`. Raises StartupError.
    """
    hint = "write the file again with `python -m drafter_svc.training.calibrate` or leave --sts out"
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise StartupError(f"{name} is not JSON ({error}); {hint}") from error
    if not isinstance(content, dict) or content.get("format") != STS_FORMAT:
        raise StartupError(f"{name} lacks the format key {STS_FORMAT!r}; {hint}")
    values = content.get("temperatures")
    if not isinstance(values, list) or len(values) < num_drafts:
        raise StartupError(
            f"{name} needs a list of at least {num_drafts} temperatures, one per draft position, "
            f"but has {values!r}; {hint}"
        )
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            raise StartupError(f"{name} holds temperature {value!r}; allowed: above 0; {hint}")
    return tuple(map(float, values))


@dataclass(frozen=True)
class VerifyLength:
    """The server's rule; `Entry.max_drafts` already holds the cap and every hard limit."""

    min_survival: float = 0.0  # 0 = verify all; a request may ask for another value
    temperatures: tuple[float, ...] = ()  # STS, one per position; empty = uncalibrated

    def choose(self, plan: Plan, drafts: Drafts) -> Drafts:
        """The drafts to verify; a request whose drafts are all cut keeps an empty Draft."""
        chosen = {}
        for entry in plan.entries:
            draft = drafts.within(entry)
            if draft is None:
                continue
            wished = entry.request.speculation.min_survival
            least = self.min_survival if wished is None else wished
            num_drafts = min(len(draft.token_ids), entry.max_drafts)
            if least > 0.0 and draft.confidence_logits:
                num_drafts = min(num_drafts, self._num_surviving(draft, least))
            whole = num_drafts == len(draft.token_ids)
            chosen[entry.request.session_id] = draft if whole else draft.truncated(num_drafts)
        return Drafts(chosen, drafts.drafter_s)

    def _num_surviving(self, draft: Draft, least: float) -> int:
        """Leading drafts whose running product of confidences is at least `least`."""
        survival = 1.0
        for index, logit in enumerate(draft.confidence_logits):
            temperature = self.temperatures[index] if index < len(self.temperatures) else 1.0
            survival *= _sigmoid(logit / temperature)
            if not survival >= least:
                return index
        return len(draft.confidence_logits)


def _sigmoid(logit: float) -> float:
    """NaN counts as no confidence at all."""
    if math.isnan(logit):
        return 0.0
    if logit >= 0.0:
        return 1.0 / (1.0 + math.exp(-logit))
    return math.exp(logit) / (1.0 + math.exp(logit))
