"""Reads shard files into training steps: which texts, which anchors, which target probabilities.

Texts whose prompt number ends on VALIDATION_REST (mod VALIDATION_MOD) are kept for validation only. Keeps
no text in memory: shards are memory-mapped and the operating system caches them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from common.errors import LoadError
from drafter_svc.training.model import Blocks
from drafter_svc.training.shards import Text, list_shards

VALIDATION_MOD, VALIDATION_REST = 50, 7


@dataclass(frozen=True)
class TextRef:
    """Where a text lies: tokens [low, high) of a shard."""

    shard: Path
    low: int
    high: int
    prompt_len: int
    prompt_index: int
    greedy: bool


@dataclass
class Examples:
    """One packed step. target_probs: [A, B, V_draft]; labels: [A, B] draft ids or −1; valid: [A, B]."""

    blocks: Blocks
    target_probs: Tensor
    labels: Tensor
    valid: Tensor


class Corpus:
    """The texts of the first `num_shards` shards (all, if None), split in training and validation."""

    def __init__(self, folder: Path, num_shards: int | None = None) -> None:
        shards = list_shards(folder)[:num_shards]
        if not shards:
            raise LoadError(
                f"no shard-*.safetensors in {folder}; run `python -m drafter_svc.training.generate` first"
            )
        self.num_shards = len(shards)
        self.training: list[TextRef] = []
        self.validation: list[TextRef] = []
        for path in shards:
            for ref in _refs(path):
                held = ref.prompt_index % VALIDATION_MOD == VALIDATION_REST
                (self.validation if held else self.training).append(ref)

    def count_ids(self, vocab_size: int) -> Tensor:
        """How often each target id occurs in the training answers: [V]."""
        counts = torch.zeros(vocab_size, dtype=torch.long)
        for path in sorted({ref.shard for ref in self.training}):
            with safe_open(path, "pt") as shard:
                ids = shard.get_tensor("ids").long()
            for ref in self.training:
                if ref.shard == path:
                    counts += torch.bincount(
                        ids[ref.low + ref.prompt_len : ref.high], minlength=vocab_size
                    )
        return counts


def _refs(path: Path) -> list[TextRef]:
    names = ("starts", "prompt_lens", "prompt_index", "greedy")
    with safe_open(path, "pt") as shard:
        starts, lens, index, greedy = (shard.get_tensor(name).tolist() for name in names)
    refs = []
    for i, (low, high) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        if high - low >= lens[i] + 2:  # one anchor and one label at least
            refs.append(TextRef(path, low, high, lens[i], index[i], bool(greedy[i])))
    return refs


def read_text(ref: TextRef) -> Text:
    """The text behind a reference."""
    with safe_open(ref.shard, "pt") as shard:
        ids, states, lse = (
            shard.get_slice(n)[ref.low : ref.high] for n in ("ids", "states", "lse")
        )
    return Text(ids.long(), states, lse, ref.prompt_len, ref.prompt_index, ref.greedy)


def draft_vocabulary(counts: Tensor, size: int, required: list[int]) -> Tensor:
    """d2t: the `size` most frequent target ids with `required` among them, ascending. [V_draft]."""
    ranked = counts.clone()
    ranked[required] = int(counts.max()) + 1
    return ranked.topk(size).indices.sort().values


def choose_anchors(text: Text, limit: int | None, rng: torch.Generator) -> Tensor:
    """Anchor positions, ascending: answer tokens that are followed by another one; all if limit is None.

    The first possible anchor is the first answer token: the prompt before it is its context.
    """
    places = torch.arange(text.prompt_len, len(text.ids) - 1)
    if limit is not None and len(places) > limit:
        places = places[torch.randperm(len(places), generator=rng)[:limit].sort().values]
    return places


class Packer:
    """Turns texts and anchors into a step, given the draft vocabulary and the tapped layers to use."""

    def __init__(self, head: Tensor, d2t: Tensor, block_size: int, num_taps: int) -> None:
        """head: [V, d], the target's lm_head; d2t: [V_draft]."""
        self.hidden_size = head.shape[1]
        self.head = head[d2t].float()
        self.t2d = torch.full((head.shape[0],), -1)
        self.t2d[d2t] = torch.arange(len(d2t))
        self.block_size, self.num_taps = block_size, num_taps

    def pack(self, texts: list[Text], anchors: list[Tensor]) -> Examples:
        """A step over these texts; features stay in the dtype of the stored states."""
        features, tokens, probs, valid = [], [], [], []
        for text, places in zip(texts, anchors, strict=True):
            num_rows = len(text.ids) - 1  # the last token was never run
            features.append(text.states[:num_rows, : self.num_taps * self.hidden_size])
            ahead = places[:, None] + torch.arange(self.block_size + 1)
            tokens.append(text.ids[ahead.clamp(max=num_rows)])
            valid.append(ahead[:, 1:] <= num_rows)
            probs.append(self._target_probs(text, ahead[:, :-1].clamp(max=num_rows - 1)))
        every = torch.cat(tokens)
        blocks = Blocks(
            features=torch.cat(features),
            context_lens=[len(rows) for rows in features],
            num_anchors=[len(places) for places in anchors],
            anchors=torch.cat(anchors),
            tokens=every,
        )
        return Examples(blocks, torch.cat(probs), self.t2d[every[:, 1:]], torch.cat(valid))

    def _target_probs(self, text: Text, places: Tensor) -> Tensor:
        """Target distribution after each of places [n, B], over the draft vocabulary."""
        first = text.prompt_len - 1
        hidden = text.states[first:-1, -self.hidden_size :].float()
        probs = torch.addmm(-text.lse[first:-1, None], hidden, self.head.T).exp_()
        return probs.to(torch.bfloat16)[places - first]
