"""verifier_svc/rhythm.py: the path is woken shortly before the next step, or not at all."""

import pytest

from verifier_svc.rhythm import AHEAD_S, BUSY_S, SHORTEST_PAUSE_S, Rhythm


def paused(seconds: float) -> Rhythm:
    """A link whose last pause was so long, after a step that was answered at 100."""
    rhythm = Rhythm()
    assert rhythm.answered(100.0, 0.0) is None  # no pause is known yet
    rhythm.sent(100.0 + seconds)
    return rhythm


def test_the_path_is_woken_shortly_before_the_next_step_is_due() -> None:
    assert paused(0.02).answered(101.0, 0.0) == pytest.approx(0.02 - AHEAD_S)


def test_every_pause_counts_anew() -> None:
    rhythm = paused(0.02)
    rhythm.answered(101.0, 0.0)
    rhythm.sent(101.5)
    assert rhythm.answered(102.0, 0.0) == pytest.approx(0.5 - AHEAD_S)


def test_a_step_without_an_answer_before_it_is_no_end_of_a_pause() -> None:
    rhythm = paused(0.02)
    rhythm.answered(101.0, 0.0)
    rhythm.sent(101.02)
    rhythm.sent(103.0)  # only closes sessions, say
    assert rhythm.answered(104.0, 0.0) == pytest.approx(0.02 - AHEAD_S)


def test_what_cannot_have_fallen_asleep_is_not_woken() -> None:
    assert paused(SHORTEST_PAUSE_S * 0.9).answered(101.0, 0.0) is None
    assert paused(0.02).answered(101.0, BUSY_S) is None  # others keep that drafter awake
