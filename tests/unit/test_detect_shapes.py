"""Every published checkpoint shape gets the right verdict, from config.json alone."""

import json
from typing import Any

import pytest

from common.detect.api import Verdict, detect
from common.errors import ConfigError
from common.testing import configs as c
from common.testing.configs import DROP, with_, within

FOUR_NULLS = dict.fromkeys(c.DSPARK_KEYS)
V4 = {
    "kind": "v4_dspark",
    "family": "deepseek_v4",
    "block_size": 5,
    "num_stages": 3,
    "markov_head_type": "vanilla",
    "layout": "anchor_first",
}
OVERRIDDEN_V41 = within(
    c.V41 | {"model_type": "deepseek_mtp"}, "text_config", model_type="deepseek_mtp"
)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["head", "mtp.*"]}
NVFP4_0731 = c.FLASH_0731 | {"quantization_config": NVFP4}
RARRI = {
    "quant_method": "fp8",
    "quant_algo": "MIXED_PRECISION",
    "moe_quant_algo": "NVFP4",
    "group_size": 16,
}
VISION_KEYS = {f"vision_key_{i}": i for i in range(10)} | {"vision_config": {"depth": 27}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
QWEN3 = {"kind": "drafter", "family": "qwen3", "block_size": 7, "layout": "anchor_first"}
SPEC = {"kind": "drafter", "family": "speculators"}
SPEC_BASE = {"markov_rank": 256, "confidence_head": False}
OMNI = with_(
    c.QWEN8B,
    architectures=["Qwen3OmniDSparkModel"],
    block_size=DROP,
    target_layer_ids=DROP,
    eagle_config={"block_size": 7, "target_layer_ids": [1, 9, 17]},
    target_hidden_size=2048,
    hidden_size=1024,
)
VL = with_(c.SPECFORGE, architectures=DROP, model_type="qwen3_vl_dflash")
MLX = with_(c.NEMO, architectures=DROP, model_type="deepseek_v4_dspark")
CONFIG_NESTED = with_(
    c.QWEN8B,
    markov_rank=DROP,
    markov_head_type=DROP,
    mask_token_id=DROP,
    dspark_config={"markov_rank": 128, "markov_head_type": "gated", "mask_token_id": 7},
)
ONLY_NESTED_B = with_(c.SPECFORGE, block_size=DROP)
ONLY_NESTED_B["dflash_config"] = c.SPECFORGE["dflash_config"] | {"block_size": 11}
OPEN_SPEC = {
    "open_spec_config_version": "1",
    "architectures": ["DflashDraftModel"],
    "speculative_config": {"method": "dflash"},
}
NAMED_0731 = {"name": "/models/target"}
NAMED_DSPARK = {"name": "org/DeepSeek-V4-Flash-DSpark"}

# id, config, index, what the verdict must say
ACCEPTED: list[tuple[str, dict[str, Any], dict[str, Any] | None, dict[str, Any]]] = [
    ("S01", c.FLASH_MTP, c.IDX_MTP, {"kind": "v4_mtp", "num_stages": 1, "draft_weights": True}),
    ("S02", c.PRO_MTP, None, {"kind": "v4_mtp", "num_layers": 61, "hidden_size": 7168}),
    ("S03", c.FLASH_MTP | {"quantization_config": NVFP4}, None, {"kind": "v4_mtp"}),
    ("S04-zero", c.FLASH_MTP | {"num_nextn_predict_layers": 0}, c.IDX_NONE, {"hints": "no_heads"}),
    ("S04-absent", with_(c.FLASH_MTP, num_nextn_predict_layers=DROP), None, {"hints": "no_heads"}),
    ("S05", c.FLASH_MTP, c.IDX_NONE, {"kind": "v4_mtp", "draft_weights": False}),
    ("S10", c.FLASH_0731, c.IDX_DSPARK, V4 | {"target_layer_ids": (40, 41, 42)}),
    ("S11", c.PRO_0813, None, V4 | {"target_layer_ids": (58, 59, 60), "markov_rank": 512}),
    ("S12", c.VISION | VISION_KEYS, c.IDX_DSPARK, V4 | {"num_nextn": 3}),
    ("S13", c.V41, None, V4 | {"family": "deepseek_v41", "target_layer_ids": (37, 38, 39)}),
    ("S15", NVFP4_0731, None, V4 | {"notes": "QUANT_DIFFERS"}),
    (
        "S15-wrapped",
        {"model_type": "w", "text_config": NVFP4_0731},
        None,
        V4 | {"notes": "DIFFERS"},
    ),
    ("S16", c.FLASH_0731 | {"quantization_config": RARRI}, None, V4 | {"notes": ""}),
    ("S18-awq", c.FLASH_0731 | {"quantization_config": AWQ}, None, V4),
    ("S18-gptq", c.FLASH_0731 | {"quantization_config": AWQ | {"quant_method": "gptq"}}, None, V4),
    ("S18-ct", c.FLASH_0731 | {"quantization_config": COMPRESSED}, None, V4),
    ("S19", {"model_type": "my_wrapper", "text_config": c.FLASH_0731}, None, V4),
    ("S20", c.OVERRIDDEN, None, V4),
    ("S20-v41", c.V41 | {"model_type": "deepseek_mtp"}, None, V4 | {"family": "deepseek_v41"}),
    ("S20-v41-class", OVERRIDDEN_V41, None, V4 | {"family": "deepseek_v41"}),
    ("1.7-class", c.FLASH_0731 | {"architectures": ["DSparkDraftModel"]}, None, V4),
    ("1.7-no-type", with_(c.FLASH_0731, model_type=DROP), None, V4),
    ("1.7-other-type", c.FLASH_0731 | {"model_type": "llama"}, None, {"warnings": "W08"}),
    ("S21", c.FLASH_0731 | {"num_nextn_predict_layers": 0}, None, {"hints": "without_stages"}),
    ("S23", c.FLASH_MTP | FOUR_NULLS, None, {"kind": "v4_mtp"}),
    ("S30", c.QWEN8B, None, QWEN3 | {"num_layers": 36, "num_stages": 5, "confidence_head": True}),
    (
        "S31",
        c.QWEN8B | {"num_target_layers": 40, "target_layer_ids": [1, 10, 19, 28, 37]},
        None,
        QWEN3 | {"num_layers": 40},
    ),
    ("S32", c.GEMMA, None, QWEN3 | {"family": "gemma4", "filler_token_id": 4}),
    ("S32-unified", c.GEMMA | {"model_type": "gemma4_unified_text"}, None, {"family": "gemma4"}),
    ("S33", c.QWEN8B_DFLASH, None, {"hints": "dflash", "warnings": ""}),
    (
        "S33-gemma",
        c.QWEN8B_DFLASH | {"architectures": ["Gemma4DSparkModel"]},
        None,
        {"kind": "none"},
    ),
    ("S34", c.EAGLE3, None, {"hints": "eagle3"}),
    (
        "S35",
        with_(c.QWEN8B, enable_confidence_head=False, confidence_head_with_markov=DROP),
        None,
        QWEN3 | {"confidence_head": False},
    ),
    ("S36", c.QWEN8B | {"markov_rank": 0}, None, {"hints": "dflash", "warnings": "W07"}),
    ("S38", c.QWEN8B | {"model_type": "qwen3_5", "mtp_num_hidden_layers": 1}, None, QWEN3),
    ("S38-text", c.QWEN8B | {"model_type": "qwen3_5_text"}, None, QWEN3),
    ("S38-next", c.QWEN8B | {"model_type": "qwen3_next"}, None, QWEN3),
    (
        "S40",
        c.SPEC8,
        None,
        SPEC | {"target_layer_ids": (1, 9, 17, 25, 33), "verifier_name": "Qwen/Qwen3-8B"},
    ),
    ("S40-class", c.SPEC8 | {"architectures": ["DSparkSpeculator"]}, None, SPEC),
    ("S40-no-rank", with_(c.SPEC8, markov_rank=DROP), None, SPEC | {"warnings": "`markov_rank`"}),
    ("S41", c.SPEC_GLM, None, SPEC | {"layout": "fill_in", "block_size": 16, "trained_len": 15}),
    ("S42", c.SPEC8, None, SPEC | {"draft_vocab_size": 32000, "notes": "d2t"}),
    ("S43", c.SPEC8 | {"markov_rank": 0}, None, {"hints": "dflash", "warnings": "W07"}),
    *(
        (f"S44-45-{kind}", {"speculators_model_type": kind}, None, {"hints": kind})
        for kind in ("dflash", "eagle3", "peagle", "medusa", "mtp")
    ),
    ("S49", c.SPEC8 | {"block_size": 7}, None, SPEC | {"warnings": "E18"}),
    ("S49-fill", c.SPEC8 | {"sample_from_anchor": False}, None, SPEC | {"warnings": "E18"}),
    (
        "S50",
        c.SPECFORGE,
        None,
        {"kind": "drafter", "family": "specforge", "target_layer_ids": (1, 9, 17, 25, 33)},
    ),
    ("S50-no-class", with_(c.SPECFORGE, architectures=DROP), None, {"family": "specforge"}),
    ("S51", c.K3, None, {"kind": "drafter", "family": "k3", "block_size": 7, "num_layers": None}),
    ("S51-no-class", with_(c.K3, architectures=DROP), None, {"kind": "drafter", "family": "k3"}),
    ("S52", c.LFM2, None, {"kind": "drafter", "family": "lfm2", "block_size": 9}),
    ("S53", c.LING, None, {"kind": "drafter", "family": "ling"}),
    ("S54", OMNI, None, {"kind": "drafter", "family": "qwen3_omni", "hidden_size": 2048}),
    ("S55", VL, None, {"kind": "drafter", "family": "qwen3_vl"}),
    (
        "S55-class",
        c.QWEN8B | {"architectures": ["Qwen3VLDSparkModel"]},
        None,
        {"family": "qwen3_vl"},
    ),
    ("S56", c.QWEN8B | {"architectures": ["Qwen3_5DSparkModel"]}, None, {"family": "qwen3_5"}),
    (
        "S56-noise",
        c.QWEN8B
        | {"architectures": ["Qwen35DSparkModel"], "text_config": {"hidden_size": 1}}
        | {"vision_config": {}},
        None,
        {"kind": "drafter", "family": "qwen3_5"},
    ),
    ("S57", c.QWEN8B | {"architectures": ["MiniCPM5DSparkModel"]}, None, {"family": "minicpm5"}),
    ("S57-odd", {"architectures": ["NemotronDSparkNVFP4"]}, None, {"hints": "unknown_dspark"}),
    ("S58", c.NEMO, None, {"kind": "drafter", "family": "deepseek_v4_standalone"}),
    ("S59", MLX, None, {"kind": "drafter", "family": "deepseek_v4"}),
    ("S5a", CONFIG_NESTED, None, QWEN3 | {"markov_rank": 128, "markov_head_type": "gated"}),
    ("S5b", ONLY_NESTED_B, None, {"kind": "drafter", "block_size": 11}),
    ("S60", c.HYBRID, None, {"hints": "dflash+markov", "warnings": "W07"}),
    (
        "S61",
        c.HYBRID | {"block_size": 7, "enable_confidence_head": True},
        None,
        {"hints": "dspark_heads", "warnings": "relabel"},
    ),
    ("S62", c.DFLASH_NESTED, None, {"hints": "dflash", "warnings": ""}),
    ("S63", OPEN_SPEC, None, {"hints": "dflash"}),
    (
        "S63-future",
        OPEN_SPEC | {"speculative_config": {"method": "dspark"}},
        None,
        {"hints": "open_spec:dspark"},
    ),
    (
        "S64",
        c.FLASH_MTP | {"architectures": ["LlamaForCausalLMEagle3"]},
        None,
        {"kind": "none", "hints": "eagle3"},
    ),
    ("S64-eagle", c.LLAMA | {"architectures": ["EagleLlamaModel"]}, None, {"hints": "eagle"}),
    ("S66", c.LLAMA, None, {"kind": "none", "family": "llama"}),
    (
        "S67",
        {"model_type": "qwen3_next", "mtp_num_hidden_layers": 1},
        None,
        {"kind": "none", "hints": "mtp"},
    ),
    ("S73", {"model_type": "gguf"}, None, {"kind": "none", "hints": "gguf"}),
    ("1.2-v3", c.V3_NOISE, None, {"kind": "none", "hints": "mtp", "warnings": "W08"}),
    ("null-model-type", {"model_type": None, "architectures": ["X"]}, None, {"kind": "none"}),
]

# id, config, index, code, words of the message
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any] | None, str, list[str]]] = [
    ("S14", with_(c.V41, text_config=DROP), None, "E09", ["V4.1", "dspark_block_size", "MTP"]),
    *(
        (
            f"S22-without-{key}",
            with_(c.FLASH_0731, **{key: DROP}),
            None,
            "E08",
            ["config.json", f"missing or empty `{key}`", "present", "converter"],
        )
        for key in c.DSPARK_KEYS
    ),
    *(
        (f"S22-only-{key}", c.FLASH_MTP | {key: value}, None, "E08", [f"present {key};"])
        for key, value in c.DSPARK_KEYS.items()
    ),
    (
        "S22-nested",
        within(c.V41, "text_config", dspark_markov_rank=DROP),
        None,
        "E08",
        ["text_config", "`text_config.dspark_markov_rank`"],
    ),
    (
        "1.2-empty-ids",
        c.FLASH_0731 | {"dspark_target_layer_ids": []},
        None,
        "E08",
        ["`dspark_target_layer_ids`", "never taken for plain MTP"],
    ),
    ("S24", {"n_mtp_layers": 3, "dim": 4096} | c.DSPARK_KEYS, None, "E23", ["`model_type`"]),
    ("S46", c.SPEC8 | {"speculators_model_type": "new"}, None, "E21", ["'new'", "peagle"]),
    *(
        ("S47-" + path, config, None, "E21", [f"`{path}`"])
        for path, config in [
            ("transformer_layer_config", with_(c.SPEC8, transformer_layer_config=DROP)),
            (
                "speculators_config.proposal_methods",
                within(c.SPEC8, "speculators_config", proposal_methods=DROP),
            ),
            (
                "speculators_config.proposal_methods[0]",
                within(c.SPEC8, "speculators_config", proposal_methods=[]),
            ),
            (
                "speculators_config.verifier.name_or_path",
                within(c.SPEC8, "speculators_config", verifier={"name_or_path": None}),
            ),
        ]
    ),
    (
        "S48-aux",
        c.SPEC8 | {"aux_hidden_state_layer_ids": None},
        None,
        "E08",
        ["`aux_hidden_state_layer_ids`"],
    ),
    ("S48-mask", c.SPEC8 | {"mask_token_id": None}, None, "E08", ["`mask_token_id`"]),
    ("S51-no-B", with_(c.K3, block_size=DROP), None, "E08", ["missing `block_size`", "no default"]),
    (
        "K3-taps",
        c.K3 | {"num_target_layers": 5},
        None,
        "E14",
        ["`num_target_layers` is 5", "3 taps"],
    ),
    ("1.5-old-weights", c.FLASH_0731, c.IDX_MTP, "E17", ["mtp.0.enorm.weight", "revision"]),
    ("1.5-stripped", c.FLASH_MTP, c.IDX_DSPARK, "E17", ["mtp.0.main_proj.weight", "converter"]),
    (
        "3.5-gap",
        c.FLASH_0731,
        c.index_of(*[n for n in c.DSPARK_NAMES if not n.startswith("mtp.1.")]),
        "E17",
        ["stages are [0, 2]"],
    ),
]


