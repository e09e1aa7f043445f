"""What the hop to a drafter process costs: the client's wait, less the same engine in-process.

    python tests/bench/draft_hop.py [--rounds 200] [--context 256] [--think-ms 20]

A random drafter of the default target's size (width 576, vocabulary 49,152; drafts are never used,
only timed), one CPU thread each side, a Unix socket, fp32. Both ways run in turn, after a pause
that is as busy as a verifier's forward. Prints medians in milliseconds at 1 and 8 requests, greedy
and sampled.
"""

import argparse
import asyncio
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
import uvloop
from in_process_drafter import InProcessDrafter

from common.cli.processes import ServiceProcess, exit_on_sigterm
from common.contract import Contract
from common.models.contracts import read_contract
from common.telemetry import Telemetry
from common.tensors import to_bytes
from common.testing.timing import machine
from common.testing.tiny import tiny_drafter, tiny_target
from drafter_svc.batcher import RowForm
from drafter_svc.build import load
from drafter_svc.config import DrafterConfig
from drafter_svc.planning import decide
from verifier_svc.draft_link import LinkSettings
from verifier_svc.draft_sync import LinkLimits
from verifier_svc.drafter_client import DrafterClient
from verifier_svc.drafting import Drafter
from verifier_svc.request import (
    Entry,
    Plan,
    Request,
    SamplingParams,
    SpeculationParams,
    StopParams,
)

BLOCK = 4
ROWS_PER_ROUND = 2


class Rows:
    """Random rows in memory, read as the feature store reads them."""

    def __init__(self, width: int) -> None:
        self._rows = torch.randn(4096, width).bfloat16()

    def read(self, spans: list[tuple[Request, int, int]]) -> bytes:
        index = torch.tensor([p % 4096 for _, start, stop in spans for p in range(start, stop)])
        return to_bytes(self._rows.index_select(0, index), "bf16")


class Chat:
    """Requests that grow by two tokens a round against one drafter."""

    def __init__(self, drafter: Drafter, rows: Rows, count: int, context: int, hot: float) -> None:
        self.drafter, self.rows = drafter, rows
        params = SamplingParams(temperature=hot)
        self.requests = [
            Request(
                str(i), i, [5] * (context + 1), context, params, StopParams(), SpeculationParams(),
                frozenset(), 1 << 20,
            )
            for i in range(1, count + 1)
        ]  # fmt: skip
        while len(self.round()[1]) < count:  # prompts go up first
            pass

    def round(self) -> tuple[float, dict[int, object], float]:
        """Seconds waited, the drafts, seconds the drafter says it took."""
        for request in self.requests:
            request.num_computed = len(request.token_ids) - 1
        entries = tuple(Entry(r, r.num_computed, 1, True, BLOCK) for r in self.requests)
        started = time.perf_counter()
        drafts = self.drafter.propose(Plan(1, entries), self.rows)
        took = time.perf_counter() - started
        for request in self.requests:
            request.token_ids += [7] * ROWS_PER_ROUND
        return took, dict(drafts.by_session), drafts.drafter_s

    def end(self) -> None:
        for request in self.requests:
            self.drafter.release(request)


def think(seconds: float, weight: torch.Tensor) -> None:
    """Streams memory through the caches, as a forward pass does."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        torch.mv(weight, weight[0])


def compare(split: Chat, local: Chat, rounds: int, think_s: float) -> tuple[float, float, float]:
    """Medians in ms: the split wait, the in-process one, the drafter's own account of its time."""
    weight, waits, locals_, own = (
        torch.randn(4096, 4096),
        list[float](),
        list[float](),
        list[float](),
    )
    for i in range(rounds + 10):
        for chat in (split, local):
            think(think_s, weight)
            took, drafts, drafter_s = chat.round()
            if i >= 10 and len(drafts) == len(chat.requests):
                (waits if chat is split else locals_).append(took * 1e3)
                if chat is split:
                    own.append(drafter_s * 1e3)
    return statistics.median(waits), statistics.median(locals_), statistics.median(own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--think-ms", type=float, default=20.0)
    parser.add_argument("--draft-vocab", type=int, default=16384)
    args = parser.parse_args()
    exit_on_sigterm()
    torch.set_num_threads(1)
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = tiny_target(
            folder / "target", vocab=49152, hidden=576, heads=9, kv_heads=3, layers=4, max_len=8192
        )
        draft = tiny_drafter(
            folder / "draft", target, block_size=BLOCK, draft_vocab=args.draft_vocab
        )
        config = DrafterConfig(model=draft, target_model=target, dtype="fp32")
        drafter = load(config, decide(config))
        rows = Rows(drafter.feature_width)
        form = RowForm(False, "bf16", drafter.feature_width)
        contract = read_contract(draft, target)
        local = InProcessDrafter(
            drafter.engine, LinkLimits(64, 1024, 8000), form, BLOCK, contract.vocab_size
        )
        listen = f"unix:{folder}/d.sock"
        flags = ["--model", str(draft), "--target-model", str(target), "--dtype", "fp32"]
        process = ServiceProcess("drafter_svc", flags, listen=listen, log=folder / "log")
        with process:
            process.wait_ready()
            measure(listen, contract, local, rows, args)


def measure(
    listen: str, contract: Contract, local: InProcessDrafter, rows: Rows, args: argparse.Namespace
) -> None:
    """Prints one line per case."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    settings = LinkSettings(listen, draft_timeout_ms=2000, look_ahead=False)

    async def connect() -> DrafterClient:
        made = DrafterClient(settings, contract, Telemetry())
        await made.start()
        return made

    client = asyncio.run_coroutine_threadsafe(connect(), loop).result()
    while client.status().state != "READY":
        time.sleep(0.01)
    print("requests  sampling  split ms  in-process ms  added ms  drafter's own ms")
    for count in (1, 8):
        for hot in (0.0, 1.0):
            chats = [Chat(d, rows, count, args.context, hot) for d in (client, local)]
            split, alone, own = compare(chats[0], chats[1], args.rounds, args.think_ms / 1e3)
            kind = "sampled" if hot else "greedy"
            numbers = f"{split:8.3f}  {alone:13.3f}  {split - alone:8.3f}  {own:16.3f}"
            print(f"{count:8}  {kind:8}  {numbers}")
            for chat in chats:
                chat.end()
    asyncio.run_coroutine_threadsafe(client.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


if __name__ == "__main__":
    main()
