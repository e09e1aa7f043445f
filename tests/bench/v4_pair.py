"""A tiny quantised DeepSeek-V4 pair over both services: drafted against undrafted.

    python tests/bench/v4_pair.py [--runs 5] [--tokens 160] [--noise 0.2]

One target and one drafter process, one thread each, on Unix sockets; the modes alternate, at
temperature 0. Prints one JSON object: tokens/s of both modes and their ratio, over all runs
together, the acceptance length, and where a drafted round spends its time. `--noise` says how much
the layers disturb the bigram table that the drafter knows, so it sets the acceptance. The sizes are
far from a real model's: this measures the path, not V4.
"""

import argparse
import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from common.cli.demo import DemoPair, measure, summarise
from common.testing.deepseek_v4 import tiny_deepseek_v4
from common.testing.timing import machine

PROMPTS = [[seed * i % 90 for i in range(40 * seed)] for seed in (1, 3, 7)]


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160, help="new tokens per run")
    parser.add_argument("--noise", type=float, default=0.2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dspark-v4-pair-") as name, ExitStack() as stack:
        folder = Path(name)
        made = tiny_deepseek_v4(folder / "v4", compress_rate_hca=16, noise=args.noise)
        pair = DemoPair(made, made, folder)
        stack.enter_context(pair.drafter())
        client = stack.enter_context(pair.verifier("--dtype", "fp32"))
        plain, drafted = measure(client, PROMPTS, args.runs, args.tokens)
    equal = [p.token_ids for p in plain] == [d.token_ids for d in drafted]
    report = asdict(summarise(plain, drafted, equal))
    print(json.dumps({"machine": machine(), "noise": args.noise, **report}))


if __name__ == "__main__":
    main()
