"""Telling the drafter how the step in progress will probably end, while the target still runs.

Two things are known before the output head has run. The feature rows of every draft are there,
whichever of them will count. And once the likely ids have their logits, so is the outcome, unless
an unlikely token changes it. So the drafter begins before the step ends; where the outcome differs,
`propose` corrects what was said. Nothing here touches the output.
"""

import torch

from verifier_svc.drafting import Drafter, Drafts, FeatureSource
from verifier_svc.request import Outlook, Plan, Verdict
from verifier_svc.scheduler import Scheduler
from verifier_svc.verify import Verifier

# A right guess saves a drafter's wait about what a wrong one costs it. Below this share of right
# ones (text in an alphabet of unlikely ids, high temperatures), only every so many steps guess.
LEAST_RIGHT = 0.6
STEPS_BETWEEN_TRIALS = 16
NEWEST_WEIGHT = 0.05  # of one guess in the share


class Foresight:
    """Of one engine; engine thread only."""

    def __init__(self, scheduler: Scheduler, verifier: Verifier, drafter: Drafter) -> None:
        self.share_right = 1.0  # of guessed outcomes, newer ones weigh more
        self._scheduler, self._verifier, self._drafter = scheduler, verifier, drafter
        self._num_steps = 0

    def watch(self, plan: Plan, drafts: Drafts, features: FeatureSource) -> "Watch | None":
        """Follows one forward; None if nobody would use what it sees."""
        if not (plan.wants_drafts and self._drafter.looks_ahead):
            return None
        self._num_steps += 1
        guesses = self.share_right >= LEAST_RIGHT or not self._num_steps % STEPS_BETWEEN_TRIALS
        return Watch(self, plan, drafts, features, guesses)

    def tell_rows(self, plan: Plan, drafts: Drafts, features: FeatureSource) -> None:
        """The rows of all drafts are there."""
        outlooks = []
        for entry in plan.entries:
            if entry.request.decoding and entry.max_drafts:
                draft = drafts.of(entry.request)
                num_drafts = 0 if draft is None else len(draft.token_ids)
                outlooks.append(Outlook(entry.request, entry.start + 1 + num_drafts))
        self._drafter.look_ahead(outlooks, features)

    def tell_guess(
        self, logits: torch.Tensor, plan: Plan, drafts: Drafts, features: FeatureSource
    ) -> dict[int, Verdict]:
        """What the likely ids decide; returns the verdicts on drafts that follow from it."""
        verdicts = self._verifier.verify(logits, plan, drafts, guess=True)
        self._drafter.look_ahead(self._scheduler.outlook(plan, verdicts), features)
        return {i: verdict for i, verdict in verdicts.items() if plan.entries[i].max_drafts}

    def learn(self, guessed: dict[int, Verdict], decided: dict[int, Verdict]) -> None:
        """How good the guesses of one step were."""
        for index, verdict in guessed.items():
            right = verdict.token_ids == decided[index].token_ids
            self.share_right += NEWEST_WEIGHT * (right - self.share_right)


class Watch:
    """The `StepWatcher` of one step."""

    def __init__(
        self,
        foresight: Foresight,
        plan: Plan,
        drafts: Drafts,
        features: FeatureSource,
        guesses: bool,
    ) -> None:
        self._foresight, self._guesses = foresight, guesses
        self._plan, self._drafts, self._features = plan, drafts, features
        self._guessed: dict[int, Verdict] = {}

    def rows_stored(self) -> None:
        """See StepWatcher."""
        self._foresight.tell_rows(self._plan, self._drafts, self._features)

    def logits_likely(self, logits: torch.Tensor) -> None:
        """See StepWatcher."""
        if self._guesses:
            self._guessed = self._foresight.tell_guess(
                logits, self._plan, self._drafts, self._features
            )

    def ended(self, verdicts: dict[int, Verdict]) -> None:
        """The step's real outcome."""
        self._foresight.learn(self._guessed, verdicts)
