"""Stand-alone DSpark drafters: DeepSpec, SpecForge, K3, LFM2, Ling, Qwen3-Omni/VL, NeMo, mlx.

A drafter config is a copy of its target's with the drafter's keys added, so `model_type` may say
anything; the class name, or `dflash_config.projector_type`, decides. Rank 0 means no Markov head:
DeepSpec publishes its DFlash baselines under the same class names. Knows no speculators file.
"""

from dataclasses import replace

from common.detect.fields import Reader, check_filler, check_tap_range, section
from common.detect.heads import read_heads
from common.detect.refusal import refuse, show
from common.detect.source import Source
from common.detect.verdict import Remark, Verdict

_SUFFIXES = ("DSparkDraftModel", "DSparkModel")
_MODEL_TYPES = {
    "k3_dspark": "k3",
    "qwen3_vl_dflash": "qwen3_vl",
    "deepseek_v4_dspark": "deepseek_v4",  # mlx conversions
}
# Class name without its suffix -> family; any other prefix is its own family in lower case.
_FAMILIES = {
    "": "specforge",
    "DeepseekV4": "deepseek_v4_standalone",
    "Qwen3Omni": "qwen3_omni",
    "Qwen3VL": "qwen3_vl",
    "Qwen3_5": "qwen3_5",
    "Qwen35": "qwen3_5",
}


def drafter_family(source: Source) -> str | None:
    """The family of a stand-alone DSpark drafter, None when the config describes none."""
    for class_name in source.architectures:
        for suffix in _SUFFIXES:
            if class_name.endswith(suffix):
                prefix = class_name.removesuffix(suffix)
                return _FAMILIES.get(prefix, prefix.lower())
    if source.model_type in _MODEL_TYPES:
        return _MODEL_TYPES[source.model_type]
    dflash = section(source.config, "dflash_config")
    return "specforge" if dflash.get("projector_type") == "dspark" else None


def read_drafter(source: Source, family: str) -> Verdict:
    """The verdict for a stand-alone drafter config; kind none when its Markov rank is 0 (DFlash).

    Raises:
        ConfigError: E08 block size or taps missing, E14-E16 and E24 unusable values.
    """
    reader = Reader(source.config)
    heads = read_heads(source, reader, lowest_tap=-1, lowest_rank=0, confidence=False)
    if heads.markov_rank == 0:
        return without_markov(heads)
    require(heads, "block_size", "target_layer_ids")
    vocab_size = reader.size("vocab_size", "vocab_size", "")
    taps, num_layers = heads.target_layer_ids, None
    assert taps is not None  # by require
    if family == "k3":
        # Here the key counts the taps; in every other family it is the target's depth.
        _require_tap_count(taps, source)
    else:
        num_layers = reader.size("num_layers", "num_target_layers", "")
    check_tap_range(taps, num_layers, heads.sources["target_layer_ids"], "num_target_layers")
    check_filler(
        heads.filler_token_id, vocab_size, heads.sources.get("filler_token_id", ""), "vocab_size"
    )
    return replace(
        heads,
        kind="drafter",
        family=family,
        num_stages=reader.size("num_stages", "num_hidden_layers", ""),
        hidden_size=reader.size("hidden_size", "target_hidden_size", "")
        or reader.size("hidden_size", "hidden_size", ""),
        num_layers=num_layers,
        vocab_size=vocab_size,
        notes=vocabulary_notes(heads, vocab_size),
        warnings=gaps(heads),
    )


def without_markov(heads: Verdict) -> Verdict:
    """Rank 0: DFlash under a DSpark name, so no drafter of ours."""
    path = heads.sources["markov_rank"]
    remarks: tuple[Remark, ...] = ()
    if heads.confidence_head:
        remarks = (
            Remark(
                "W07",
                f"`{path}` is 0 (plain DFlash), yet `{heads.sources['confidence_head']}` is true; "
                "no release looks like this",
            ),
        )
    return replace(heads, kind="none", family=heads.model_type, hints=("dflash",), warnings=remarks)


def require(heads: Verdict, *fields: str) -> None:
    """Raises E08 unless all of `fields` were found and the block can draft at all."""
    spelled = {
        "block_size": "`block_size`",
        "target_layer_ids": "`target_layer_ids` (speculators: `aux_hidden_state_layer_ids`)",
        "filler_token_id": "`mask_token_id`",
    }
    missing = [spelled[f] for f in fields if getattr(heads, f) is None]
    if missing:
        present = ", ".join(f"`{path}`" for path in heads.sources.values() if path != "default")
        raise refuse(
            "E08",
            f"incomplete DSpark drafter config of {heads.label} (`architectures` "
            f"{show(heads.architectures)}): missing {', '.join(missing)}; present "
            f"{present or 'none'}. A converter may have stripped them; no default is assumed.",
            f"add {missing[0]} as in the training config (released drafters have block_size 7, "
            "target_layer_ids like [1, 9, 17, 25, 33])",
        )
    if heads.trained_len == 0:
        raise refuse(
            "E08",
            "`block_size` is 1 and the anchor's row predicts nothing (`sample_from_anchor` false): "
            "such a block drafts no token.",
            "`block_size` of at least 2, as trained",
        )


def gaps(heads: Verdict) -> tuple[Remark, ...]:
    """W09 for what a drafter normally says and this one does not."""
    missing = []
    if heads.markov_rank is None:
        missing.append("`markov_rank`")
    if heads.filler_token_id is None:
        missing.append("`mask_token_id`")
    if not missing:
        return ()
    text = f"{' and '.join(missing)} absent: the loader must learn it from elsewhere or refuse"
    return (Remark("W09", text),)


def vocabulary_notes(heads: Verdict, vocab_size: int | None) -> tuple[Remark, ...]:
    """I04 when the draft vocabulary differs from the target's."""
    draft = heads.draft_vocab_size
    if draft is None or vocab_size is None or draft == vocab_size:
        return ()
    needs = "d2t table" if draft < vocab_size else "embed_tokens"
    text = f"`draft_vocab_size` {draft} of {vocab_size}: the drafter must bring its own {needs}"
    return (Remark("I04", text),)


def _require_tap_count(taps: tuple[int, ...], source: Source) -> None:
    declared = Reader(source.config).size("num_taps", "num_target_layers", "")
    if declared is not None and declared != len(taps):
        raise refuse(
            "E14",
            f"`num_target_layers` is {show(declared)} but `target_layer_ids` {show(list(taps))} "
            f"has {len(taps)} taps; in a K3 drafter the two must agree.",
            f"`num_target_layers`: {len(taps)}",
        )
