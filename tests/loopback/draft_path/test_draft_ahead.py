"""The drafter process dies or stops between what it is told ahead and its answer: ids stay.

The verifier's engine runs in the test; the signal is sent right after a step's rows or its guess.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from common.models.registry import load_target
from common.telemetry import Telemetry
from common.testing.no_text import NoText
from verifier_svc.admission import Admission, Ask, Limits
from verifier_svc.draft_link import LinkSettings
from verifier_svc.drafter_client import DrafterClient
from verifier_svc.drafting import Drafter, FeatureSource, NoDrafter
from verifier_svc.engine import Engine
from verifier_svc.features import FeatureStore
from verifier_svc.kv_blocks import KVBlocks
from verifier_svc.request import Outlook, Request, SamplingMode
from verifier_svc.runner import Runner
from verifier_svc.scheduler import Scheduler, SchedulerLimits
from verifier_svc.verify_len import VerifyLength

NUM_BLOCKS, KV_BLOCK, NUM_TOKENS = 64, 16, 120
MODES = ({"temperature": 0.0}, {"temperature": 1.0, "mode": SamplingMode.COUPLED, "seed": 3})


class Disturbed(DrafterClient):
    """Does `disturb` once, right after it has told so many rows or guesses."""

    left, kind = 0, ""
    disturb: Callable[[], None]

    def look_ahead(self, outlooks: Sequence[Outlook], features: FeatureSource) -> None:
        super().look_ahead(outlooks, features)
        guessed = any(outlook.anchor_id is not None for outlook in outlooks)
        if self.left and self.kind == ("guess" if guessed else "rows"):
            self.left -= 1
            if not self.left:
                self.disturb()


def generate(model: Any, taps: tuple[int, ...], drafter: Drafter, k: int) -> list[Request]:
    """One request in each mode, side by side, to its end."""
    kv = model.new_kv(NUM_BLOCKS, KV_BLOCK)
    features = FeatureStore(kv, len(taps) * model.config.hidden_size, dtype="fp32")
    runner = Runner(model, kv, features, taps)
    limits = SchedulerLimits(4, 64, k)
    scheduler = Scheduler(
        KVBlocks(NUM_BLOCKS, KV_BLOCK), limits, lambda _: NoText(), drafter.release
    )
    engine = Engine(scheduler, runner, drafter, VerifyLength(), lambda _: None)
    admission = Admission(Limits(model.config.vocab_size, 500, frozenset()))
    requests = [
        admission.admit(Ask(str(i), [3, 9, 27], max_tokens=NUM_TOKENS, ignore_eos=True, **mode))  # type: ignore[arg-type]
        for i, mode in enumerate(MODES)
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        engine.step()
    return requests


def test_a_drafter_that_stops_or_dies_with_a_guess_out_changes_no_id(
    pair: Any,
    start: Callable[..., Any],
    loop: asyncio.AbstractEventLoop,
    tmp_path: Path,
    eventually: Callable[..., None],
) -> None:
    model = load_target(pair.target, torch.float32, "cpu")[0]
    taps, k = pair.contract.target_layer_ids, pair.contract.block_size
    plain = [request.token_ids for request in generate(model, (), NoDrafter(), 0)]
    process = start(f"unix:{tmp_path}/d.sock", tmp_path / "log")
    settings = LinkSettings(process.listen, draft_timeout_ms=250, feature_dtype="fp32")

    async def connect() -> Disturbed:
        made = Disturbed(settings, pair.contract, Telemetry())
        await made.start()
        return made

    client = asyncio.run_coroutine_threadsafe(connect(), loop).result(10)
    try:
        for kind, number in (
            ("rows", signal.SIGSTOP),
            ("guess", signal.SIGSTOP),
            ("guess", signal.SIGKILL),
        ):
            eventually(lambda: client.status().state == "READY")
            client.kind, client.left = kind, 4
            client.disturb = lambda number=number: os.kill(process.process.pid, number)  # type: ignore[misc]
            requests = generate(model, taps, client, k)
            assert client.left == 0, "the stream ended before it was disturbed"
            assert [request.token_ids for request in requests] == plain
            for request in requests:  # some rounds had drafts, the last ones had none
                assert 0 < request.counters.num_drafted_rounds < request.counters.num_rounds
            if number == signal.SIGSTOP:
                assert client.status().state == "SUSPENDED"
                os.kill(process.process.pid, signal.SIGCONT)
                eventually(lambda: woken(client))
    finally:
        asyncio.run_coroutine_threadsafe(client.stop(), loop).result(10)


def woken(client: DrafterClient) -> bool:
    """The Pong is there, and the engine's side has read it."""
    link = client._connector.link
    return link is not None and link.answering and link.inbox.qsize() > 0
