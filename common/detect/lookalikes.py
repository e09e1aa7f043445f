"""Configs that are no DSpark drafter: what they look like instead, as hints and warnings.

Last in the order of rules; never refuses. Knows class names and keys of DFlash, EAGLE, GGUF and
multi-token-prediction families.
"""

from collections.abc import Mapping
from dataclasses import replace

from common.detect.refusal import show
from common.detect.source import Source, is_name
from common.detect.verdict import Remark, Verdict

OPEN_SPEC_KEY = "open_spec_config_version"
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def is_foreign_drafter(source: Source) -> bool:
    """An EAGLE or DFlash class name: a drafter of another kind, whatever its copied keys say."""
    return _has_class(source, "eagle") or _has_class(source, "dflash")


def read_other(source: Source, body_name: str | None) -> Verdict:
    """Kind none, with hints; `body_name` is where stray `dspark_*` keys sit, None without any."""
    verdict = Verdict(
        kind="none",
        family=source.model_type or source.text_model_type,
        name=source.name,
        model_type=source.model_type,
        architectures=source.architectures,
        hidden_size=source.loose_size("hidden_size"),
        num_layers=source.loose_size("num_hidden_layers"),
        vocab_size=source.loose_size("vocab_size"),
    )
    hints, warnings = list(_hints(source)), []
    if "dflash" in hints:
        extra, remark = _dspark_parts(source)
        hints += extra
        warnings += remark
    if body_name is not None:
        warnings.append(
            Remark(
                "W08",
                f"`dspark_*` keys in {body_name or 'config.json'} on `model_type` "
                f"{source.model_type!r}, a family that has no DSpark; they are ignored",
            )
        )
    return replace(verdict, hints=tuple(hints), warnings=tuple(warnings))


def read_open_spec(source: Source) -> Verdict:
    """The verdict for a DFlash Open Spec file; the method it names is passed on as a hint."""
    settings = source.config.get("speculative_config")
    method = settings.get("method") if isinstance(settings, Mapping) else None
    hints: tuple[str, ...] = ("dflash",)
    if method not in (None, "dflash"):
        hints += (f"open_spec:{method if is_name(method) else show(method)}",)
    return replace(read_other(source, None), hints=hints, warnings=())


def _hints(source: Source) -> list[str]:
    hints = []
    if _has_class(source, "dflash") or isinstance(source.config.get("dflash_config"), Mapping):
        hints.append("dflash")
    if _has_class(source, "eagle3") or source.config.get("ttt_length") is not None:
        hints.append("eagle3")
    elif _has_class(source, "eagle"):
        hints.append("eagle")
    if _has_class(source, "dspark"):
        hints.append("unknown_dspark")
    if any("gguf" in t for t in source.model_types):
        hints.append("gguf")
    if any(source.loose_size(key) for key in _MTP_KEYS) or any(
        "mtp" in t for t in source.model_types
    ):
        hints.append("mtp")
    return hints


def _dspark_parts(source: Source) -> tuple[list[str], list[Remark]]:
    """A DFlash label over DSpark parts: a Markov bias alone, or with a confidence head."""
    nested = source.config.get("dflash_config")
    places = [source.config, nested if isinstance(nested, Mapping) else {}]
    rank = next((p["markov_rank"] for p in places if p.get("markov_rank") is not None), 0)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank <= 0:
        return [], []
    if any(p.get("enable_confidence_head") is True for p in places):
        text = (
            f"a DFlash class name, yet `markov_rank` {show(rank)} and a confidence head: it has "
            "DSpark heads. If its anchor row predicts, relabel `architectures` as "
            '["Qwen3DSparkModel"]'
        )
        return ["dflash+markov", "dspark_heads"], [Remark("W07", text)]
    text = f"a DFlash class name with a Markov bias (`markov_rank` {show(rank)}); treated as DFlash"
    return ["dflash+markov"], [Remark("W07", text)]


def _has_class(source: Source, word: str) -> bool:
    return any(word in name.lower() for name in source.architectures)
