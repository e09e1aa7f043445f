"""Values inside one config, and a drafter against its target: wrong numbers never get through."""

from typing import Any

import pytest

from common.detect.api import Verdict, detect, resolve
from common.errors import ConfigError
from common.testing import configs as c
from common.testing.configs import DROP, with_, within

TARGET = detect(c.QWEN8B_TARGET, name="/models/Qwen3-8B")
DRAFTER = c.QWEN8B | {"hidden_size": 4096}

# config, code, words
BAD_VALUES: list[tuple[dict[str, Any], str, list[str]]] = [
    (c.FLASH_0731 | {"dspark_target_layer_ids": [41, 40, 42]}, "E14", ["40 does not increase"]),
    (c.FLASH_0731 | {"dspark_target_layer_ids": [40, 40, 42]}, "E14", ["40 does not increase"]),
    (
        c.FLASH_0731 | {"dspark_target_layer_ids": [41, 42, 43]},
        "E14",
        ["layer 43", "`num_hidden_layers`", "N = 43"],
    ),
    (c.FLASH_0731 | {"dspark_target_layer_ids": [-1, 40]}, "E14", ["-1", "lowest id allowed is 0"]),
    (c.FLASH_0731 | {"dspark_target_layer_ids": [True, 40]}, "E14", ["True (bool)"]),
    (c.FLASH_0731 | {"dspark_target_layer_ids": ["40"]}, "E14", ["'40' (str)"]),
    (c.FLASH_0731 | {"dspark_target_layer_ids": 40}, "E14", ["40 (int), not a list"]),
    (c.FLASH_0731 | {"dspark_target_layer_ids": "404142"}, "E14", ["(str), not a list"]),
    (c.QWEN8B | {"target_layer_ids": [1, 36]}, "E14", ["layer 36", "`num_target_layers`", "= 36"]),
    (c.QWEN8B | {"target_layer_ids": [-2, 3]}, "E14", ["-2", "-1"]),
    (c.SPEC8 | {"aux_hidden_state_layer_ids": [-1, 3]}, "E14", ["-1", "lowest id allowed is 0"]),
    (c.FLASH_0731 | {"dspark_noise_token_id": 129280}, "E15", ["129280", "`vocab_size`"]),
    (c.FLASH_0731 | {"dspark_noise_token_id": -1}, "E15", ["`dspark_noise_token_id` is -1"]),
    (c.FLASH_0731 | {"dspark_noise_token_id": "4"}, "E15", ["'4' (str)"]),
    (c.QWEN8B | {"mask_token_id": 151936}, "E15", ["151936", "0 to 151935"]),
    (c.FLASH_0731 | {"dspark_block_size": "5"}, "E08", ["`dspark_block_size` is '5' (str)"]),
    (c.FLASH_0731 | {"dspark_block_size": True}, "E08", ["True (bool)"]),
    (c.FLASH_0731 | {"dspark_block_size": 5.0}, "E08", ["5.0 (float)"]),
    (c.FLASH_0731 | {"dspark_block_size": 0}, "E08", ["at least 1"]),
    (c.FLASH_0731 | {"dspark_markov_rank": 0}, "E08", ["`dspark_markov_rank` is 0"]),
    (c.FLASH_MTP | {"num_nextn_predict_layers": "1"}, "E08", ["`num_nextn_predict_layers`"]),
    (c.QWEN8B | {"markov_rank": -1}, "E08", ["`markov_rank` is -1"]),
    (c.QWEN8B | {"markov_head_type": "lstm"}, "E08", ["'lstm'", "vanilla, gated, rnn"]),
    (c.QWEN8B | {"enable_confidence_head": 1}, "E08", ["1 (int)", "boolean"]),
    (c.QWEN8B | {"block_size": 1, "sample_from_anchor": False}, "E08", ["drafts no token"]),
    (c.QWEN8B | {"vocab_size": "151936"}, "E24", ["`vocab_size` is '151936' (str)"]),
    (c.QWEN8B | {"dflash_config": [1]}, "E24", ["`dflash_config`", "not an object"]),
    (c.QWEN8B | {"architectures": "Qwen3DSparkModel"}, "E24", ["`architectures`", "list"]),
    (c.QWEN8B | {"model_type": 3}, "E24", ["`model_type` is 3 (int)"]),
    (c.QWEN8B | {"num_target_layers": 10**400}, "E24", ["an integer of 1329 bits", "2**31"]),
    (c.QWEN8B | {"block_size": 2**31}, "E08", ["2147483648"]),
    (with_(c.QWEN8B, num_target_layers=DROP, target_layer_ids=[2**31]), "E14", ["2147483648"]),
    (c.QWEN8B | {"mask_token_id": 10**400}, "E15", ["an integer of 1329 bits"]),
    ({}, "E20", ["JSON object"]),
]


