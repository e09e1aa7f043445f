"""What holds for every config: names, order, quantisation change nothing; nothing is rewritten."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.detect.api import Verdict, detect, resolve
from common.detect.methods import METHODS
from common.detect.report import verdict_rows
from common.errors import ConfigError
from common.testing import configs as c

CONFIGS: list[dict[str, Any]] = [
    value
    for name, value in vars(c).items()
    if name.isupper() and isinstance(value, dict) and ("architectures" in value)
]
OURS = st.sampled_from(CONFIGS)
V4 = st.sampled_from([c.FLASH_0731, c.PRO_0813, c.VISION, c.V41])
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = sorted({key for config in CONFIGS for key in config} | {"dspark_config", "eagle_config"})
KEYS += ["open_spec_config_version", "n_mtp_layers", "sample_from_anchor", "dspark_bonus_anchor"]
# A value that is likely wrong, or right by accident.
VALUES = TREES | st.sampled_from(
    [value for config in CONFIGS for value in config.values()] + [0, -1, 10**400, "5", [[]]]
)
RELAXED = settings(max_examples=80, deadline=None)


def essence(verdict: Verdict) -> dict[str, Any]:
    """A verdict without what may mention names and quantisation."""
    plain = verdict.to_json()
    return {k: v for k, v in plain.items() if k not in ("name", "notes", "warnings")}


@given(OURS, TREES, st.text(max_size=30), st.randoms(use_true_random=False))
@settings(RELAXED)
def test_names_order_and_quantisation_change_nothing(
    config: dict[str, Any], quantisation: Any, name: str, random: Any
) -> None:
    keys = list(config)
    random.shuffle(keys)
    other = {key: config[key] for key in keys} | {"quantization_config": quantisation}
    assert essence(detect(other, name=name)) == essence(detect(config))


@given(OURS, st.dictionaries(st.text(max_size=12).map(lambda s: "x_" + s), TREES, max_size=5))
@settings(RELAXED)
def test_unknown_keys_change_nothing(config: dict[str, Any], unknown: dict[str, Any]) -> None:
    assert detect(unknown | config) == detect(config)


@given(OURS, st.none() | OURS, st.sampled_from(METHODS), st.none() | st.integers(1, 20))
@settings(RELAXED)
def test_an_explicit_method_is_kept_or_refused(
    target: dict[str, Any], draft: dict[str, Any] | None, method: str, k: int | None
) -> None:
    try:
        plan = resolve(detect(target), detect(draft) if draft else None, method, k)
    except ConfigError:
        return
    assert plan.method == method
    assert k is None or plan.num_speculative_tokens == k


@pytest.mark.parametrize("policy", ["floor", "strict", "lenient"])
@given(OURS, st.integers(1, 9))
@settings(RELAXED)
def test_mtp_and_dspark_are_never_both_valid(policy: str, config: dict[str, Any], k: int) -> None:
    runs = []
    for method in ("mtp", "dspark"):
        try:
            runs.append(resolve(detect(config), method=method, k=k, policy=policy))
        except ConfigError:
            continue
    assert len(runs) <= 1


@given(V4, st.none() | st.integers(1, 50))
@settings(RELAXED)
def test_dspark_does_not_depend_on_nextn(config: dict[str, Any], nextn: int | None) -> None:
    if "text_config" in config:
        other = c.within(config, "text_config", num_nextn_predict_layers=nextn)
    else:
        other = config | {"num_nextn_predict_layers": nextn}
    found, expected = essence(detect(other)), essence(detect(config))
    for verdict in (found, expected):
        del verdict["num_nextn"]
        verdict["sources"].pop("num_nextn", None)
    assert found == expected
    assert resolve(detect(other)).num_speculative_tokens == 5


def is_complete(error: ConfigError) -> bool:
    """Names a key path or setting, and suggests something."""
    names = re.search(r"`[\w.\[\]*]+`|method=|config\.json|num_speculative_tokens", error.message)
    complete = bool(names and error.hints and all(error.hints)) and "What works: " in error.message
    return complete and error.message.isprintable()  # hence one line, and no control codes


@given(OURS, st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
@settings(RELAXED, max_examples=300)
def test_wrong_values_end_in_a_verdict_or_a_complete_refusal(
    config: dict[str, Any], changes: dict[str, Any]
) -> None:
    try:
        verdict = detect(config | changes)
        json.dumps(verdict.to_json())
        resolve(verdict)
    except ConfigError as error:
        assert re.fullmatch(r"E\d\d", error.code) and is_complete(error), error


@given(
    TREES | OURS,
    TREES | st.dictionaries(st.sampled_from(c.DSPARK_NAMES), TREES),
    st.text(max_size=9),
)
@settings(RELAXED, max_examples=150)
def test_anything_at_all_ends_the_same_way(config: Any, index: Any, name: str) -> None:
    try:
        verdict = detect(config, index=index, name=name)
        assert all(text.isprintable() for row in verdict_rows(verdict) for text in row)
        json.dumps(verdict.to_json())
    except ConfigError as error:
        assert is_complete(error), error


@given(OURS, OURS | st.none(), TREES, TREES, st.sampled_from(["floor", "strict", "", "x"]) | TREES)
@settings(RELAXED, max_examples=150)
def test_strange_settings_end_the_same_way(
    target: dict[str, Any], draft: dict[str, Any] | None, method: Any, k: Any, policy: Any
) -> None:
    try:
        plan = resolve(detect(target), detect(draft) if draft else None, method, k, policy)
        json.dumps(plan.to_json())
    except ConfigError as error:
        assert is_complete(error), error


def test_every_config_of_the_list_is_used() -> None:
    assert len(CONFIGS) >= 22
    assert {detect(config).kind for config in CONFIGS} == {"v4_mtp", "v4_dspark", "drafter", "none"}
