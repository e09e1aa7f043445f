"""DeepSeek-V4 checkpoints: plain MTP or with their own DSpark drafter.

Both say the same `architectures` and `model_type`; only the four `dspark_*` keys separate them, and
all four must be there. `num_nextn_predict_layers` is neither the stage count nor the block size; it
matters only when it is 0 (no heads were exported). Knows no stand-alone drafter.
"""

from collections.abc import Mapping
from dataclasses import replace

from common.detect.fields import (
    PREFIXED_KEYS,
    Config,
    Reader,
    check_filler,
    check_tap_range,
    whole,
)
from common.detect.heads import read_heads
from common.detect.refusal import refuse, show
from common.detect.source import Source
from common.detect.verdict import Remark, Verdict

_V41_TYPES = ("deepseek_v41", "deepseek_v41_text")
_V4_TYPES = ("deepseek_v4", *_V41_TYPES)
# What vLLM's override of a V4 config leaves behind; a dict may reach us in that form.
_OVERRIDDEN_TYPE = "deepseek_mtp"
_OVERRIDDEN_CLASSES = ("DeepSeekV4MTPModel", "DeepseekV41ForCausalLM")
_RELEASED_STAGES = 3  # every public V4 with DSpark: mtp.0 to mtp.2


def is_v4(source: Source) -> bool:
    """The config's types say DeepSeek-V4; class names count only where no type is given."""
    if any(t in _V4_TYPES for t in source.model_types):
        return True
    if source.model_type == _OVERRIDDEN_TYPE:
        return any(c in _OVERRIDDEN_CLASSES for c in source.architectures)
    named = ("DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM")
    return not source.model_types and any(c in named for c in source.architectures)


def prefixed_body(source: Source) -> str | None:
    """Where the `dspark_*` keys sit: "" (top level), "text_config", or None when all are null."""
    if any(source.config.get(key) is not None for key in PREFIXED_KEYS):
        return ""
    if any(source.text.get(key) is not None for key in PREFIXED_KEYS):
        return "text_config"
    return None


def expert_dtype(source: Source) -> str:
    """Storage of routed experts, "fp4" unless said otherwise; V4.1 says it beside the quantiser."""
    places = (source.config, source.text, _quantisation(source))
    values = (place.get("expert_dtype") for place in places)
    return next((value for value in values if isinstance(value, str)), "fp4")


def read_dspark(source: Source, body_name: str) -> Verdict:
    """The verdict for a V4 config with `dspark_*` keys in `body_name`.

    Raises:
        ConfigError: E08 incomplete, E14-E16 and E24 unusable values.
    """
    reader = Reader(source.config, body_name)
    nextn = reader.read("num_nextn", whole(0), "num_nextn_predict_layers")
    body = source.text if body_name else source.config
    if nextn == 0:
        text = (
            "the `dspark_*` keys are there but `num_nextn_predict_layers` is 0: a truncated "
            "export without draft stages"
        )
        hints, warnings = ("keys_without_stages",), (Remark("W08", text),)
        return replace(_described(source, reader), num_nextn=0, hints=hints, warnings=warnings)
    _require_all(body, body_name)
    heads = read_heads(source, reader, lowest_tap=0, lowest_rank=1, confidence=True)
    taps = heads.target_layer_ids
    assert heads.block_size and taps and heads.markov_rank, heads  # by _require_all
    target = _described(source, reader)
    read_at = reader.sources
    check_tap_range(
        taps,
        target.num_layers,
        read_at["target_layer_ids"],
        read_at.get("num_layers", "num_hidden_layers"),
    )
    check_filler(
        heads.filler_token_id,
        target.vocab_size,
        read_at["filler_token_id"],
        read_at.get("vocab_size", "vocab_size"),
    )
    return replace(
        heads,
        kind="v4_dspark",
        family=target.family,
        num_stages=_configured_stages(source, reader, target.num_layers),
        num_nextn=nextn,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        confidence_with_markov=True,
        notes=_notes(source),
    )


def read_plain(source: Source) -> Verdict:
    """The verdict for a V4 config without any `dspark_*` value.

    Raises:
        ConfigError: E09, V4.1 has no other drafter than DSpark; E08, E16, E24 unusable values.
    """
    if _family(source) == "deepseek_v41":
        raise refuse(
            "E09",
            f"{source.name or 'config.json'}: `model_type` is {show(source.model_type)}, but no "
            "`dspark_*` key has a value. V4.1 never had a classic MTP head: without the keys "
            "nothing can draft.",
            "the original config.json, whose `text_config` holds `dspark_block_size` 5 and its "
            "three companions",
        )
    reader = Reader(source.config)
    nextn = reader.read("num_nextn", whole(0), "num_nextn_predict_layers")
    described = _described(source, reader)
    if not nextn:
        return replace(described, num_nextn=nextn, hints=("no_heads",))
    reader.sources["num_stages"] = reader.sources["num_nextn"]
    return replace(described, kind="v4_mtp", num_nextn=nextn, num_stages=nextn)


