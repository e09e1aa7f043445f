"""Whatever happens to the drafter process, every stream ends with the ids of plain decoding."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.cli.processes import ServiceProcess
from common.client import Generation, VerifierClient
from common.testing.streams import generate_together
from common.testing.tiny import tiny_drafter, tiny_target

PROMPTS = [[3, 9, 27, 5], [7] * 20, list(range(1, 40)), [11, 2]]
MODES = ({"temperature": 0.0}, {"temperature": 0.8, "coupled": True, "seed": 5})
NUM_TOKENS = 700
DRAFT_TIMEOUT_MS = 100


class Pair:
    """A verifier that stays, and a drafter that comes and goes on the same socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = tiny_target(folder / "target", max_len=2048)
        self.draft_model = tiny_drafter(folder / "draft", self.target, good=True)
        self.drafter: ServiceProcess | None = None
        flags = ["--model", str(self.target), "--draft-model", str(self.draft_model)]
        flags += ["--drafter", f"unix:{folder}/d.sock", "--dtype", "fp32", "--threads", "1"]
        flags += ["--draft-timeout-ms", str(DRAFT_TIMEOUT_MS)]
        self.verifier = ServiceProcess(
            "verifier_svc", flags, listen=f"unix:{folder}/v.sock", log=folder / "v.log"
        )
        self.verifier.wait_ready()
        self.client = VerifierClient(self.verifier.listen)

    def start_drafter(self) -> None:
        """Starts a drafter and waits until the verifier has found it by itself."""
        flags = ["--model", str(self.draft_model), "--target-model", str(self.target)]
        flags += ["--dtype", "fp32", "--threads", "1"]
        self.drafter = ServiceProcess(
            "drafter_svc", flags, listen=f"unix:{self.folder}/d.sock", log=self.folder / "d.log"
        )
        self.drafter.wait_ready()
        self.client.wait_for_drafter()

    def signal_drafter(self, number: int) -> None:
        """Sends a signal to the drafter process."""
        assert self.drafter is not None
        os.kill(self.drafter.process.pid, number)

    def stop_drafter(self) -> None:
        """Ends it if it runs."""
        if self.drafter is not None:
            self.drafter.stop()
            self.drafter = None

    def generate_all(self, on_start: Callable[[], None] | None = None, **options: object) -> list:
        """All prompts in all modes at once; `on_start` runs when every stream is well under way."""
        shared = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "timeout_s": 60, **options}
        cases = [(prompt, {**shared, **mode}) for prompt in PROMPTS for mode in MODES]
        return generate_together(self.client, cases, under_way_after=40, on_start=on_start)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.client.close()
    made.stop_drafter()
    assert made.verifier.stop() == 0, made.verifier.tail()


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    """Ids without a drafter: the truth for every test here."""
    return [g.token_ids for g in pair.generate_all(drafting=False)]


@pytest.fixture(autouse=True)
def clean(pair: Pair) -> Iterator[None]:
    """After each test nothing is held by the verifier."""
    yield
    pair.stop_drafter()
    info = pair.client.info()
    assert (info.num_running, info.num_waiting) == (0, 0)
    assert info.num_free_kv_blocks == info.num_kv_blocks


def check(generations: list[Generation], plain: list[list[int]], *, drafted: bool = True) -> None:
    assert [g.token_ids for g in generations] == plain
    accepted = sum(g.finished.speculation.num_accepted_tokens for g in generations)
    assert (accepted > 0) == drafted


def check_drafting_is_back(pair: Pair, plain: list[list[int]]) -> None:
    pair.client.wait_for_drafter()
    again = pair.client.generate(
        PROMPTS[0], temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
    )
    assert again.token_ids == plain[0]
    assert again.finished.speculation.num_accepted_tokens > NUM_TOKENS // 10


def test_absent(pair: Pair, plain: list[list[int]]) -> None:
    generations = pair.generate_all()
    check(generations, plain, drafted=False)
    assert all(g.finished.speculation.num_fallback_rounds > 0 for g in generations)


def test_present(pair: Pair, plain: list[list[int]]) -> None:
    pair.start_drafter()
    check(pair.generate_all(), plain)


def test_arrives_mid_stream(pair: Pair, plain: list[list[int]]) -> None:
    generations = pair.generate_all(on_start=pair.start_drafter)
    assert [g.token_ids for g in generations] == plain
    check_drafting_is_back(pair, plain)


def test_killed_and_restarted_mid_stream(pair: Pair, plain: list[list[int]]) -> None:
    pair.start_drafter()

    def kill() -> None:
        pair.signal_drafter(signal.SIGKILL)
        pair.stop_drafter()

    generations = pair.generate_all(on_start=kill)
    check(generations, plain)
    assert any(g.finished.speculation.num_fallback_rounds > 0 for g in generations)
    pair.start_drafter()
    check_drafting_is_back(pair, plain)


def test_drained_mid_stream(pair: Pair, plain: list[list[int]]) -> None:
    pair.start_drafter()
    check(pair.generate_all(on_start=lambda: pair.signal_drafter(signal.SIGTERM)), plain)


def test_frozen_then_thawed(pair: Pair, plain: list[list[int]]) -> None:
    pair.start_drafter()
    started = time.monotonic()
    frozen: list[float] = []

    def freeze() -> None:
        frozen.append(time.monotonic())
        pair.signal_drafter(signal.SIGSTOP)

    generations = pair.generate_all(on_start=freeze)
    stalled = time.monotonic() - frozen[0]
    check(generations, plain)
    # A handful of late steps, then the breaker stops waiting: far from one timeout a round.
    assert stalled < 20 * DRAFT_TIMEOUT_MS / 1000 + 10 * (frozen[0] - started) + 5
    pair.signal_drafter(signal.SIGCONT)
    check_drafting_is_back(pair, plain)
