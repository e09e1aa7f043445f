"""Reads shard files into training steps: which texts, which anchors, which target probabilities.

Texts whose prompt number ends on VALIDATION_REST (mod VALIDATION_MOD) are kept for validation
only. Keeps no text in memory: shards are memory-mapped and the operating system caches them.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from common.errors import LoadError
from drafter_svc.training.model import Blocks, Columns, DrafterConfig
from drafter_svc.training.settings import Settings
from drafter_svc.training.shards import Text, list_shards, read_meta

PRIOR_SHARE = 0.05
LSE_COLUMNS = 32  # keeps the product's inner size a multiple of 32
LIKELY = 0.01  # a token that the target gives this much anywhere in a step is in the step
MIN_SAMPLED = 256
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
    """One packed step over V columns: the draft vocabulary, or the sample of it in `columns`.

    target_probs: [A, B, V]; labels: [A, B] columns or −1; valid: [A, B].
    """

    blocks: Blocks
    target_probs: Tensor
    labels: Tensor
    valid: Tensor
    columns: Columns | None


class Corpus:
    """Texts of the first `num_shards` shards (all, if None): training and validation."""

    def __init__(self, folder: Path, num_shards: int | None = None) -> None:
        shards = list_shards(folder)[:num_shards]
        if not shards:
            raise LoadError(
                f"no shard-*.safetensors in {folder}; run `python -m "
                "drafter_svc.training.generate` first"
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
    for i, (low, high) in enumerate(pairwise(starts)):
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
    """d2t: the `size` likeliest target ids with `required` among them, ascending. [V_draft].

    Likely = frequent in the answers, plus a small prior: BPE ids rise as tokens get rarer, which
    ranks the many tokens that few answers have shown.
    """
    prior = 1 / (torch.arange(len(counts)) + 200.0)
    ranked = counts / counts.sum() + PRIOR_SHARE * prior / prior.sum()
    ranked[required] = 1.0
    return ranked.topk(size).indices.sort().values


def choose_anchors(text: Text, limit: int | None, rng: torch.Generator) -> Tensor:
    """Anchor positions, ascending: answer tokens with a successor; all if limit is
    None.

    The first possible anchor is the first answer token: the prompt before it is its context.
    """
    places = torch.arange(text.prompt_len, len(text.ids) - 1)
    if limit is not None and len(places) > limit:
        places = places[torch.randperm(len(places), generator=rng)[:limit].sort().values]
    return places


def choose_columns(
    target_probs: Tensor, labels: Tensor, num_columns: int, rng: torch.Generator | None
) -> Columns:
    """About `num_columns` draft ids: all labels, all likely ones, and a sample of the others.

    target_probs: [n, V_draft]. The product with the head is most of a step's work, and nearly all
    of its columns hold next to nothing; the sampled ones stand for the rest, weighted.
    """
    certain = target_probs.amax(0) > LIKELY
    certain[labels[labels >= 0]] = True
    known, rest = certain.nonzero()[:, 0], (~certain).nonzero()[:, 0]
    num_sampled = min(len(rest), max(MIN_SAMPLED, num_columns - len(known)))
    sampled = rest[torch.randperm(len(rest), generator=rng)[:num_sampled]]
    shares = torch.ones(len(known) + num_sampled)
    shares[len(known) :] = len(rest) / max(1, num_sampled)
    return Columns(torch.cat([known, sampled]), shares)


class Packer:
    """Turns texts and anchors into a step."""

    def __init__(
        self,
        head: Tensor,
        d2t: Tensor,
        block_size: int,
        stored: list[int],
        used: list[int],
        temperature: float = 1.0,
    ) -> None:
        """head: [V, d], the target's lm_head; d2t: [V_draft]; stored, used: tapped layers.

        temperature: the sampling temperature whose target distribution the examples carry.
        """
        self.temperature = temperature
        size = self.hidden_size = head.shape[1]
        # Three more columns subtract the log-sum-exp inside the product, see _target_probs.
        self.head = torch.zeros(len(d2t), size + LSE_COLUMNS, dtype=torch.bfloat16)
        self.head[:, :size] = head[d2t]
        self.head[:, size : size + 3] = -1
        self.columns = [slice(stored.index(t) * size, (stored.index(t) + 1) * size) for t in used]
        self.t2d = torch.full((head.shape[0],), -1)
        self.t2d[d2t] = torch.arange(len(d2t))
        self.block_size = block_size

    def features(self, text: Text) -> Tensor:
        """The used taps of all tokens that were run, side by side: [n - 1, m * d]."""
        return torch.cat([text.states[:-1, c] for c in self.columns], dim=-1)

    def pack(
        self,
        texts: list[Text],
        anchors: list[Tensor],
        block_size: int | None = None,
        num_columns: int | None = None,
        rng: torch.Generator | None = None,
    ) -> Examples:
        """A step over these texts, in blocks of `block_size` (None: the drafter's) rows.

        num_columns: how much of the draft vocabulary the step looks at (None: all of it).
        """
        size = block_size or self.block_size
        features, tokens, places, valid, probs, row = [], [], [], [], [], 0
        for text, some in zip(texts, anchors, strict=True):
            num_rows = len(text.ids) - 1  # the last token was never run
            features.append(self.features(text))
            ahead = some[:, None] + torch.arange(size + 1)
            tokens.append(text.ids[ahead.clamp(max=num_rows)])
            valid.append(ahead[:, 1:] <= num_rows)
            probs.append(self._target_probs(text))
            places.append(row + ahead[:, :-1].clamp(max=num_rows - 1) - (text.prompt_len - 1))
            row += len(probs[-1])
        every = torch.cat(tokens)
        blocks = Blocks(
            features=torch.cat(features),
            context_lens=[len(rows) for rows in features],
            num_anchors=[len(some) for some in anchors],
            anchors=torch.cat(anchors),
            tokens=every,
        )
        target_probs, labels, columns = torch.cat(probs), self.t2d[every[:, 1:]], None
        if num_columns is not None:
            columns = choose_columns(target_probs, labels, num_columns, rng)
            target_probs = target_probs[:, columns.ids] * columns.shares.to(target_probs.dtype)
            labels = columns.find(labels, self.head.shape[0])
        rows = target_probs[torch.cat(places)]
        return Examples(blocks, rows, labels, torch.cat(valid), columns)

    def _target_probs(self, text: Text) -> Tensor:
        """Target distribution from the prompt's last token on, over the draft vocabulary, in bf16.

        log-probabilities come out of one bf16 product: rounding them costs little, while rounding
        logits near 20 first and subtracting afterwards would cost 6 % of a probability.
        """
        first = text.prompt_len - 1
        hidden = text.states[first:-1, -self.hidden_size :]
        wide = torch.zeros(len(hidden), self.head.shape[1], dtype=torch.bfloat16)
        wide[:, : self.hidden_size] = hidden
        rest = text.lse[first:-1].clone()
        for column in range(self.hidden_size, self.hidden_size + 3):
            wide[:, column] = rest
            rest -= wide[:, column].float()
        probs = F.linear(wide, self.head).exp_()
        if self.temperature == 1:
            return probs
        missing = (1 - probs.sum(-1, dtype=torch.float32)).clamp(min=0)
        probs.pow_(1 / self.temperature)
        # What lies outside the draft vocabulary counts as one token: close, and never too little.
        total = probs.sum(-1, dtype=torch.float32) + missing.pow(1 / self.temperature)
        return probs.div_(total[:, None].to(probs.dtype))


def packer_for(settings: Settings, config: DrafterConfig, head: Tensor, d2t: Tensor) -> Packer:
    """The packer of the settings' shards for a drafter. head: [V, d], the target's."""
    stored = read_meta(list_shards(settings.data)[0])["taps"]
    return Packer(
        head, d2t, config.block_size, stored, config.target_layer_ids, settings.temperature
    )
