"""Decides from the config files alone what will run: target, drafting method and K.

Runs before torch is imported and before a weight is read; everything that cannot work ends here.
"""

import json
from dataclasses import dataclass

from common.detect.api import Plan, Verdict, resolve
from common.detect.files import detect_checkpoint
from common.detect.report import startup_lines
from common.errors import StartupError
from verifier_svc.config import VerifierConfig


@dataclass(frozen=True)
class Decision:
    """What the configs say and what follows from it."""

    target: Verdict
    draft: Verdict | None
    plan: Plan

    @property
    def max_drafts(self) -> int:
        """K: drafts per request and round; 0 = plain decoding."""
        return self.plan.num_speculative_tokens or 0

    def to_json(self) -> str:
        """For GetInfo."""
        draft = None if self.draft is None else self.draft.to_json()
        return json.dumps(
            {"target": self.target.to_json(), "draft": draft, "plan": self.plan.to_json()}
        )

    def lines(self) -> list[str]:
        """For the log at start."""
        return startup_lines(self.plan, self.target, self.draft)


def decide(config: VerifierConfig) -> Decision:
    """Raises StartupError, mostly as ConfigError with the rule's code and the way out."""
    target = detect_checkpoint(config.model)
    draft = None if config.draft_model is None else detect_checkpoint(config.draft_model)
    plan = resolve(target, draft, config.method, config.num_speculative_tokens, config.k_policy)
    if plan.method not in (None, "dspark"):
        raise StartupError(
            f"method {plan.method!r} can run on {target.label}, but this verifier only drafts with "
            "'dspark'; leave out --method and --num-speculative-tokens to decode plainly"
        )
    if plan.method is not None and config.drafter is None and config.method is not None:
        raise StartupError(
            f"--method {config.method} needs a drafter service; give --drafter ADDRESS"
        )
    if config.drafter is not None and plan.draft != "separate":
        raise StartupError(
            f"--drafter {config.drafter} serves separate drafters, but the plan for {target.label} "
            f"is {plan.draft or 'no drafting'}; give --draft-model or leave out --drafter"
        )
    return Decision(target, draft, plan)