@pytest.mark.parametrize(("config", "code", "words"), BAD_VALUES)
def test_bad_values_are_refused_not_coerced(
    config: dict[str, Any], code: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(config)
    assert caught.value.code == code, caught.value
    for word in words:
        assert word in caught.value.message


def test_v4_taps_may_end_in_the_last_layer() -> None:
    for config, last in ((c.FLASH_0731, 42), (c.PRO_0813, 60)):
        taps = detect(config).target_layer_ids
        assert taps is not None and taps[-1] == last
        assert not resolve(detect(config)).warnings


def test_draft_depth_is_not_taken_for_the_targets() -> None:
    assert detect(c.QWEN8B).num_layers == 36  # num_hidden_layers is 5, taps reach 33


@pytest.mark.parametrize("ids", [{"target_layer_ids": [-1, 9]}, {"target_layer_ids": [-1]}])
def test_the_embedding_tap_is_described_but_not_served(ids: dict[str, Any]) -> None:
    verdict = detect(c.QWEN8B | ids)
    assert verdict.target_layer_ids is not None and verdict.target_layer_ids[0] == -1
    with pytest.raises(ConfigError, match="embedding's output") as caught:
        resolve(verdict)
    assert caught.value.code == "E14" and "36" in caught.value.message


def test_a_dense_drafters_last_layer_tap_warns() -> None:
    plan = resolve(TARGET, detect(DRAFTER | {"target_layer_ids": [1, 35]}))
    assert [r.code for r in plan.warnings] == ["W10"]
    by_target = resolve(TARGET, detect(c.SPEC8 | {"aux_hidden_state_layer_ids": [2, 36]}))
    assert [r.code for r in by_target.warnings] == ["W10"]  # this file does not give N itself


def test_a_fitting_pair_has_nothing_to_say() -> None:
    plan = resolve(TARGET, detect(DRAFTER))
    assert (plan.method, plan.num_speculative_tokens, plan.warnings) == ("dspark", 7, ())


def test_a_deepspec_drafter_may_serve_another_family() -> None:
    llama = detect(
        c.LLAMA | {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}, name="smol"
    )
    drafter = c.QWEN8B | {"hidden_size": 576, "num_target_layers": 30, "vocab_size": 49152}
    drafter |= {"target_layer_ids": [1, 14, 28], "mask_token_id": 1, "draft_vocab_size": 8192}
    plan = resolve(llama, detect(drafter))
    assert (plan.method, plan.family, plan.warnings) == ("dspark", "qwen3", ())


@pytest.mark.parametrize(
    ("target", "draft", "code", "words"),
    [
        (TARGET, DRAFTER | {"hidden_size": 2560}, "E19", ["hidden size", "2560", "4096"]),
        (TARGET, DRAFTER | {"num_target_layers": 40}, "E19", ["target layers", "40", "36"]),
        (TARGET, DRAFTER | {"vocab_size": 152064}, "E19", ["vocabulary", "152064", "151936"]),
        (detect(c.FLASH_MTP), c.PRO_0813, "E19", ["hidden size", "7168", "4096"]),
        (detect(c.QWEN8B, name="d"), DRAFTER, "E19", ["'d'", "swap"]),
        (
            TARGET,
            within(c.SPECFORGE, "dflash_config", target_layer_ids=[1, 36]),
            "E14",
            ["`dflash_config.target_layer_ids`", "layer 36", "`num_hidden_layers`", "N = 36"],
        ),
        (
            TARGET,
            within(c.SPECFORGE, "dflash_config", mask_token_id=151936),
            "E15",
            ["`dflash_config.mask_token_id`", "151936"],
        ),
        (TARGET, c.SPEC_GLM, "E14", ["layer 38", "written as 39", "N = 36"]),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    target: Verdict, draft: dict[str, Any], code: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(target, detect(draft))
    assert caught.value.code == code, caught.value
    for word in words:
        assert word in caught.value.message


def test_sizes_that_are_not_said_are_not_compared() -> None:
    assert resolve(detect(c.LLAMA), detect(c.K3)).num_speculative_tokens == 7


def test_the_verifier_a_speculators_file_names_only_warns() -> None:
    spec = detect(c.SPEC8)
    assert not resolve(TARGET, spec).warnings
    other = detect(c.QWEN8B_TARGET | {"architectures": ["Other"]}, name="/models/target/")
    warnings = resolve(other, spec).warnings
    assert [r.code for r in warnings] == ["E19", "E19"]
    assert "'Qwen/Qwen3-8B'" in warnings[0].message and "/models/target" in warnings[0].message
    assert "Qwen3ForCausalLM" in warnings[1].message and "Other" in warnings[1].message


@pytest.mark.parametrize(
    ("config", "key"),
    [(c.K3, "`mask_token_id`"), (with_(c.QWEN8B, markov_rank=DROP), "`markov_rank`")],
)
def test_what_a_drafter_leaves_unsaid_is_said(config: dict[str, Any], key: str) -> None:
    verdict = detect(config)
    assert verdict.kind == "drafter"
    assert [r.code for r in verdict.warnings] == ["W09"] and key in verdict.warnings[0].message


def test_absent_nextn_is_not_zero() -> None:
    assert detect(with_(c.FLASH_0731, num_nextn_predict_layers=DROP)).kind == "v4_dspark"


@pytest.mark.parametrize(
    ("changes", "layout", "trained_len"),
    [
        ({}, "anchor_first", 7),
        ({"sample_from_anchor": False}, "fill_in", 6),
        ({"dspark_bonus_anchor": True}, "fill_in", 6),
        ({"dspark_bonus_anchor": False}, "anchor_first", 7),
        ({"sample_from_anchor": True, "dspark_bonus_anchor": False}, "anchor_first", 7),
    ],
)
def test_layout(changes: dict[str, bool], layout: str, trained_len: int) -> None:
    verdict = detect(c.QWEN8B | changes)
    assert (verdict.layout, verdict.trained_len) == (layout, trained_len)