def _text(verdict: Verdict, key: str) -> str:
    """Hints, notes and warnings as one string to look for words in."""
    items = getattr(verdict, key)
    return " ".join(i if isinstance(i, str) else f"{i.code} {i.message}" for i in items)


@pytest.mark.parametrize(
    ("config", "index", "expected"), [row[1:] for row in ACCEPTED], ids=[r[0] for r in ACCEPTED]
)
def test_accepted_shapes(
    config: dict[str, Any], index: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    verdict = detect(config, index=index)
    if "hints" in expected:
        assert verdict.kind == "none" or verdict.kind == expected.get("kind")
    for key, value in expected.items():
        if key in ("hints", "notes", "warnings"):
            assert value in _text(verdict, key)
            assert value or not _text(verdict, key)
        else:
            assert getattr(verdict, key) == value, key
    assert json.loads(json.dumps(verdict.to_json()))["kind"] == verdict.kind


@pytest.mark.parametrize(
    ("config", "index", "code", "words"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refused_shapes(
    config: dict[str, Any], index: dict[str, Any] | None, code: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(config, index=index)
    assert caught.value.code == code, caught.value
    assert caught.value.hints
    for word in words:
        assert word in caught.value.message


def test_names_decide_nothing_but_are_mentioned() -> None:
    plain = detect(c.FLASH_MTP, name="org/DeepSeek-V4-Flash-DSpark")
    assert plain.kind == "v4_mtp"
    assert "W04" in _text(plain, "warnings") and "v4_mtp" in _text(plain, "warnings")
    carried = detect(c.FLASH_0731, name="/models/dspark-cache/target")
    assert carried.kind == "v4_dspark" and not carried.warnings
    assert "W04" in _text(detect(c.QWEN8B, name="qwen3-8b-dflash"), "warnings")


def test_stage_count_comes_from_the_weights_or_the_config_never_from_nextn() -> None:
    from_index = detect(c.FLASH_0731, index=c.IDX_DSPARK)
    assert from_index.num_stages == 3 and from_index.index_checked
    assert from_index.sources["num_stages"] == "model.safetensors.index.json"
    assert "W03 `num_nextn_predict_layers` is 1" in _text(from_index, "warnings")
    unsaid = with_(c.FLASH_0731, num_nextn_predict_layers=DROP)
    assert not detect(unsaid, index=c.IDX_DSPARK).warnings
    two = [n for n in c.DSPARK_NAMES if not n.startswith("mtp.1.")]
    two = [n.replace("mtp.2.", "mtp.1.") for n in two]
    assert detect(c.FLASH_0731, index=c.index_of(*two)).num_stages == 2
    assert detect(c.FLASH_0731 | {"n_mtp_layers": 4}).num_stages == 4
    released = detect(c.FLASH_0731 | {"compress_ratios": [0] * 46})
    assert (released.num_stages, released.sources["num_stages"]) == (3, "compress_ratios")
    assert not detect(c.FLASH_0731).warnings  # nothing but the default says 3


def test_vocabulary_copies_and_prefixes_in_the_index_do_not_disturb() -> None:
    names = [*c.DSPARK_NAMES, "mtp.0.embed.weight", "mtp.2.head.weight"]
    assert detect(c.FLASH_0731, index=c.index_of(*names)).num_stages == 3  # S17
    wrapped = [f"language_model.{name}" for name in names]
    wrapper = {"model_type": "my_wrapper", "text_config": c.FLASH_0731}
    assert detect(wrapper, index=c.index_of(*wrapped)).draft_weights


def test_a_wrapped_body_says_how_its_experts_are_stored() -> None:
    """fp8 experts: `w1.scale` becomes `weight_scale_inv`, so this extra name collides with it."""
    name = "mtp.0.ffn.experts.0.w1.weight_scale_inv"
    index = c.index_of(*c.DSPARK_NAMES, name)
    for body in (c.FLASH_0731, {"model_type": "w", "text_config": c.FLASH_0731}):
        assert detect(body, index=index).num_stages == 3
    fp8 = {"model_type": "w", "text_config": c.FLASH_0731 | {"expert_dtype": "fp8"}}
    with pytest.raises(ConfigError, match="both become"):
        detect(fp8, index=index)


@pytest.mark.parametrize("index", [[], {"weight_map": 3}, "x", 5])
def test_an_index_that_is_none_is_refused(index: Any) -> None:
    with pytest.raises(ConfigError, match="weight_map") as caught:
        detect(c.FLASH_0731, index=index)
    assert caught.value.code == "E20"


def test_absent_confidence_head_is_noticed_in_the_index() -> None:
    names = [n for n in c.DSPARK_NAMES if "confidence" not in n]
    verdict = detect(c.FLASH_0731, index=c.index_of(*names))
    assert verdict.confidence_head is False and "W09" in _text(verdict, "warnings")
    assert detect(c.FLASH_0731, index=c.IDX_DSPARK).confidence_head is True


def test_the_embedded_pair_shape_is_a_drafter() -> None:
    drafter = with_(c.QWEN8B, hidden_size=576, num_target_layers=30, vocab_size=49152)
    drafter |= {"target_layer_ids": [1, 14, 28], "mask_token_id": 1, "draft_vocab_size": 8192}
    verdict = detect(drafter)
    assert (verdict.kind, verdict.family, verdict.num_layers) == ("drafter", "qwen3", 30)
