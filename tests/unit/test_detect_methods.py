"""Method x shape x K: every cell ends as the plan that was asked for, or as its own refusal."""

from typing import Any

import pytest

from common.detect.api import Plan, Verdict, detect, resolve
from common.errors import ConfigError
from common.testing import configs as c
from common.testing.configs import with_, within

SHAPES = {
    "V4_MTP": detect(c.FLASH_MTP, name="flash-preview"),
    "V4_DSPARK": detect(c.FLASH_0731, name="flash-0731"),
    "PRO": detect(c.PRO_0813, name="pro-0813"),
    "VISION": detect(c.VISION),
    "V41": detect(c.V41),
    "DRAFTER": detect(c.QWEN8B, name="qwen-drafter"),
    "GEMMA": detect(c.GEMMA),
    "SPEC": detect(c.SPEC8),
    "SPEC_GLM": detect(c.SPEC_GLM),
    "SPECFORGE": detect(c.SPECFORGE),
    "K3": detect(c.K3),
    "LING": detect(c.LING),
    "OMNI": detect(c.QWEN8B | {"architectures": ["Qwen3OmniDSparkModel"]}),
    "VL": detect(c.QWEN8B | {"architectures": ["Qwen3VLDSparkModel"]}),
    "DFLASH": detect(c.QWEN8B_DFLASH, name="qwen-dflash"),
    "HYBRID": detect(c.HYBRID),
    "NONE": detect(c.LLAMA, name="llama"),
    "TRUNCATED": detect(c.FLASH_0731 | {"num_nextn_predict_layers": 0}),
    "MTP3": detect(c.FLASH_MTP | {"num_nextn_predict_layers": 3}),
}

# method -> outcome on each shape: a method name, None (nothing to run), or an error code
COLUMNS = ("V4_MTP", "V4_DSPARK", "PRO", "V41", "DRAFTER", "SPEC", "K3", "DFLASH", "NONE")
TABLE: dict[str | None, tuple[str | None, ...]] = {
    None: ("mtp", "dspark", "dspark", "dspark", "dspark", "dspark", "dspark", None, None),
    "dspark": ("E02", "dspark", "dspark", "dspark", "dspark", "dspark", "dspark", "E05", "E03"),
    "mtp": ("mtp", "E01", "E01", "E01", "E04", "E04", "E04", "E03", "E03"),
    "deepseek_mtp": ("mtp", "E01", "E01", "E01", "E04", "E04", "E04", "E03", "E03"),
    "dflash": ("E05",) * 9,
    "eagle": ("E05",) * 9,
    "eagle3": ("E05",) * 9,
    "draft_model": ("E06",) * 7 + ("draft_model", "draft_model"),
    "medusa": ("E06",) * 7 + ("medusa", "medusa"),
    "ngram": ("ngram",) * 9,
    "suffix": ("suffix",) * 9,
}
CELLS = [
    (method, shape, outcome)
    for method, outcomes in TABLE.items()
    for shape, outcome in zip(COLUMNS, outcomes, strict=True)
]


def outcome_of(*args: Any, **kwargs: Any) -> Plan | ConfigError:
    try:
        return resolve(*args, **kwargs)
    except ConfigError as error:
        return error


def valid_k(shape: Verdict, outcome: str | None) -> int | None:
    if outcome is None:
        return None
    return shape.trained_len or shape.num_nextn or 5


@pytest.mark.parametrize(("method", "shape", "expected"), CELLS)
def test_method_by_shape(method: str | None, shape: str, expected: str | None) -> None:
    target = SHAPES[shape]
    result = outcome_of(target, method=method, k=valid_k(target, expected))
    if isinstance(result, ConfigError):
        assert result.code == expected, result
    else:
        assert result.method == expected


@pytest.mark.parametrize(("method", "shape", "expected"), CELLS)
def test_a_named_draft_gives_the_same_answer(
    method: str | None, shape: str, expected: str | None
) -> None:
    """Naming the checkpoint as a separate draft is no way round a refusal."""
    draft = SHAPES[shape]
    target = draft if draft.kind.startswith("v4") else detect(c.LLAMA)
    result = outcome_of(target, draft, method=method, k=draft.trained_len or 5)
    if expected is None:
        expected = "E03"  # a draft was named, so "nothing to run" is no answer
    assert (result.code if isinstance(result, ConfigError) else result.method) == expected


