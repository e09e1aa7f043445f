"""Plain decoding through the whole verifier, against transformers' generate on the same weights.

    python tests/bench/plain_serving.py [--repeats 5] [--tokens 64] [--dtype bf16]

SmolLM2-135M-Instruct, one thread each, greedy, one stream and 8 at once (transformers: a batch of
8). The verifier is a process behind gRPC with drafting off, so its rate holds scheduling, sampling,
detokenising and streaming too. Both run in turn within one run; a rate is new tokens over the time
from the first token to the last. Prints medians and the median of the ratios.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
from rich.console import Console

from common.cli.demo import MEASURED_PROMPTS, embedded_pair
from common.cli.processes import ServiceProcess, exit_on_sigterm
from common.client import Generation, VerifierClient
from common.loading.chat import ChatTemplate
from common.loading.tokenizer import Tokenizer
from common.tensors import DTYPES
from common.testing.timing import machine, median_ratio


class Streamed:
    """When a generate call gave its first token: transformers calls `put` per step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        self.times.append(time.perf_counter())


class Transformers:
    """transformers' own generate loop, greedy, on a batch of equal prompts."""

    def __init__(self, target: Path, dtype: torch.dtype) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()

    def rate(self, prompt: list[int], count: int, num_tokens: int) -> float:
        """New tokens per second over all rows, the first one left out."""
        ids, timer = torch.tensor([prompt] * count), None
        if count == 1:  # a streamer takes one row only
            timer = Streamed()
        began = time.perf_counter()
        self._generate(ids, 1, None)
        first = time.perf_counter() - began
        began = time.perf_counter()
        self._generate(ids, num_tokens, timer)
        took = time.perf_counter() - began
        # times: the prompt, then one per new token, then the end.
        seconds = timer.times[-2] - timer.times[1] if timer else took - first
        return count * (num_tokens - 1) / seconds

    def _generate(self, ids: torch.Tensor, num_tokens: int, streamer: Streamed | None) -> None:
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                streamer=streamer,
                pad_token_id=0,
            )
        assert out.shape[1] == ids.shape[1] + num_tokens, out.shape


def verifier_rate(
    client: VerifierClient, prompt: list[int], count: int, num_tokens: int
) -> tuple[float, Generation]:
    """New tokens per second over all streams, and one of them."""

    def run(_index: int) -> tuple[float, float, Generation]:
        called = time.perf_counter()
        done = client.generate(
            prompt, temperature=0.0, max_tokens=num_tokens, ignore_eos=True, drafting=False
        )
        return called + done.first_token_s, called + done.total_s, done

    with ThreadPoolExecutor(count) as pool:
        runs = list(pool.map(run, range(count)))
    # All streams decode together between the last first token and the first last one.
    seconds = statistics.mean(end for _, end, _ in runs) - statistics.mean(s for s, _, _ in runs)
    return count * (num_tokens - 1) / seconds, runs[0][2]


def main() -> None:
    """Prints one line per width and a JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    args = parser.parse_args()
    exit_on_sigterm()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    target, _ = embedded_pair(Console(stderr=True))
    text = ChatTemplate(target).render([{"role": "user", "content": MEASURED_PROMPTS[0]}])
    prompt = Tokenizer(target).encode(text, add_special_tokens=False)
    peer = Transformers(target, DTYPES[args.dtype])
    print(machine())
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="dspark-bench-") as name:
        flags = ["--model", str(target), "--threads", "1", "--dtype", args.dtype]
        listen = f"unix:{name}/v.sock"
        with ServiceProcess("verifier_svc", flags, listen=listen, log=Path(name) / "log") as own:
            own.wait_ready()
            client = VerifierClient(listen)
            for count in (1, 8):
                verifier_rate(client, prompt, count, 8)
                peer.rate(prompt, count, 8)
                ours, theirs, split = [], [], {}
                for _ in range(args.repeats):
                    rate, done = verifier_rate(client, prompt, count, args.tokens)
                    ours.append(rate)
                    theirs.append(peer.rate(prompt, count, args.tokens))
                    mean = done.finished.timings.mean_round
                    split = {
                        part: getattr(mean, f"{part}_us") / 1000
                        for part in ("forward", "verify", "other")
                    }
                ratio = median_ratio(ours, theirs)
                print(
                    f"{count} at once: verifier {statistics.median(ours):.1f} tok/s, transformers "
                    f"{statistics.median(theirs):.1f} tok/s, ratio {ratio:.2f}; round ms {split}"
                )
                result[f"ratio_{count}"] = round(ratio, 3)
            client.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
