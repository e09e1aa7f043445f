"""The nouns of detection: what a config was found to be, and the plan made from it.

Plain frozen data that turns into JSON. Knows no rule and no file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Kind = Literal["v4_mtp", "v4_dspark", "drafter", "none"]
Layout = Literal["anchor_first", "fill_in"]


@dataclass(frozen=True, slots=True)
class Remark:
    """Something worth saying that stops nothing.

    `code` is W.. for a warning and I.. for information. An E code here is a finding that would stop
    another plan than the one made (a proposal longer than the block while K was given, say).
    """

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one config.json describes. `None` always means "the config does not say".

    kind                v4_mtp: DeepSeek-V4 with its classic next-token head; v4_dspark: DeepSeek-V4
                        that carries its own DSpark drafter; drafter: a stand-alone DSpark drafter;
                        none: no drafter this project knows (an ordinary target, a look-alike)
    family              the drafter's family for v4_* and drafter, `model_type` for none
    block_size          B, tokens per trained block
    layout              anchor_first: the anchor's row predicts, B drafts per block;
                        fill_in: it does not, B - 1 drafts
    num_stages          layers of the drafter (V4: `mtp.<stage>` groups)
    num_layers          layers of the target: its own for v4_* and none, the one named by the
                        config for a drafter
    target_layer_ids    taps, each "the output of target layer i", -1 = the embedding's output
    filler_token_id     token in the block's non-anchor slots (`mask_token_id`, noise token)
    draft_vocab_size    rows of a reduced draft vocabulary
    proposal_tokens     K that a speculators file proposes
    sources             field -> config path its value was read from; "default" where none was
    hints               what a `none` looks like: "dflash", "eagle3", "no_heads", ...
    index_checked       the tensor index was given and compared
    draft_weights       the index holds draft tensors; None = not checked
    """

    kind: Kind
    family: str | None = None
    name: str | None = None
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    block_size: int | None = None
    layout: Layout | None = None
    num_stages: int | None = None
    num_nextn: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    filler_token_id: int | None = None
    markov_rank: int | None = None
    markov_head_type: str | None = None
    confidence_head: bool | None = None
    confidence_with_markov: bool | None = None
    draft_vocab_size: int | None = None
    proposal_tokens: int | None = None
    verifier_name: str | None = None
    verifier_architectures: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    hints: tuple[str, ...] = ()
    notes: tuple[Remark, ...] = ()
    warnings: tuple[Remark, ...] = ()
    index_checked: bool = False
    draft_weights: bool | None = None

    @property
    def is_dspark(self) -> bool:
        """The config describes a DSpark drafter, in the target's own checkpoint or beside it."""
        return self.kind in ("v4_dspark", "drafter")

    @property
    def trained_len(self) -> int | None:
        """Tokens one trained block drafts: B, or B - 1 when the anchor's row predicts nothing."""
        if self.block_size is None:
            return None
        return self.block_size - (self.layout == "fill_in")

    @property
    def label(self) -> str:
        """How messages name the checkpoint."""
        return "this checkpoint" if self.name is None else repr(self.name)

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes: tuples become lists, remarks become objects."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run, decided before weights are read.

    method                   None: no speculation asked for and none found
    num_speculative_tokens   K, drafts per round; None exactly when `method` is None
    draft                    "self": the target's own checkpoint drafts; "separate": the named
                             draft; None: the method needs no draft checkpoint
    """

    method: str | None
    num_speculative_tokens: int | None
    policy: str
    draft: Literal["self", "separate"] | None = None
    family: str | None = None
    block_size: int | None = None
    notes: tuple[Remark, ...] = ()
    warnings: tuple[Remark, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, Remark):
        return {"code": value.code, "message": value.message}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value