NO_COUNTS: list[Any] = [0, -1, True, 5.0, "5", [5], {}, 2**31, 10**4000]

# shape, K, policy -> K that runs or error code, and the codes of warnings and notes
K_TABLE: list[tuple[str, Any, str, int | str, set[str]]] = [
    *(("V4_DSPARK", None, p, 5, {"I01"}) for p in ("floor", "strict", "lenient")),
    *(("V4_DSPARK", 5, p, 5, set()) for p in ("floor", "strict", "lenient")),
    *(("V4_DSPARK", k, "floor", "E10", set()) for k in (1, 2, 3, 4)),
    *(("V4_DSPARK", k, "strict", "E10", set()) for k in (1, 2, 3, 4)),
    *(("V4_DSPARK", k, "lenient", k, {"W01"}) for k in (1, 2, 3, 4)),
    *(("V4_DSPARK", k, "floor", k, {"W02"}) for k in (6, 7, 10)),
    *(("V4_DSPARK", k, "strict", "E11", set()) for k in (6, 7, 10)),
    *(("V4_DSPARK", k, "lenient", k, {"W02"}) for k in (6, 7, 10)),
    *(("V4_DSPARK", k, "lenient", "E12", set()) for k in NO_COUNTS),
    ("PRO", None, "floor", 5, {"I01"}),
    ("PRO", 7, "floor", 7, {"W02"}),
    # nextn 3 plays no part: 5 runs although 5 mod 3 is not 0
    ("VISION", None, "floor", 5, {"I01"}),
    ("VISION", 5, "strict", 5, set()),
    ("VISION", 6, "floor", 6, {"W02"}),
    ("VISION", 3, "floor", "E10", set()),
    *(("V41", k, "floor", k, set() if k == 5 else {"W02"}) for k in (5, 6, 7, 10)),
    ("V41", None, "floor", 5, {"I01"}),
    ("V41", 4, "floor", "E10", set()),
    *((s, None, "floor", 7, {"I01"}) for s in ("DRAFTER", "GEMMA", "SPECFORGE", "LING", "OMNI")),
    ("K3", None, "floor", 7, {"I01"}),
    *(("DRAFTER", k, "lenient", k, {"W01"}) for k in range(1, 7)),
    *(("DRAFTER", k, "floor", k, {"W02"}) for k in (8, 14)),
    *(("GEMMA", k, "floor", k, {"W02"}) for k in (8, 13, 14)),
    ("DRAFTER", 6, "floor", "E10", set()),
    ("LING", 6, "lenient", 6, {"W01"}),
    ("SPEC", None, "floor", 8, {"I01"}),
    ("SPEC_GLM", None, "strict", 15, {"I01"}),
    ("SPEC_GLM", 15, "strict", 15, set()),
    ("SPEC_GLM", 16, "strict", "E11", set()),
    ("SPEC_GLM", 16, "floor", 16, {"W02"}),
    ("SPEC_GLM", 14, "floor", "E10", set()),
    *(("OMNI", k, p, e, set()) for p in ("floor", "lenient") for k, e in ((6, "E10"), (8, "E11"))),
    ("VL", 8, "lenient", "E11", set()),
    ("VL", 6, "lenient", 6, {"W01"}),
    # classic MTP: no floor; more than nextn must be a multiple of it
    ("V4_MTP", None, "floor", 1, {"I01"}),
    *(("V4_MTP", k, "strict", k, set()) for k in (1, 2, 3, 9)),
    ("MTP3", None, "floor", 3, {"I01"}),
    *(("MTP3", k, "floor", k, set()) for k in (1, 2, 3, 6)),
    *(("MTP3", k, "floor", "E12", set()) for k in (4, 5, 0, True, "3")),
]


