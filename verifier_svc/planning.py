"""Decides from the config files alone what will run: target, drafting method and K.

Runs before torch is imported and before a weight is read; everything that cannot work ends here.
"""

import json
from dataclasses import dataclass

from common.detect.api import Plan, Remark, Verdict, resolve
from common.detect.files import detect_checkpoint
from common.detect.pairing import check_layout, check_target
from common.detect.refusal import show
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

    def lines(self) -> list[tuple[int, str]]:
        """(logging level, line) for the log at start."""
        return startup_lines(self.plan, self.target, self.draft)


def decide(config: VerifierConfig) -> Decision:
    """Raises StartupError, mostly as ConfigError with the rule's code and the way out."""
    target = detect_checkpoint(config.model)
    check_target(target)
    wishes = {
        "--method": config.method,
        "--draft-model": config.draft_model,
        "--num-speculative-tokens": config.num_speculative_tokens,
    }
    asked = [f"{flag} {value}" for flag, value in wishes.items() if value is not None]
    if not asked:  # then there is no --drafter either: it needs --draft-model
        return Decision(target, None, Plan(None, None, config.k_policy, notes=_unused(target)))
    draft = None if config.draft_model is None else detect_checkpoint(config.draft_model)
    plan = resolve(target, draft, config.method, config.num_speculative_tokens, config.k_policy)
    if plan.method != "dspark":
        raise StartupError(
            f"method {plan.method!r} can run on {target.label}, but this verifier drafts only with "
            "'dspark'; leave out --method and --num-speculative-tokens to decode plainly"
        )
    if config.drafter is None:
        raise StartupError(
            f"{', '.join(asked)}: drafting needs a drafter service; give --drafter ADDRESS and "
            "--draft-model PATH, or leave all of them out to decode plainly"
        )
    check_layout(draft or target)
    return Decision(target, draft, plan)


def _unused(target: Verdict) -> tuple[Remark, ...]:
    """What the target ships to draft with and nobody asked for, and how it would be used."""
    if target.kind == "v4_dspark":
        folder = show(target.name)
        text = (
            f"{target.label} ships a DSpark drafter (B = {target.block_size}), which stays unused: "
            f"start dspark-drafter --model {folder} --target-model {folder} and give this verifier "
            f"--draft-model {folder} --drafter ADDRESS"
        )
    elif target.kind == "v4_mtp":
        text = (
            f"{target.label} ships a classic MTP head, which stays unused: this verifier drafts "
            "only with 'dspark'; a DSpark drafter made for this target is named by --drafter "
            "ADDRESS and --draft-model PATH"
        )
    else:
        return ()
    return (Remark("I05", text),)
