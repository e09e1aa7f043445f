"""Telling the drafter how the step in progress will probably end, while the target still runs.

Before the output head runs, the feature rows of every draft are there, whichever of them will
count: they are told. In the middle of the head the likely ids have their logits, and with them
comes a guess at the outcome, right unless an unlikely token changes it: it is told too. So the
drafter works while the target finishes, and where the outcome differs, `propose` corrects what was
said. Nothing here touches the output.
"""

from weakref import WeakKeyDictionary

import torch

from verifier_svc.drafting import Drafter, Drafts, FeatureSource
from verifier_svc.request import Entry, Outlook, Plan, Request, Verdict
from verifier_svc.scheduler import Scheduler
from verifier_svc.verify import Verifier

# What a right guess saves, a wrong one costs. Requests with a smaller share of right ones (text in
# an alphabet of unlikely ids, high temperatures) are guessed about only every so many steps.
LEAST_RIGHT = 0.6
STEPS_BETWEEN_TRIALS = 16
NEWEST_WEIGHT = 0.05  # of one guess in the share


class Foresight:
    """Of one engine; engine thread only. Remembers how often it was right about each request."""

    def __init__(
        self, scheduler: Scheduler, verifier: Verifier, drafter: Drafter, features: FeatureSource
    ) -> None:
        self.scheduler, self.verifier = scheduler, verifier
        self.drafter, self.features = drafter, features
        self._shares: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        self._num_steps = 0

    def watch(self, plan: Plan, drafts: Drafts) -> "Watch | None":
        """Follows one forward; None if nobody would use what it sees."""
        if not (plan.wants_drafts and self.drafter.may_look_ahead):
            return None
        self._num_steps += 1
        return Watch(self, plan, drafts, trial=not self._num_steps % STEPS_BETWEEN_TRIALS)

    def share_right(self, request: Request) -> float:
        """Of the guesses about this request; newer ones weigh more."""
        return self._shares.get(request, 1.0)

    def learn(self, request: Request, *, right: bool) -> None:
        """How one guess turned out."""
        share = self.share_right(request)
        self._shares[request] = share + NEWEST_WEIGHT * (right - share)


class Watch:
    """The `StepWatcher` of one step."""

    def __init__(self, foresight: Foresight, plan: Plan, drafts: Drafts, *, trial: bool) -> None:
        self._foresight, self._plan, self._drafts = foresight, plan, drafts
        self._trial = trial
        self._guessed: dict[Request, Verdict] = {}

    def rows_stored(self) -> None:
        """Tells the rows of anchors and all drafts."""
        outlooks = [
            Outlook(entry.request, entry.start + self._num_rows(entry))
            for entry in self._plan.entries
            if entry.max_drafts
        ]
        self._foresight.drafter.look_ahead(outlooks, self._foresight.features)

    def logits_likely(self, logits: torch.Tensor) -> None:
        """Guesses, about requests that draft, and tells what follows from it."""
        foresight, entries, rows, row = self._foresight, list[Entry](), list[int](), 0
        for entry in self._plan.entries:
            num_rows = self._num_rows(entry) if entry.samples else 0
            if entry.max_drafts and self._is_worth_it(entry.request):
                entries.append(entry)
                rows += range(row, row + num_rows)
            row += num_rows
        if not entries:
            return
        plan = Plan(self._plan.step_id, tuple(entries))
        own = logits if len(rows) == row else logits[torch.tensor(rows, device=logits.device)]
        verdicts = foresight.verifier.verify(own, plan, self._drafts, guess=True)
        self._guessed = {entries[index].request: verdict for index, verdict in verdicts.items()}
        outlooks = foresight.scheduler.outlook(plan, verdicts)
        foresight.drafter.look_ahead(outlooks, foresight.features)

    def ended(self, verdicts: dict[int, Verdict]) -> None:
        """Compares with the step's real outcome."""
        for index, verdict in verdicts.items():
            request = self._plan.entries[index].request
            guess = self._guessed.get(request)
            if guess is not None:
                self._foresight.learn(request, right=guess.token_ids == verdict.token_ids)

    def _is_worth_it(self, request: Request) -> bool:
        return self._trial or self._foresight.share_right(request) >= LEAST_RIGHT

    def _num_rows(self, entry: Entry) -> int:
        """Rows of logits of an entry that samples: after its last known token, after each draft."""
        draft = self._drafts.within(entry)
        return 1 if draft is None else 1 + len(draft.token_ids)