@pytest.mark.parametrize(("shape", "k", "policy", "expected", "codes"), K_TABLE)
def test_k_by_shape_and_policy(
    shape: str, k: Any, policy: str, expected: int | str, codes: set[str]
) -> None:
    own = "mtp" if "MTP" in shape else "dspark"
    for method in (None, own):  # asking for what is there changes nothing
        result = outcome_of(SHAPES[shape], method=method, k=k, policy=policy)
        if isinstance(result, ConfigError):
            assert result.code == expected, result
        else:
            assert (result.method, result.num_speculative_tokens) == (own, expected)
            assert {r.code for r in (*result.warnings, *result.notes)} - {"W09"} == codes


def test_a_proposal_below_the_block_is_the_authors_choice() -> None:
    methods = [{"proposal_type": "greedy", "speculative_tokens": 6}]
    plan = resolve(detect(within(c.SPEC8, "speculators_config", proposal_methods=methods)))
    assert plan.num_speculative_tokens == 6
    assert [r.code for r in plan.warnings] == ["W01"]


def test_a_proposal_past_the_block_is_no_default() -> None:
    shape = detect(c.SPEC8 | {"block_size": 7})
    with pytest.raises(ConfigError) as caught:
        resolve(shape)
    assert caught.value.code == "E18"
    for word in ("speculative_tokens` is 8", "7 drafts", "`sample_from_anchor` true"):
        assert word in caught.value.message
    assert resolve(shape, k=7).num_speculative_tokens == 7


def refused(*args: Any, **kwargs: Any) -> ConfigError:
    result = outcome_of(*args, **kwargs)
    assert isinstance(result, ConfigError), result
    return result


MTP_ON_DSPARK = [
    "'flash-0731'",
    "DSpark drafter and no MTP head",
    "`dspark_block_size` = 5",
    "`dspark_target_layer_ids` = [40, 41, 42]",
    'method="dspark"',
    "num_speculative_tokens=5",
    "model.layers.43.mtp_block.main_norm.weight",
    "Hopper",
    "H200",
]
TEXTS: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("V4_DSPARK", {"method": "mtp"}, "E01", MTP_ON_DSPARK),
    ("PRO", {"method": "mtp"}, "E01", ["model.layers.61.mtp_block", "[58, 59, 60]"]),
    ("V41", {"method": "mtp"}, "E01", ["`text_config.dspark_block_size` = 5", "vLLM refuses it"]),
    (
        "V4_MTP",
        {"method": "dspark"},
        "E02",
        ["plain MTP", *c.DSPARK_KEYS, 'method="mtp"', "num_speculative_tokens=1", "0731"],
    ),
    ("NONE", {"method": "dspark"}, "E03", ["'llama'", "LlamaForCausalLM", "--draft-model"]),
    ("NONE", {"method": "mtp"}, "E03", ["'llama'", "`num_nextn_predict_layers`"]),
    ("TRUNCATED", {"method": "dspark"}, "E03", ["keys_without_stages"]),
    ("DRAFTER", {"method": "mtp"}, "E04", ["family qwen3", 'method="dspark"', "=7", "rewritten"]),
    ("V4_DSPARK", {"method": "dflash"}, "E05", ["dflash", "`dspark_markov_rank`", "DSpark"]),
    ("DRAFTER", {"method": "eagle3"}, "E05", ["eagle3", "`markov_rank` = 256"]),
    ("DFLASH", {"method": "dspark"}, "E05", ["DFlash", "`markov_rank` is 0"]),
    ("HYBRID", {"method": "dspark"}, "E05", ["DFlash", "`projector_type`", "relabel"]),
    ("DRAFTER", {"method": "draft_model"}, "E06", ["never replaced", 'method="dspark"']),
    ("V4_DSPARK", {"k": 4}, "E10", ["is 4", "B = 5", "`dspark_block_size`", "lenient", "gamma 5"]),
    ("V4_DSPARK", {"k": 7, "policy": "strict"}, "E11", ["is 7", "B = 5", "untrained"]),
    ("V4_DSPARK", {"k": 5.0}, "E12", ["5.0 (float)", "positive integer"]),
    ("V4_DSPARK", {"k": "5"}, "E12", ["'5' (str)", "num_speculative_tokens=5"]),
    ("MTP3", {"k": 4}, "E12", ["is 4", "`num_nextn_predict_layers` = 3", "multiple"]),
    ("NONE", {"method": "ngram"}, "E13", ["`dspark_block_size`", "`block_size`"]),
    ("NONE", {"k": 5}, "E03", ["has nothing"]),
    ("V4_DSPARK", {"policy": "loose"}, "E07", ["'loose'", "floor, strict, lenient"]),
]


