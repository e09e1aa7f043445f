"""Decides from the config files alone whether this drafter can serve its target.

Runs before torch is imported and before a weight is read; everything that cannot work ends here.
"""

import json
from dataclasses import dataclass

from common.detect.api import Plan, Verdict, resolve
from common.detect.files import detect_checkpoint
from common.detect.pairing import check_layout
from common.detect.report import startup_lines
from drafter_svc.config import DrafterConfig


@dataclass(frozen=True)
class Decision:
    """What the configs say and what follows from it."""

    target: Verdict
    draft: Verdict
    plan: Plan

    def to_json(self) -> str:
        """For GetInfo."""
        return json.dumps(self.draft.to_json())

    def lines(self) -> list[tuple[int, str]]:
        """(logging level, line) for the log at start."""
        return startup_lines(self.plan, self.target, self.draft)


def decide(config: DrafterConfig) -> Decision:
    """Raises ConfigError with the rule's code and the way out."""
    draft = detect_checkpoint(config.model)
    target = detect_checkpoint(config.target_model)
    # The verifier chooses K; a whole block is what this process computes, whatever a file proposes.
    plan = resolve(target, draft, "dspark", draft.trained_len)
    check_layout(draft)
    return Decision(target, draft, plan)
