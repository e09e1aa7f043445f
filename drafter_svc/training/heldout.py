"""The target's greedy answers to the committed held-out prompts, with its inner states.

Written once beside the shards (`heldout.safetensors`) and reused. Never part of the training texts.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from drafter_svc.training.prompts import chat_prefix
from drafter_svc.training.settings import Settings
from drafter_svc.training.shards import Text, read_shard, write_shard
from drafter_svc.training.target import BatchTarget

PROMPTS_FILE = Path(__file__).with_name("heldout_prompts.json")
MAX_NEW = 256  # tokens per answer, as the end-to-end benchmark uses


def held_out_prompts() -> list[dict[str, str]]:
    """The 30 prompts, each with `kind` (chat, code, maths) and `prompt`."""
    prompts: list[dict[str, str]] = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
    return prompts


def held_out_texts(settings: Settings) -> dict[str, list[Text]]:
    """Answers by kind; writes them on the first call."""
    folder = settings.data / "heldout"
    prompts = held_out_prompts()
    path = folder / "shard-00000.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with torch.inference_mode():
            texts = _answer(settings, [prompt["prompt"] for prompt in prompts])
        write_shard(folder, 0, texts, {"taps": settings.taps})
    groups: dict[str, list[Text]] = {}
    for text in read_shard(path):
        groups.setdefault(prompts[text.prompt_index]["kind"], []).append(text)
    return groups


def _answer(settings: Settings, prompts: list[str]) -> list[Text]:
    """Greedy answers of up to MAX_NEW tokens, one slot per prompt, no slot reused."""
    tokenizer = Tokenizer.from_file(str(settings.target / "tokenizer.json"))
    end_id = tokenizer.token_to_id("<|im_end|>")
    prefixes = [tokenizer.encode(chat_prefix(p), add_special_tokens=False).ids for p in prompts]
    max_len = max(map(len, prefixes)) + MAX_NEW
    target = BatchTarget(settings.target, settings.taps, len(prompts), max_len)
    states = torch.zeros(len(prompts), max_len, (len(settings.taps) + 1) * target.d).bfloat16()
    lse = torch.zeros(len(prompts), max_len)
    texts = [list(prefix) for prefix in prefixes]
    for slot, prefix in enumerate(prefixes):
        states[slot, : len(prefix)] = target.prefill(slot, torch.tensor(prefix))
    last = torch.tensor([len(prefix) - 1 for prefix in prefixes])
    first = states[torch.arange(len(prompts)), last]
    _extend(target, first, texts, lse, last, list(range(len(prompts))))
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    open_slots = list(range(len(prompts)))
    while open_slots:
        made = target.decode(torch.tensor([text[-1] for text in texts]), lengths)
        _extend(target, made, texts, lse, lengths, open_slots)
        states[open_slots, lengths[open_slots]] = made[open_slots]
        lengths[open_slots] += 1
        open_slots = [
            slot
            for slot in open_slots
            if texts[slot][-1] != end_id and len(texts[slot]) - len(prefixes[slot]) < MAX_NEW
        ]
    return [
        Text(
            torch.tensor(text),
            states[slot, : len(text)].clone(),
            lse[slot, : len(text)].clone(),
            len(prefixes[slot]),
            slot,
            True,
        )
        for slot, text in enumerate(texts)
    ]


def _extend(
    target: BatchTarget,
    rows: torch.Tensor,
    texts: list[list[int]],
    lse: torch.Tensor,
    places: torch.Tensor,
    slots: list[int],
) -> None:
    """Appends the arg-max after the token at places [S]; notes the log-sum-exp."""
    exact, ids, totals = target.candidates(rows[:, -target.d :], 8)
    best = ids.gather(1, exact.argmax(-1, keepdim=True)).squeeze(1)
    for slot in slots:
        texts[slot].append(int(best[slot]))
        lse[slot, places[slot]] = totals[slot]
