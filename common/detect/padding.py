"""How far the shared expert of DeepSeek-V4 must grow so that its scale blocks split over TP ranks.

With block quantisation a rank must own whole blocks, so the intermediate size is padded with zeros
at its end; trailing ranks then hold only zeros and add nothing. Source of the rule: vLLM pull
request 46001 (module side) and its weight loader. Pure arithmetic; knows no tensor.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.detect.fields import Reader, conflict, section, whole
from common.detect.refusal import refuse, typed


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding of one shared expert. Sizes in channels of its intermediate dimension.

    Without block quantisation the block fields are None and nothing is padded.
    `exact_blocks` is False when `block` does not divide `size`: the public loaders then disagree
    (one floors, one ceils), so such a checkpoint needs a look before it is trusted.
    """

    tp: int
    size: int
    block: int | None
    blocks_per_rank: int | None
    padded_blocks: int | None
    padded_size: int
    pad: int
    num_zero_ranks: int
    exact_blocks: bool

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes."""
        return asdict(self)


def shared_expert_padding(size: int, block: int | None, tp: int) -> Padding:
    """Padding for `size` = moe_intermediate_size x n_shared_experts split over `tp` ranks.

    `block` is weight_block_size[0]. None means that weights are not block-quantised (BF16, AWQ,
    NVFP4 alone), or that the expert is replicated (sequence-parallel MoE): nothing is padded.
    """
    assert size > 0 and tp > 0 and (block is None or block > 0), (size, block, tp)
    if block is None:
        return Padding(tp, size, None, None, None, size, 0, 0, True)
    num_blocks = -(-size // block)
    blocks_per_rank = -(-num_blocks // tp)
    padded_blocks = blocks_per_rank * tp
    return Padding(
        tp=tp,
        size=size,
        block=block,
        blocks_per_rank=blocks_per_rank,
        padded_blocks=padded_blocks,
        padded_size=padded_blocks * block,
        pad=padded_blocks * block - size,
        num_zero_ranks=tp - -(-num_blocks // blocks_per_rank),
        exact_blocks=size % block == 0,
    )


def tensor_padding(name: str, shape: tuple[int, ...], padding: Padding) -> tuple[int, int]:
    """(axis, rows to append) for one shared-expert tensor, by its name in the model.

    `down_proj` splits its input (axis 1), gate and up their output (axis 0). A weight grows by
    channels, a scale by blocks.
    """
    assert "shared_experts" in name and ".w2" not in name, f"{name}: rename before padding"
    axis = 1 if ".down_proj." in name else 0
    is_scale = name.rsplit(".", 1)[-1].startswith("weight_scale")
    if padding.padded_blocks is None:
        return axis, 0
    target = padding.padded_blocks if is_scale else padding.padded_size
    assert shape[axis] <= target, f"{name}: {shape} does not fit {padding}"
    return axis, target - shape[axis]


def config_padding(config: Mapping[str, Any], tp: int) -> Padding | None:
    """The padding that `config` (a parsed config.json) needs at `tp`; None without shared experts.

    Raises:
        ConfigError: E24, one of the keys it reads has a value that cannot be used; E16, two places
            of the file differ.
    """
    reader = Reader(config)
    size = reader.read("size", whole(1, "E24", example=2048), "moe_intermediate_size")
    num_shared = reader.read("num_shared", whole(0, "E24"), "n_shared_experts")
    if size is None or num_shared == 0:
        return None
    # Absent means one: every released V4 has one.
    return shared_expert_padding(size * (num_shared or 1), _weight_block(config), tp)


def _weight_block(config: Mapping[str, Any]) -> int | None:
    """Rows of a scale block, from the file's quantiser or, in a wrapper, from its text body's."""
    found: tuple[str, int] | None = None
    for parent, body in (("", config), ("text_config.", section(config, "text_config"))):
        path = f"{parent}quantization_config.weight_block_size"
        value = section(body, "quantization_config").get("weight_block_size")
        if value is None:
            continue
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise refuse(
                "E24",
                f"`{path}` is {typed(value)}, not a list of two integers.",
                f"`{path}`: [128, 128]",
            )
        rows, _ = (whole(1, "E24", example=128)(path, side) for side in value)
        if found is not None and rows != found[1]:
            raise conflict(*found, path, rows)
        found = found or (path, rows)
    return found[1] if found else None