@pytest.mark.parametrize(("shape", "settings", "code", "words"), TEXTS)
def test_texts_name_the_key_the_value_and_the_way_out(
    shape: str, settings: dict[str, Any], code: str, words: list[str]
) -> None:
    error = refused(SHAPES[shape], **settings)
    assert error.code == code
    for word in words:
        assert word in error.message
    for hint in error.hints:
        assert hint in error.message


@pytest.mark.parametrize(
    ("method", "suggestion"),
    [
        ("DSpark", "dspark"),
        (" dspark ", "dspark"),
        ("dpsark", "dspark"),
        ("MTP", "mtp"),
        ("n-gram", "ngram"),
        ("", "dspark"),
        (5, "dspark"),
        (True, "dspark"),
        (["dspark"], "dspark"),
    ],
)
def test_unknown_methods_are_refused_with_the_nearest_one(method: Any, suggestion: str) -> None:
    error = refused(SHAPES["V4_DSPARK"], method=method, k=5)
    assert error.code == "E07"
    assert f'method="{suggestion}"' in error.message
    assert type(method).__name__ in error.message and "deepseek_mtp" in error.message


def test_mtp_by_a_named_draft_path_ends_like_by_the_targets_own() -> None:
    target = SHAPES["V4_DSPARK"]
    by_path = detect(c.FLASH_0731, name="/models/Flash-0731-dspark")
    error = refused(target, by_path, method="mtp")
    assert error.code == "E01" and "Flash-0731-dspark" in error.message
    assert resolve(target, by_path, k=5).method == "dspark"


def test_plans_say_who_drafts_and_what_is_ignored() -> None:
    assert resolve(SHAPES["V4_DSPARK"]).draft == "self"
    assert resolve(SHAPES["V4_DSPARK"], SHAPES["V4_DSPARK"]).draft == "self"  # its own path
    elsewhere = detect(c.FLASH_0731, name="elsewhere")
    assert resolve(SHAPES["V4_DSPARK"], elsewhere).draft == "separate"
    assert resolve(SHAPES["DRAFTER"]).draft == "separate"
    assert resolve(detect(c.QWEN8B_TARGET), SHAPES["DRAFTER"]).draft == "separate"
    free = resolve(detect(c.QWEN8B_TARGET), SHAPES["DRAFTER"], method="ngram", k=3)
    assert free.draft is None and [r.code for r in free.warnings] == ["W05"]
    unnamed = resolve(SHAPES["NONE"], method="draft_model", k=3)
    assert unnamed.draft == "separate" and [r.code for r in unnamed.warnings] == ["W05"]
    assert not resolve(SHAPES["NONE"], SHAPES["NONE"], method="draft_model", k=3).warnings
    alias = resolve(SHAPES["V4_MTP"], method="deepseek_mtp")
    assert [r.code for r in alias.warnings] == ["W06"]


def test_missing_draft_weights_stop_only_plans_that_need_them() -> None:
    dropped = detect(c.FLASH_MTP, index=c.IDX_NONE)
    assert [r.code for r in dropped.warnings] == ["E22"]
    error = refused(dropped)
    assert error.code == "E22"
    for word in ("model.safetensors.index.json", "quantisers", "`mtp.*`", "--draft-model"):
        assert word in error.message
    assert refused(detect(c.FLASH_0731, index=c.IDX_NONE), k=5).code == "E22"
    assert resolve(dropped, method="ngram", k=3).method == "ngram"
    assert resolve(dropped, SHAPES["V4_MTP"]).method == "mtp"


def test_no_drafter_and_nothing_asked_is_a_plan_without_drafts() -> None:
    plan = resolve(SHAPES["NONE"])
    assert plan.method is None and plan.num_speculative_tokens is None
    assert refused(SHAPES["NONE"], detect(with_(c.LLAMA))).code == "E03"