def stage_remark(verdict: Verdict) -> Verdict:
    """Adds W03 when the real stage count is known and `num_nextn_predict_layers` says another."""
    if verdict.kind != "v4_dspark" or verdict.sources["num_stages"] == "default":
        return verdict
    if verdict.num_nextn in (None, verdict.num_stages):
        return verdict
    remark = Remark(
        "W03",
        f"`num_nextn_predict_layers` is {verdict.num_nextn}, but the drafter has "
        f"{verdict.num_stages} stages (from {verdict.sources['num_stages']}); the key is ignored "
        "for dspark",
    )
    return replace(verdict, warnings=(*verdict.warnings, remark))


def _described(source: Source, reader: Reader) -> Verdict:
    """What holds with and without a drafter: the target's names and sizes."""
    sections = ("", "text_config")
    return Verdict(
        kind="none",
        family=_family(source),
        name=source.name,
        model_type=source.model_type,
        architectures=source.architectures,
        hidden_size=reader.size("hidden_size", "hidden_size", *sections),
        num_layers=reader.size("num_layers", "num_hidden_layers", *sections),
        vocab_size=reader.size("vocab_size", "vocab_size", *sections),
        sources=reader.sources,
    )


def _family(source: Source) -> str:
    v41 = any(t in _V41_TYPES for t in source.model_types)
    v41 = v41 or "DeepseekV41ForCausalLM" in source.architectures
    return "deepseek_v41" if v41 else "deepseek_v4"


def _require_all(body: Config, body_name: str) -> None:
    missing = [key for key in PREFIXED_KEYS if body.get(key) in (None, [], ())]
    if not missing:
        return
    present = [key for key in PREFIXED_KEYS if key not in missing]
    prefix = f"{body_name}." if body_name else ""
    raise refuse(
        "E08",
        f"incomplete DSpark keys in {body_name or 'config.json'}: present "
        f"{', '.join(present) or 'none'}; missing or empty "
        f"{', '.join(f'`{prefix}{key}`' for key in missing)}. A converter probably stripped them; "
        "a partial set is never taken for plain MTP.",
        f"restore {', '.join(missing)} from the original config.json (V4 releases have "
        "dspark_block_size 5)",
        "remove all four keys if the checkpoint really has only the classic MTP head",
    )


def _configured_stages(source: Source, reader: Reader, num_layers: int | None) -> int:
    """Stages as far as the config tells: `n_mtp_layers`, else the tail of `compress_ratios`."""
    explicit = reader.read("num_stages", whole(1), "n_mtp_layers")
    if explicit is not None:
        return explicit
    ratios = source.config.get("compress_ratios")
    if _family(source) == "deepseek_v4" and isinstance(ratios, list) and num_layers is not None:
        tail = len(ratios) - num_layers
        if tail > 0:
            reader.sources["num_stages"] = "compress_ratios"
            return tail
    return reader.default("num_stages", _RELEASED_STAGES)


def _notes(source: Source) -> tuple[Remark, ...]:
    notes = []
    if _family(source) == "deepseek_v41":
        text = "V4.1 is reported to tap a layer's input; `target_layer_ids` are as written"
        notes.append(Remark("I02", text))
    if _excludes_drafter(_quantisation(source)):
        text = (
            "DRAFT_QUANT_DIFFERS: `quantization_config` leaves `mtp.*` out, so the drafter keeps "
            "the original format"
        )
        notes.append(Remark("I03", text))
    return tuple(notes)


def _quantisation(source: Source) -> Config:
    """The quantiser's settings, in a wrapper its text body's. Never raises: advisory here."""
    found = source.config.get("quantization_config") or source.text.get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def _excludes_drafter(quantisation: Config) -> bool:
    """A repack's list of untouched modules names the draft stages."""
    lists = (quantisation.get(k) for k in ("ignore", "exclude_modules", "modules_to_not_convert"))
    return any(
        isinstance(entry, str) and "mtp" in entry
        for modules in lists
        if isinstance(modules, list | tuple)
        for entry in modules
    )
