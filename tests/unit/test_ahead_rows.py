"""What the drafter holds whenever its drafts count, however much was told ahead and came otherwise.

A real scheduler, the verifier's sync state and the drafter's own session table; in between the few
lines of `DrafterClient` that choose between an early answer and a new ask. Of a feature row only
the tokens that it was computed from are known, which is what must be right. No torch, no wire.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

from hypothesis import given, settings
from hypothesis import strategies as st

from common.testing.no_text import NoText
from drafter_svc.sessions import Limits, Refusal, Session, SessionTable, Status
from verifier_svc.draft_sync import Ask, DraftSync, LinkLimits
from verifier_svc.drafting import Draft, Drafts
from verifier_svc.kv_blocks import KVBlocks
from verifier_svc.request import (
    Outlook,
    Plan,
    Request,
    SamplingParams,
    SpeculationParams,
    StopParams,
    Verdict,
)
from verifier_svc.scheduler import Scheduler, SchedulerLimits

B, KV_BLOCK, VOCAB, EOS, STEP_S = 4, 4, 29, 28, 0.3
Row = tuple[int, ...]  # the tokens up to and with its own


@dataclass(frozen=True)
class Turn:
    """What happens in one step; requests differ from each other by their number."""

    accepted: int = B  # at most
    guessed: int | None = None  # how many the guess has accepted; None: it is right
    shift: int = 0  # guessed anchor beside the decided one; 0: the same if the place is
    ahead: str = "both"  # what is told before the step ends: "both", "rows", "guess" or "no"
    asks: str = "yes"  # of the drafter: "yes", "no" (suspended, a backlog), "late" (in vain)
    fate: str = ""  # "evict": the drafter makes room; "link": another stream


@dataclass(frozen=True)
class Sizes:
    """Of verifier and drafter."""

    window: int = 0
    max_step_rows: int = 100
    max_len: int = 60
    num_kv_blocks: int = 100  # the verifier's
    num_blocks: int = 100  # the drafter's
    max_sessions: int = 8
    max_batch_tokens: int = 40


class Drafter:
    """The real session table; and of every session, which rows it holds."""

    def __init__(self, sizes: Sizes) -> None:
        self.link, self.held = 0, dict[Session, dict[int, Row]]()
        limits = (sizes.num_blocks, KV_BLOCK, B, sizes.max_sessions, sizes.max_sessions)
        self.table = SessionTable(Limits(*limits, sizes.max_len, sizes.window, evict_idle_s=0.5))
        self.table.open_link(0)

    def take(self, ask: Ask, rows: list[Row], now: float) -> dict[int, Row] | Refusal:
        """What it holds after this entry."""
        place = (ask.epoch, ask.base_len, ask.num_rows, now, ask.first_len)
        session = self.table.extend(self.link, ask.request.session_id, *place)
        if isinstance(session, Refusal):
            return session
        held = self.held.setdefault(session, {})
        held |= dict(zip(range(ask.base_len, ask.anchor_position), rows, strict=True))
        first = max(session.first_len, session.num_forgotten * KV_BLOCK)
        for position in [p for p in held if not first <= p < session.length]:
            del held[position]
        assert sorted(held) == list(range(first, session.length))
        return dict(held)


class World:
    """Runs requests to their end, turn by turn, and checks every ask that counts."""

    def __init__(self, sizes: Sizes, turns: list[Turn]) -> None:
        self.sizes, self.turns, self.now = sizes, cycle(turns), 0.0
        self.sync, self.drafter = DraftSync(B, sizes.window), Drafter(sizes)
        self.link_limits = LinkLimits(sizes.max_sessions, sizes.max_step_rows, sizes.max_len)
        self.sync.new_link(self.link_limits)
        self.scheduler = Scheduler(
            KVBlocks(sizes.num_kv_blocks, KV_BLOCK),
            SchedulerLimits(4, sizes.max_batch_tokens, B),
            lambda _: NoText(),
            self.release,
        )
        self.store: dict[Request, dict[int, Row]] = {}
        self.wanted: dict[int, tuple[Ask, dict[int, Row]]] = {}  # early asks, and what was held
        self.news: list[tuple[str, int, int]] = []  # from the drafter, not read yet
        self.gone: set[tuple[int, int]] = set()  # session id, epoch: the drafter let it go
        self.seen = Counter[str]()
        self.turn = Turn()
        # Of each session since it began: rows sent, steps' drafts, epochs.
        self.sent, self.drafted = Counter[int](), Counter[int]()
        self.epochs: dict[int, set[int]] = {}

    def run(self, *requests: Request) -> "World":
        """To the end of all."""
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.turn, self.now = next(self.turns), self.now + STEP_S
            self.step()
        self.seen["preempted"] = self.scheduler.num_preemptions
        return self

    def step(self) -> None:
        plan = self.scheduler.plan()
        drafts = self.propose(plan)
        for entry in plan.entries:
            known = entry.request.token_ids[: entry.start + entry.num_tokens]
            tokens = tuple(known) + (drafts.of(entry.request) or Draft(())).token_ids
            rows = {p: tokens[: p + 1] for p in range(entry.start, len(tokens))}
            self.store.setdefault(entry.request, {}).update(rows)
        if self.turn.ahead in ("both", "rows"):
            self.look_ahead([
                Outlook(e.request, e.start + 1 + len((drafts.of(e.request) or Draft(())).token_ids))
                for e in plan.entries
                if e.request.decoding and e.max_drafts
            ])  # fmt: skip
        decided = self.verdicts(plan, drafts, guess=False)
        if self.turn.ahead in ("both", "guess"):
            guess = self.verdicts(plan, drafts, guess=True)
            self.look_ahead(self.scheduler.outlook(plan, guess))
        self.scheduler.commit(plan, drafts, decided)
        self.befall()

    def verdicts(self, plan: Plan, drafts: Drafts, *, guess: bool) -> dict[int, Verdict]:
        turn, found = self.turn, {}
        for index, entry in enumerate(plan.entries):
            if entry.samples:
                ids = (drafts.of(entry.request) or Draft(())).token_ids
                number, shift = entry.request.session_id, 3
                accepted = (turn.accepted + number) % (B + 1)
                if guess and turn.guessed is not None:
                    accepted = (turn.guessed + number) % (B + 1)
                    shift += turn.shift
                accepted = min(accepted, len(ids))
                instead = ids[accepted] if accepted < len(ids) else entry.request.token_ids[-1]
                last = (instead + shift) % VOCAB
                found[index] = Verdict(len(ids), accepted, (*ids[:accepted], last))
        return found

    def befall(self) -> None:
        """What else happens between two steps."""
        sessions = self.drafter.table._sessions
        if self.turn.fate == "evict" and sessions:
            victim = next(iter(sessions.values()))
            self.drafter.table.close(victim.link, victim.session_id)
            self.evicted(victim.session_id)
        if self.turn.fate == "link":
            self.drafter.table.close_link(self.drafter.link)
            self.drafter.link += 1
            self.drafter.table.open_link(self.drafter.link)
            self.sync.new_link(self.link_limits)
            for state in (self.wanted, self.news, self.sent, self.drafted, self.epochs):
                state.clear()

    # The client's part.

    def propose(self, plan: Plan) -> Drafts:
        self.sync.settle(plan)
        for kind, session_id, epoch in self.news:
            if kind == "evicted":
                self.sync.evicted([session_id], self.now)
            else:
                self.sync.restart(session_id, epoch, self.now, wait=kind == "no_room")
        self.news.clear()
        early, self.wanted = self.wanted, {}
        if self.turn.asks == "no":
            return Drafts()
        drafts, asks = Drafts(), list[Ask]()
        for ask in self.sync.asks(plan, self.now):
            told, held = early.pop(ask.request.session_id, (None, {}))
            if told is not None and told.answers(ask):
                self.count(ask, held, drafts, "used")
            else:
                self.seen["in_vain"] += told is not None
                asks.append(ask)
        for ask, held in self.send(asks):
            self.count(ask, held, drafts, "asked")
        for entry in plan.entries:
            self.drafted[entry.request.session_id] += len(
                (drafts.of(entry.request) or Draft(())).token_ids
            )
        return drafts

    def count(self, ask: Ask, held: dict[int, Row], drafts: Drafts, how: str) -> None:
        """The answer to `ask` counts: the drafter must have made it of the right rows."""
        known, start, window = tuple(ask.request.token_ids), ask.anchor_position, self.sizes.window
        assert start == len(known) - 1 and ask.anchor_id == known[start]
        for position in range(max(0, start - window) if window else 0, start):
            assert held[position] == known[: position + 1], (ask, position)
        self.seen[how] += 1
        self.sync.drafted(ask.request.session_id)
        if self.turn.asks != "late":
            ids = tuple((ask.anchor_id + 2 * k + 1) % VOCAB for k in range(ask.num_drafts))
            drafts.by_session[ask.request.session_id] = Draft(ids)

    def look_ahead(self, outlooks: list[Outlook]) -> None:
        if self.turn.asks != "no":
            for ask, held in self.send(self.sync.asks_ahead(outlooks)):
                self.wanted[ask.request.session_id] = (ask, held)

    def release(self, request: Request) -> None:
        session_id = request.session_id
        self.sync.release(session_id)
        self.wanted.pop(session_id, None)
        self.store.pop(request, None)
        if self.turn.asks != "no":
            list(self.send([]))
        sent, drafted = self.sent.pop(session_id, 0), self.drafted.pop(session_id, 0)
        epochs = self.epochs.pop(session_id, set())
        lost = any((session_id, epoch) in self.gone for epoch in epochs)
        if not lost and not self.sizes.window:  # else rows may have fallen out of it unsent
            assert len(epochs) <= 1, "a wrong guess cost a whole context"
            assert sent <= len(request.token_ids) + drafted

    def send(self, asks: list[Ask]) -> Iterator[tuple[Ask, dict[int, Row]]]:
        """One step: yields the asks for drafts and what the drafter holds for each."""
        for session_id in self.sync.take_closing():
            self.drafter.table.close(self.drafter.link, session_id)
        assert sum(ask.num_rows for ask in asks) <= self.sizes.max_step_rows
        for ask in asks:
            session_id, window = ask.request.session_id, self.sizes.window
            self.sent[session_id] += ask.num_rows
            self.epochs.setdefault(session_id, set()).add(ask.epoch)
            first_needed = max(0, ask.anchor_position - window) if window else 0
            assert ask.first_len <= ask.base_len and (window or not ask.first_len)  # else INVALID
            assert not ask.num_drafts or ask.first_len <= first_needed
            rows = [self.store[ask.request][p] for p in range(ask.base_len, ask.anchor_position)]
            held = self.drafter.take(ask, rows, self.now)
            for _, evicted in self.drafter.table.take_evicted():
                self.evicted(evicted)
            if isinstance(held, Refusal):
                self.refused(ask, held)
            elif ask.num_drafts:
                yield ask, held

    def evicted(self, session_id: int) -> None:
        self.seen["evicted"] += 1
        self.gone |= {(session_id, epoch) for epoch in self.epochs.get(session_id, ())}
        self.news.append(("evicted", session_id, 0))

    def refused(self, ask: Ask, refusal: Refusal) -> None:
        """The drafter may be out of blocks, and then not know what it let go; nothing else."""
        place, status = (ask.request.session_id, ask.epoch), refusal.status
        if status is Status.NO_ROOM:
            assert "KV blocks wanted" in refusal.detail, refusal  # the limits it told are kept
        else:
            assert status is Status.UNKNOWN_SESSION and place in self.gone, refusal
        self.seen[status.value] += 1
        self.gone.add(place)
        self.news.append((status.value, *place))


def request(
    number: int, num_prompt: int, max_tokens: int, max_drafts: int = B, min_tokens: int = 1000
) -> Request:
    return Request(
        str(number), number, [(number + i) % EOS for i in range(num_prompt)], num_prompt,
        SamplingParams(temperature=0.0), StopParams(max_tokens=max_tokens, min_tokens=min_tokens),
        SpeculationParams(max_draft_tokens=max_drafts), frozenset([EOS]), num_prompt + max_tokens,
    )  # fmt: skip


NUMBERS = st.integers(0, B)
TURNS = st.builds(
    Turn,
    NUMBERS,
    st.none() | NUMBERS,
    st.integers(0, 1),
    st.sampled_from(["both", "both", "rows", "guess", "no"]),
    st.sampled_from(["yes", "yes", "yes", "no", "late"]),
    st.sampled_from([""] * 12 + ["evict", "link"]),
)
SIZES = st.builds(
    Sizes,
    st.sampled_from([0, 0, 5, 8]),
    st.sampled_from([3, 7, 100]),
    st.sampled_from([24, 60]),
    st.sampled_from([12, 100]),
    st.sampled_from([14, 100]),
    st.sampled_from([2, 8]),
    st.sampled_from([9, 40]),
)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 18), st.integers(1, 30), st.integers(0, B), st.integers(0, 30)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(SIZES, st.lists(TURNS, min_size=1, max_size=12), REQUESTS)
def test_drafts_that_count_are_made_of_the_rows_of_the_decided_tokens(
    sizes: Sizes, turns: list[Turn], asked: list[tuple[int, int, int, int]]
) -> None:
    requests = [request(number, *ask) for number, ask in enumerate(asked, start=1)]
    world = World(sizes, turns).run(*requests)
    assert world.drafter.table.num_sessions <= len(world.sync._closing)


def test_these_worlds_see_every_kind_of_thing() -> None:
    draw, seen = random.Random(5), Counter[str]()
    for number in range(40):
        turns = [
            Turn(
                draw.randrange(5), draw.choice([None, 0, 2, 4]), draw.randrange(2),
                draw.choice(["both", "rows", "guess", "no"]), draw.choice(["yes", "yes", "no"]),
                draw.choice(["", "", "", "evict"]),
            )
            for _ in range(10)
        ]  # fmt: skip
        sizes = Sizes((0, 6)[number % 2], (5, 100)[number % 3 == 0], 60, 14, (12, 100)[number % 2])
        seen += World(sizes, turns).run(*(request(i, 3 * i, 24) for i in range(1, 5))).seen
    wanted = {"used", "in_vain", "asked", "preempted", "evicted", "no_room", "unknown_session"}
    assert {kind for kind in wanted if seen[kind] > 20} == wanted, seen


def test_a_guess_that_is_always_wrong_costs_only_its_own_rows() -> None:
    for guessed in range(B + 1):
        wrong = Turn(accepted=1, guessed=guessed, shift=1)
        world = World(Sizes(max_len=300), [wrong]).run(request(1, 9, 200))
        assert world.seen["in_vain"] > 50 and not world.seen["used"]


def test_a_guess_that_is_always_right_leaves_nothing_to_ask() -> None:
    world = World(Sizes(max_len=300), [Turn(accepted=3)]).run(request(1, 9, 200))
    assert world.seen["used"] > 30 and world.seen["asked"] == 1 and not world.seen["in_vain"]
