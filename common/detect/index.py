"""The tensor index as a second opinion on a DeepSeek-V4 verdict.

Config decides; the index may stop a verdict that the weights contradict, lower trust in it, or give
the real stage count. Knows tensor names only, no tensor.
"""

from collections.abc import Mapping
from dataclasses import replace

from common.detect.names import STAGE_NAME, name_problems, stages
from common.detect.refusal import refuse, show, typed
from common.detect.verdict import Remark, Verdict
from common.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
_CLASSIC_MODULES = ("enorm", "hnorm", "e_proj", "h_proj")
_DSPARK_MODULES = ("main_proj", "main_norm")


def draft_names(index: Mapping[str, object] | None) -> tuple[str, ...] | None:
    """The `mtp.<stage>.` tensor names of a parsed index file (or of its weight_map alone).

    Raises:
        ConfigError: E20, it is no such file.
    """
    if index is None:
        return None
    weight_map = index.get("weight_map", index) if isinstance(index, Mapping) else index
    if not isinstance(weight_map, Mapping):
        raise refuse(
            "E20",
            f"`{INDEX_FILE}` has no `weight_map` object; it holds {typed(weight_map)}.",
            "download the file again",
        )
    return tuple(n for n in weight_map if isinstance(n, str) and STAGE_NAME.fullmatch(n))


def second_opinion(verdict: Verdict, names: tuple[str, ...], expert_dtype: str) -> Verdict:
    """`verdict` of a V4 config with what its draft tensor `names` add.

    Raises:
        ConfigError: E17, config and weights cannot belong to the same revision.
    """
    verdict = replace(verdict, index_checked=True, draft_weights=bool(names))
    classic = _named(names, _CLASSIC_MODULES)
    dspark = _named(names, _DSPARK_MODULES)
    if verdict.kind == "none":
        return _warn_of_denied_weights(verdict, names)
    if not names:
        return _warn(verdict, "E22", missing_weights(verdict).message)
    if verdict.kind == "v4_mtp":
        if dspark:
            raise refuse(
                "E17",
                f"{verdict.label}: config.json has no `dspark_*` keys (plain MTP), yet "
                f"{INDEX_FILE} lists the DSpark tensor {dspark[0]}; a converter may have dropped "
                "the keys.",
                "the config.json of the original release, with `dspark_block_size` and its "
                "three companions",
            )
        return verdict
    if classic and not dspark:
        raise refuse(
            "E17",
            f"{verdict.label}: config.json has `dspark_*` keys, yet {INDEX_FILE} lists the classic "
            f"MTP tensor {classic[0]} and no main_proj; config and weights are from different "
            "revisions.",
            "config.json and weights downloaded from one revision",
        )
    if problems := name_problems(names, expert_dtype=expert_dtype):
        raise refuse(
            "E17",
            f"{verdict.label}: {INDEX_FILE} does not hold the DSpark drafter that the `dspark_*` "
            f"keys describe: {problems[0]}.",
            "a complete download of one revision",
        )
    return _with_real_parts(verdict, names)


def missing_weights(verdict: Verdict) -> ConfigError:
    """The E22 error: the config promises a draft head and the index has none."""
    return refuse(
        "E22",
        f"{verdict.label}: config.json promises a draft head "
        f"(`{verdict.sources.get('block_size', 'num_nextn_predict_layers')}`), yet {INDEX_FILE} "
        "lists no `mtp.*` tensor; quantisers are known to drop them.",
        "a repack that keeps the `mtp.*` tensors",
        "a separate drafter named with --draft-model",
    )


def _with_real_parts(verdict: Verdict, names: tuple[str, ...]) -> Verdict:
    """Stage count and confidence head as the weights have them."""
    sources = dict(verdict.sources)
    sources["num_stages"] = INDEX_FILE
    verdict = replace(verdict, num_stages=len(stages(names)), sources=sources)
    if _named(names, ("confidence_head",)) or not verdict.confidence_head:
        return verdict
    sources["confidence_head"] = INDEX_FILE
    verdict = replace(verdict, confidence_head=False)
    return _warn(
        verdict,
        "W09",
        f"{verdict.label}: {INDEX_FILE} lists no confidence_head tensor; drafts carry no "
        "confidence, so verify lengths can only be fixed.",
    )


def _warn_of_denied_weights(verdict: Verdict, names: tuple[str, ...]) -> Verdict:
    if not names:
        return verdict
    return _warn(
        verdict,
        "W08",
        f"{verdict.label}: {INDEX_FILE} lists draft tensors such as {show(names[0])}, but "
        "config.json denies them (`num_nextn_predict_layers` is 0 or absent); they stay unused.",
    )


def _named(names: tuple[str, ...], modules: tuple[str, ...]) -> list[str]:
    """Those of `names` whose first component after the stage is one of `modules`."""
    found = []
    for name in names:
        match = STAGE_NAME.fullmatch(name)
        if match and match[2].split(".", 1)[0] in modules:
            found.append(name)
    return found


def _warn(verdict: Verdict, code: str, message: str) -> Verdict:
    return replace(verdict, warnings=(*verdict.warnings, Remark(code, message)))
