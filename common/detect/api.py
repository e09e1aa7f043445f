"""`detect`: from a parsed config.json to a verdict, in a fixed order of rules.

    verdict = detect(config, index=index, name="/models/target")
    plan = resolve(verdict, draft=None, method=None, k=None, policy="floor")

`common.detect.files.detect_checkpoint(path)` does the first line from disk.

Nothing here opens a weight file or imports torch. Names are never evidence: they only colour a
message. Every refusal is a `common.errors.ConfigError` with one of these codes:

    E01 mtp on V4 DSpark          E09 V4.1 without DSpark keys    E17 config against index
    E02 dspark on plain V4        E10 K shorter than trained      E18 proposal past the block
    E03 nothing to draft with     E11 K longer than trained       E19 drafter against target
    E04 mtp on a drafter          E12 K no usable number          E20 no readable config.json
    E05 another method's format   E13 K missing                   E21 speculators file
    E06 draft_model on DSpark     E14 tapped layers               E22 draft weights missing
    E07 unknown method or policy  E15 filler token                E23 not a Hugging Face config
    E08 DSpark keys incomplete    E16 two places differ           E24 wrong type elsewhere

    W01 K shorter than trained    W05 draft or setting unused     W09 something left unsaid
    W02 K longer than trained     W06 method alias                W10 taps the last layer
    W03 nextn is not the stages   W07 parts of another drafter
    W04 name against config       W08 keys without effect         I01 K defaulted, I02.. notes
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import PurePath
from typing import Any

from common.detect import deepseek_v4, drafters, lookalikes, speculators
from common.detect import index as tensor_index
from common.detect.plan import resolve
from common.detect.refusal import refuse, show
from common.detect.source import Source, open_source
from common.detect.verdict import Plan, Remark, Verdict
from common.errors import ConfigError

__all__ = ["Plan", "Remark", "Verdict", "detect", "resolve"]


def detect(
    config: Mapping[str, Any],
    *,
    index: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Verdict:
    """Says what drafter `config` describes.

    `index` is a parsed model.safetensors.index.json (or its weight_map): a second opinion on V4
    checkpoints. `name` is how messages call the checkpoint; it decides nothing.

    Raises:
        ConfigError: the config is unusable or contradicts itself; codes above.
    """
    source = open_source(config, name)
    verdict = _classify(source)
    names = tensor_index.draft_names(index)
    if names is not None and verdict.kind != "drafter" and deepseek_v4.is_v4(source):
        dtype = deepseek_v4.expert_dtype(source)
        verdict = tensor_index.second_opinion(verdict, names, dtype)
    return _name_remark(deepseek_v4.stage_remark(verdict))


def _classify(source: Source) -> Verdict:
    """The rules, first match wins; comments say why one stands before another."""
    # Outranks class names: published speculators files carry misleading ones.
    if source.config.get(speculators.TYPE_KEY) is not None:
        return speculators.read_speculators(source)
    if source.config.get(lookalikes.OPEN_SPEC_KEY) is not None:
        return lookalikes.read_open_spec(source)
    is_v4, body_name = deepseek_v4.is_v4(source), deepseek_v4.prefixed_body(source)
    # Before the class names: vLLM's name for the V4 drafter is SpecForge's for a dense one.
    if is_v4 and body_name is not None:
        return deepseek_v4.read_dspark(source, body_name)
    if (family := drafters.drafter_family(source)) is not None:
        return drafters.read_drafter(source, family)
    # A drafter config is a copy of its target's, so an EAGLE drafter for V4 looks like plain V4.
    if is_v4 and not lookalikes.is_foreign_drafter(source):
        return deepseek_v4.read_plain(source)
    if not source.model_types and not source.architectures:
        raise _not_hugging_face(source)
    return lookalikes.read_other(source, body_name)


def _not_hugging_face(source: Source) -> ConfigError:
    hint = "the config.json one folder up" if "n_mtp_layers" in source.config else "a config.json"
    return refuse(
        "E23",
        f"{show(source.name)}: neither `architectures` nor `model_type` is there; keys found: "
        f"{show(list(islice(source.config, 8)))}. This looks like a reference "
        "implementation's own config, not a Hugging Face one.",
        f"{hint} with `model_type`, e.g. 'deepseek_v4'",
    )


def _name_remark(verdict: Verdict) -> Verdict:
    """Adds W04 when the folder or repository name says another thing than the config."""
    last = PurePath(verdict.name).name.lower() if verdict.name else ""
    claims_dspark = "dspark" in last
    claims_other = "dflash" in last or "eagle" in last or "mtp" in last.split("-")
    if not (claims_other if verdict.is_dspark else claims_dspark):
        return verdict
    is_what = f"kind {verdict.kind}" + (f" ({', '.join(verdict.hints)})" if verdict.hints else "")
    text = f"the name {show(last)} suggests otherwise, but the config says {is_what}; it decides"
    return replace(verdict, warnings=(*verdict.warnings, Remark("W04", text)))
