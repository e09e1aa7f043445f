"""Shared-expert padding and draft tensor names of DeepSeek-V4."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.detect.names import ModelTensor, model_tensor, name_problems, stages
from common.detect.padding import config_padding, shared_expert_padding, tensor_padding
from common.errors import ConfigError
from common.testing import configs as c
from common.testing.configs import DROP, with_

# I, block, TP -> blocks per rank, padded blocks, padded size, ranks of zeros
PADDING = [
    *((2048, 128, tp, 16 // tp, 16, 2048, 0) for tp in (1, 2, 4, 8, 16)),
    (2048, 128, 32, 1, 32, 4096, 16),
    (2048, 128, 3, 6, 18, 2304, 0),
    (2048, 128, 6, 3, 18, 2304, 0),
    *((3072, 128, tp, 24 // tp, 24, 3072, 0) for tp in (1, 2, 3, 4, 6, 8, 24)),
    (3072, 128, 16, 2, 32, 4096, 4),
    (3072, 128, 32, 1, 32, 4096, 8),
    *((2304, 32, tp, 72 // tp, 72, 2304, 0) for tp in (1, 2, 4, 8)),
    (2304, 32, 16, 5, 80, 2560, 1),
    (2304, 32, 32, 3, 96, 3072, 8),
    *((2048, 32, tp, 64 // tp, 64, 2048, 0) for tp in (1, 2, 4, 8, 16, 32, 64)),
]


@pytest.mark.parametrize(("size", "block", "tp", "a_rank", "blocks", "padded", "zeros"), PADDING)
def test_padding_table(
    size: int, block: int, tp: int, a_rank: int, blocks: int, padded: int, zeros: int
) -> None:
    found = shared_expert_padding(size, block, tp)
    assert (found.blocks_per_rank, found.padded_blocks) == (a_rank, blocks)
    assert (found.padded_size, found.pad) == (padded, padded - size)
    assert found.num_zero_ranks == zeros and found.exact_blocks


@given(st.integers(1, 100_000), st.sampled_from([1, 16, 32, 100, 128, 256]), st.integers(1, 64))
@settings(max_examples=200, deadline=None)
def test_padding_is_minimal_and_splits_into_whole_blocks(size: int, block: int, tp: int) -> None:
    found = shared_expert_padding(size, block, tp)
    assert 0 <= found.pad < tp * block
    assert found.padded_size % (tp * block) == 0
    assert (found.pad == 0) == (size % (tp * block) == 0)
    assert found.exact_blocks == (size % block == 0)
    # Ranks hold real rows from the first on: the zero ranks are exactly those that start past them.
    rank_rows = found.padded_size // tp
    assert found.num_zero_ranks == sum(rank * rank_rows >= size for rank in range(tp))


@pytest.mark.parametrize("tp", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("config", [c.FLASH_0731, c.PRO_0813])
@pytest.mark.parametrize("stage", range(3))
def test_every_rank_reads_inside_its_padded_tensors(config: c.Config, stage: int, tp: int) -> None:
    """The public IndexError: Pro at TP 16, rank 12 asks for scale row 24 of 24."""
    padding = config_padding(config, tp)
    assert padding is not None and padding.padded_blocks is not None
    size, hidden = config["moe_intermediate_size"], config["hidden_size"]
    for part, axis in (("w1", 0), ("w2", 1), ("w3", 0)):
        for kind, step in (("weight", 1), ("scale", 128)):
            place = model_tensor(f"mtp.{stage}.ffn.shared_experts.{part}.{kind}")
            assert place is not None
            sides = (size // step, hidden // step)
            shape = sides if axis == 0 else sides[::-1]
            found_axis, rows = tensor_padding(place.name, shape, padding)
            total = padding.padded_size // step
            assert (found_axis, rows) == (axis, total - sides[0])
            assert total % tp == 0  # whole rows for each rank


def test_no_padding_without_blocks_or_shared_experts() -> None:
    awq = c.PRO_0813 | {"quantization_config": {"quant_method": "awq"}}
    padding = config_padding(awq, 16)
    assert padding is not None and (padding.pad, padding.block) == (0, None)
    assert tensor_padding("x.shared_experts.down_proj.weight", (7168, 3072), padding) == (1, 0)
    two = config_padding(c.PRO_0813 | {"n_shared_experts": 2}, 16)
    assert two is not None and (two.size, two.pad) == (6144, 0)
    assert config_padding(c.LLAMA, 16) is None
    assert config_padding(c.FLASH_MTP | {"n_shared_experts": 0}, 16) is None


def test_padding_reads_v41_where_v41_keeps_it() -> None:
    padding = config_padding(c.V41, 16)
    assert padding is not None and (padding.size, padding.block, padding.pad) == (2304, 32, 256)


def test_padding_reads_a_wrapped_body_with_its_own_quantiser() -> None:
    wrapper = {"model_type": "my_wrapper", "text_config": c.PRO_0813}
    assert config_padding(wrapper, 16) == config_padding(c.PRO_0813, 16)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"moe_intermediate_size": 2048}, ["`moe_intermediate_size` is 3072", "is 2048"]),
        ({"n_shared_experts": 2}, ["`n_shared_experts` is 1", "`text_config.n_shared_experts`"]),
        (
            {"quantization_config": {"weight_block_size": [32, 32]}},
            ["is 128", "`text_config.quantization_config.weight_block_size` is 32"],
        ),
    ],
)
def test_two_sizes_are_no_padding(text: c.Config, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_padding(c.PRO_0813 | {"text_config": text}, 16)
    assert caught.value.code == "E16"
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize("block", [128, [128], ["128", 128], [128, "128"], [0, 0], "128"])
def test_a_strange_block_is_refused(block: object) -> None:
    with pytest.raises(ConfigError, match="weight_block_size"):
        config_padding(c.FLASH_MTP | {"quantization_config": {"weight_block_size": block}}, 2)


def test_padding_before_renaming_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="rename before padding"):
        tensor_padding("a.shared_experts.w2.weight", (8, 8), shared_expert_padding(8, 8, 2))


LAYER = "model.layers.1."
NAMES = [
    ("mtp.1.ffn.experts.7.w3.scale", LAYER + "ffn.experts.7.w3.weight_scale", None),
    ("mtp.1.ffn.experts.7.w3.weight", LAYER + "ffn.experts.7.w3.weight", None),
    ("mtp.1.attn.wq_b.scale", LAYER + "attn.wq_b.weight_scale_inv", None),
    ("mtp.1.attn.wq_a.scale", LAYER + "attn.fused_wqa_wkv.weight_scale_inv", 0),
    ("mtp.1.attn.wkv.weight", LAYER + "attn.fused_wqa_wkv.weight", 1),
    ("mtp.1.attn.wkv_other.weight", LAYER + "attn.wkv_other.weight", None),
    ("mtp.1.attn.attn_sink", LAYER + "attn.attn_sink", None),
    ("mtp.1.attn_norm.weight", LAYER + "attn_norm.weight", None),
    ("mtp.1.hc_attn_scale", LAYER + "hc_attn_scale", None),
    ("mtp.1.hc_ffn_scale", LAYER + "hc_ffn_scale", None),
    ("mtp.1.ffn.gate.bias", LAYER + "ffn.gate.e_score_correction_bias", None),
    ("mtp.1.ffn.gate.weight", LAYER + "ffn.gate.weight", None),
    (
        "mtp.1.ffn.shared_experts.w2.scale",
        LAYER + "ffn.shared_experts.down_proj.weight_scale_inv",
        None,
    ),
    (
        "mtp.1.ffn.shared_experts.w1.scale",
        LAYER + "ffn.shared_experts.gate_up_proj.weight_scale_inv",
        0,
    ),
    ("mtp.1.ffn.shared_experts.w3.weight", LAYER + "ffn.shared_experts.gate_up_proj.weight", 1),
    ("mtp.2.norm.weight", "model.norm.weight", None),
    ("mtp.2.hc_head_scale", "model.hc_head_scale", None),
    ("mtp.2.markov_head.markov_w1.weight", "model.markov_head.markov_w1.weight", None),
    ("mtp.2.markov_head.embed.weight", "model.markov_head.markov_w1.weight", None),
    ("mtp.2.markov_head.head.weight", "model.markov_head.markov_w2.weight", None),
    ("mtp.2.confidence_head.proj.weight", "model.confidence_head.proj.weight", None),
    ("mtp.0.main_proj.scale", "model.main_proj.weight_scale_inv", None),
    ("mtp.0.main_norm.weight", "model.main_norm.weight", None),
    ("mtp.0.embed.weight", "model.embed_tokens.weight", None),
    ("mtp.2.head.weight", "lm_head.weight", None),
]


@pytest.mark.parametrize(("name", "target", "shard"), NAMES)
def test_draft_tensor_names(name: str, target: str, shard: int | None) -> None:
    assert model_tensor(name) == ModelTensor(target, shard)


def test_routed_scales_follow_the_expert_dtype() -> None:
    place = model_tensor("mtp.1.ffn.experts.7.w3.scale", expert_dtype="fp8")
    assert place == ModelTensor(LAYER + "ffn.experts.7.w3.weight_scale_inv")


@pytest.mark.parametrize("name", ["layers.0.attn_norm.weight", "mtp.weight", "xmtp.0.norm.weight"])
def test_other_tensors_are_not_ours(name: str) -> None:
    assert model_tensor(name) is None


@pytest.mark.parametrize("confidence", [True, False])
def test_all_names_land_in_different_places(confidence: bool) -> None:
    """A port once lost 12 shared-expert tensors: 3 stages, w1 and w3, weight and scale."""
    names = [n for n in c.DSPARK_NAMES if confidence or "confidence" not in n]
    assert name_problems(names) == [] and stages(names) == (0, 1, 2)
    places = {model_tensor(name) for name in names}
    assert len(places) == len(names)
    gate_up = [p for p in places if p and "shared_experts.gate_up_proj" in p.name]
    assert len(gate_up) == 12


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["mtp.0.main_proj.weight", "mtp.2.norm.weight"], "stages are [0, 2]"),
        (["mtp.0.attn_norm.weight", "mtp.1.main_proj.weight"], "outside stage 0"),
        (["mtp.0.markov_head.markov_w1.weight", "mtp.1.attn_norm.weight"], "outside the last"),
        (["mtp.0.hc_head_fn", "mtp.1.attn_norm.weight"], "outside the last"),
        (
            ["mtp.0.markov_head.markov_w1.weight", "mtp.0.markov_head.embed.weight"],
            "both become model.markov_head.markov_w1.weight",
        ),
    ],
)
def test_name_problems_are_found(names: list[str], words: str) -> None:
    assert any(words in problem for problem in name_problems(names))


def test_missing_size_key_is_no_shared_expert() -> None:
    assert config_padding(with_(c.FLASH_MTP, moe_intermediate_size=DROP), 4) is None
