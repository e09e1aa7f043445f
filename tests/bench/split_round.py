"""What splitting costs: decode rounds of the default pair, the drafter in its own process or here.

    python tests/bench/split_round.py [--rounds 60] [--repeats 5]

The same engine, target, drafter weights and prompts all ways; the drafter process listens on a
Unix socket; one thread each, on cores of its own. "split" is what the services do, "waiting" the
same without looking ahead. The ways run in turn, greedy, at 1 and 8 requests. Prints medians over
rounds of the round time and the added time, in milliseconds and as a share of the round.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import torch
import uvloop
from in_process_drafter import InProcessDrafter
from rich.console import Console

from common.cli.demo import MEASURED_PROMPTS, embedded_pair
from common.cli.processes import ServiceProcess, exit_on_sigterm
from common.cores import two_shares, use_cores
from common.huge_pages import use_huge_pages
from common.loading.chat import ChatTemplate
from common.loading.tokenizer import StreamDecoder, Tokenizer
from common.models.contracts import read_contract
from common.models.interfaces import Target
from common.models.registry import load_target
from common.telemetry import Telemetry
from common.testing.timing import machine
from drafter_svc.batcher import RowForm
from drafter_svc.build import load
from drafter_svc.config import DrafterConfig
from drafter_svc.planning import decide
from verifier_svc.admission import Admission, Ask, Limits
from verifier_svc.draft_link import LinkSettings
from verifier_svc.draft_sync import LinkLimits
from verifier_svc.drafter_client import DrafterClient
from verifier_svc.drafting import Drafter
from verifier_svc.engine import Engine
from verifier_svc.features import FeatureStore
from verifier_svc.kv_blocks import KVBlocks
from verifier_svc.runner import Runner
from verifier_svc.scheduler import Scheduler, SchedulerLimits
from verifier_svc.verify_len import VerifyLength

NUM_BLOCKS, BLOCK = 512, 16


class Bench:
    """One engine with one drafter, stepped by hand."""

    def __init__(
        self, model: Target, tokenizer: Tokenizer, drafter: Drafter, taps: tuple[int, ...], k: int
    ) -> None:
        kv = model.new_kv(NUM_BLOCKS, BLOCK)
        features = FeatureStore(kv, len(taps) * model.config.hidden_size, dtype="bf16")
        self.scheduler = Scheduler(
            KVBlocks(NUM_BLOCKS, BLOCK),
            SchedulerLimits(8, 512, k),
            lambda request: StreamDecoder(tokenizer, request.token_ids),
            drafter.release,
        )
        runner = Runner(model, kv, features, taps)
        self.engine = Engine(
            self.scheduler, runner, drafter, VerifyLength(), lambda events: None, 8
        )
        config = model.config
        eos = frozenset(config.eos_token_ids)
        self.admission = Admission(Limits(config.vocab_size, config.max_context_len, eos))

    def rounds(self, prompts: list[list[int]], num_rounds: int) -> tuple[list[float], float]:
        """Milliseconds of each decode round with every request running; accepted per round."""
        requests = [
            self.admission.admit(
                Ask(str(i), ids, temperature=0.0, max_tokens=6 * num_rounds, ignore_eos=True)
            )
            for i, ids in enumerate(prompts)
        ]
        for request in requests:
            self.scheduler.add(request)
        while not all(request.decoding for request in requests):
            self.engine.step()
        self.engine.step()  # the drafter catches up with the prompts
        took = []
        for _ in range(num_rounds):
            began = time.perf_counter()
            self.engine.step()
            took.append((time.perf_counter() - began) * 1e3)
        accepted = sum(r.counters.num_accepted_tokens for r in requests)
        for request in requests:
            self.scheduler.abort(request)
        return took, accepted / (len(requests) * num_rounds)


def main() -> None:
    """Prints one line per width and a JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    exit_on_sigterm()
    torch.set_num_threads(1)
    cores, drafter_cores = two_shares()
    target, draft = embedded_pair(Console(stderr=True))
    tokenizer, chat = Tokenizer(target), ChatTemplate(target)
    texts = [chat.render([{"role": "user", "content": p}]) for p in MEASURED_PROMPTS * 3][:8]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    contract = read_contract(draft, target)
    model, _ = load_target(target, torch.bfloat16, "cpu")
    config = DrafterConfig(model=draft, target_model=target)
    loaded = load(config, decide(config))
    local = InProcessDrafter(
        loaded.engine,
        LinkLimits(64, 1024, 8000),
        RowForm(False, "bf16", loaded.feature_width),
        contract.block_size,
        contract.vocab_size,
    )
    loop = uvloop.new_event_loop()
    with tempfile.TemporaryDirectory(prefix="dspark-bench-") as name:
        flags = ["--model", str(draft), "--target-model", str(target), "--threads", "1"]
        flags += [] if drafter_cores is None else ["--cores", drafter_cores]
        listen = f"unix:{name}/d.sock"
        with ServiceProcess("drafter_svc", flags, listen=listen, log=Path(name) / "log") as own:
            own.wait_ready()
            use_cores(cores)  # before this process starts the threads that are to stay there
            threading.Thread(target=loop.run_forever, daemon=True).start()
            clients = {
                way: asyncio.run_coroutine_threadsafe(
                    connect(listen, contract, look_ahead=way == "split"), loop
                ).result()
                for way in ("split", "waiting")
            }
            while any(client.status().state != "READY" for client in clients.values()):
                time.sleep(0.01)
            ways: dict[str, Drafter] = {**clients, "local": local}
            benches = {
                way: Bench(
                    model, tokenizer, drafter, contract.target_layer_ids, contract.block_size
                )
                for way, drafter in ways.items()
            }
            use_huge_pages()  # as the services do
            compare(benches, prompts, args.rounds, args.repeats)
            for client in clients.values():
                asyncio.run_coroutine_threadsafe(client.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)


async def connect(listen: str, contract: object, *, look_ahead: bool) -> DrafterClient:
    """A client on the running loop."""
    settings = LinkSettings(listen, draft_timeout_ms=5000, look_ahead=look_ahead)
    made = DrafterClient(settings, contract, Telemetry())  # type: ignore[arg-type]
    await made.start()
    return made


def compare(
    benches: dict[str, Bench], prompts: list[list[int]], num_rounds: int, repeats: int
) -> None:
    """Interleaves the ways and prints what the split adds."""
    print(machine())
    result: dict[str, float] = {}
    for count in (1, 8):
        took: dict[str, list[float]] = defaultdict(list)
        kept: dict[str, list[float]] = defaultdict(list)
        for repeat in range(repeats + 1):
            for way, bench in benches.items():
                ms, accepted = bench.rounds(prompts[:count], num_rounds)
                if repeat:  # the first is the warm-up
                    took[way].append(statistics.median(ms))
                    kept[way].append(accepted)
        print(f"{count} requests: {statistics.median(took['local']):.2f} ms a round in process")
        for way in ("split", "waiting"):
            pairs = zip(took[way], took["local"], strict=True)
            added = statistics.median(split - local for split, local in pairs)
            whole = statistics.median(took[way])
            print(
                f"  {way}: {whole:.2f} ms, added {added:.2f} ms = {added / whole:.1%}; accepted "
                f"{statistics.mean(kept[way]):.2f} and {statistics.mean(kept['local']):.2f}"
            )
            result[f"{way}_added_ms_{count}"] = round(added, 3)
            result[f"{way}_share_{count}"] = round(added / whole, 4)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
