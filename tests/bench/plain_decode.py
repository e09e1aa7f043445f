"""Plain decoding of the default target: our forward + arg-max against transformers' generate.

    python tests/bench/plain_decode.py [--dtype bf16] [--tokens 64] [--repeats 5] [--clock cpu]

Same weights, dtype and machine, one thread, in turn. Prints tokens/s (prompt included), the median
of the rounds' ratios, and what a forward of 1, 4, 6 and 8 rows costs: the width of a verification.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable

import torch

from common.config import cache_dir
from common.loading.gguf_convert import default_target
from common.loading.tokenizer import Tokenizer
from common.models.dense import DenseTarget
from common.models.registry import load_target
from common.nn.attention import AttentionBatch, Segment
from common.nn.paged_kv import PagedKV
from common.tensors import DTYPES
from common.testing.timing import interleaved, machine, median_ratio

PROMPTS = [
    "Name three rivers in Europe and say which one is the longest.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is 17 times 23? Think step by step.",
    "Explain to a child why the sky is blue.",
    "Give me a recipe for pancakes.",
    "Translate 'good morning' into French, German and Spanish.",
    "List five things to pack for a day in the mountains.",
    "Who wrote Hamlet, and what is it about?",
]
KV_BLOCK = 16
MAX_LEN = 1088  # tokens per request in the cost table and the decode loop
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def prompt_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts as SmolLM2's chat template has them, without a system message."""
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(turn.format(p)) for p in PROMPTS]


def step(model: DenseTarget, kv: PagedKV, tokens: list[list[int]], starts: list[int]) -> list[int]:
    """Runs each request's tokens from `start` on; returns each one's arg-max after its last row."""
    blocks = MAX_LEN // KV_BLOCK
    tables = [range(i * blocks, (i + 1) * blocks) for i in range(len(tokens))]
    ends = list(itertools.accumulate(len(t) for t in tokens))
    segments, slots, positions = [], [], []
    for ids, start, end, table in zip(tokens, starts, ends, tables, strict=True):
        stop = start + len(ids)
        segments.append(Segment(end - len(ids), len(ids), stop, table))
        slots += kv.slots_of(table, start, stop)
        positions += range(start, stop)
    batch = AttentionBatch(segments, torch.tensor(slots), torch.tensor(positions))
    hidden, _ = model.forward(torch.tensor(list(itertools.chain(*tokens))), kv, batch)
    chosen: list[int] = model.logits(hidden[torch.tensor(ends) - 1]).argmax(1).tolist()
    return chosen


def ours(
    model: DenseTarget, kv: PagedKV, prompts: list[list[int]], num_tokens: int
) -> Callable[[], list[list[int]]]:
    """Greedy continuation of all prompts side by side."""

    def run() -> list[list[int]]:
        lengths, new = (
            [len(p) for p in prompts],
            [[t] for t in step(model, kv, prompts, [0] * len(prompts))],
        )
        for i in range(num_tokens - 1):
            starts = [length + i for length in lengths]
            for out, token in zip(new, step(model, kv, [t[-1:] for t in new], starts), strict=True):
                out.append(token)
        return new

    return run


def theirs(
    model: torch.nn.Module, prompts: list[list[int]], num_tokens: int
) -> Callable[[], list[list[int]]]:
    """transformers' generate on the same prompts, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    def run() -> list[list[int]]:
        out = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        new: list[list[int]] = out[:, width:].tolist()
        return new

    return run


def widths(
    model: DenseTarget, kv: PagedKV, context_len: int, repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds of one forward + logits + arg-max: rows x requests at one context length."""
    cases = {
        f"{rows} rows" + f" x {requests}" * (requests > 1): lambda rows=rows, requests=requests: (
            step(model, kv, [[100] * rows] * requests, [context_len] * requests)
        )
        for requests in (1, 8)
        for rows in (1, 4, 6, 8)
    }
    seconds = interleaved(cases, repeats, clock)
    return {name: round(1e3 * statistics.median(s), 1) for name, s in seconds.items()}


def main() -> None:
    """Prints one JSON object per line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per request")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine")
    args = parser.parse_args()
    clock = CLOCKS[args.clock]
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder, dtype = default_target(cache_dir()), DTYPES[args.dtype]
    model, _ = load_target(folder, dtype)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    peer.generation_config.eos_token_id = None  # both run on to the last token
    prompts = prompt_ids(Tokenizer(folder))
    kv = model.new_kv(8 * MAX_LEN // KV_BLOCK, KV_BLOCK)
    print(
        json.dumps(
            {
                "machine": machine(),
                "dtype": args.dtype,
                "clock": args.clock,
                "torch": torch.__version__,
            }
        )
    )
    for requests in (1, 8):
        some = prompts[:requests]
        cases = {
            "ours": ours(model, kv, some, args.tokens),
            "transformers": theirs(peer, some, args.tokens),
        }
        seconds = interleaved(cases, args.repeats, clock)
        rate = {
            n: round(requests * args.tokens / statistics.median(s), 1) for n, s in seconds.items()
        }
        ratio = round(median_ratio(seconds["transformers"], seconds["ours"]), 2)
        agree = sum(a == b for a, b in zip(*(case() for case in cases.values()), strict=True))
        line = {"requests": requests, "tokens_per_s": rate, "ratio": ratio, "texts_equal": agree}
        print(json.dumps(line), flush=True)
    for context_len in (64, 300, 1000):
        costs = widths(model, kv, context_len, 2 * args.repeats, clock)
        print(json.dumps({"context_len": context_len, "ms_per_forward": costs}), flush=True)


if __name__ == "__main__":
    main()
