"""Acceptance and end-to-end speed-up of the embedded pair on the 30 held-out prompts.

    python tests/bench/heldout.py [--runs 5] [--max-tokens 256] [--limit N] [--min-survival S]

Both services run as processes on Unix sockets, one thread each; every prompt is generated at
temperature 0 without and with drafting, in turn, on one verifier. A run is one pass over them all;
the figures are medians over runs, the speed-up is the ratio of total tokens/s within a run. The
parts of a drafted round and a plain step's forward are means over prompts, in milliseconds.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.console import Console

from common.cli.demo import (
    MIN_SURVIVAL,
    DemoPair,
    acceptance_length,
    embedded_pair,
    summarise,
    tokens_per_s,
)
from common.cli.processes import exit_on_sigterm
from common.client import Generation, VerifierClient
from common.loading.chat import ChatTemplate

PROMPTS = Path(__file__).resolve().parents[2] / "drafter_svc/training/heldout_prompts.json"


def one_pass(
    client: VerifierClient, prompts: list[tuple[str, str]], max_tokens: int
) -> dict[bool, list[Generation]]:
    """All prompts, each plainly and drafted, one after the other."""
    done: dict[bool, list[Generation]] = {False: [], True: []}
    for _, prompt in prompts:
        for drafting in (False, True):
            done[drafting].append(
                client.generate(prompt, temperature=0.0, max_tokens=max_tokens, drafting=drafting)
            )
    return done


def main() -> None:
    """Prints one line per run, then the medians as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--min-survival", default=MIN_SURVIVAL, help="0: verify every draft")
    args = parser.parse_args()
    exit_on_sigterm()
    console = Console(stderr=True)
    target, drafter = embedded_pair(console)
    chat = ChatTemplate(target)
    rows = json.loads(PROMPTS.read_text())[: args.limit]
    prompts = [(r["kind"], chat.render([{"role": "user", "content": r["prompt"]}])) for r in rows]
    results: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="dspark-bench-") as folder:
        pair = DemoPair(target, drafter, Path(folder))
        with pair.drafter(), pair.verifier("--min-survival", args.min_survival) as client:
            one_pass(client, prompts[:1], 16)
            for index in range(args.runs):
                done = one_pass(client, prompts, args.max_tokens)
                plain, drafted = tokens_per_s(done[False]), tokens_per_s(done[True])
                results["plain_tokens_per_s"].append(plain)
                results["drafted_tokens_per_s"].append(drafted)
                results["speedup"].append(drafted / plain)
                results["acceptance_length"].append(acceptance_length(done[True]))
                for part, ms in summarise(done[False], done[True], True).round_ms.items():
                    results[f"round_ms_{part}"].append(ms)
                steps = [g.finished.timings.mean_round.forward_us / 1e3 for g in done[False]]
                results["plain_forward_ms"].append(statistics.mean(steps))
                for kind in sorted({kind for kind, _ in prompts}):
                    own = [g for (k, _), g in zip(prompts, done[True], strict=True) if k == kind]
                    results[f"acceptance_length_{kind}"].append(acceptance_length(own))
                print(f"run {index}: {drafted / plain:.3f}x", file=sys.stderr)
    print(json.dumps({name: round(statistics.median(v), 3) for name, v in results.items()}))


if __name__ == "__main__":
    main()
