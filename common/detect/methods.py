"""Which method may run on which checkpoint: an explicit choice is honoured or refused.

Engines that re-derive `mtp` from path names end in a KeyError deep in a loader; here the same
question ends at start, with the key that decides and the way out. Of K it knows only which one to
suggest.
"""

import difflib

from common.detect.fields import PREFIXED_KEYS
from common.detect.refusal import refuse, show, typed
from common.detect.verdict import Remark, Verdict
from common.errors import ConfigError

# vLLM's names, so that a command line moves over; what each may run on is `check_method`.
_OTHER_FORMATS = ("dflash", "eagle", "eagle3")
_DRAFT_MODELS = ("draft_model", "medusa", "mlp_speculator")
FREE_METHODS = ("ngram", "suffix", "custom_class", "extract_hidden_states")
METHODS = ("dspark", "mtp", *_OTHER_FORMATS, *_DRAFT_MODELS, *FREE_METHODS)
_ALIASES = {"deepseek_mtp": "mtp"}


def parse_method(method: object) -> tuple[str | None, list[Remark]]:
    """The method in its one spelling; None stays None. Raises E07 for anything unknown."""
    if method is None:
        return None, []
    if isinstance(method, str) and method in METHODS:
        return method, []
    if isinstance(method, str) and method in _ALIASES:
        text = f"method {method!r} is an alias of {_ALIASES[method]!r}"
        return _ALIASES[method], [Remark("W06", text)]
    guess = "dspark"
    if isinstance(method, str):
        close = difflib.get_close_matches(method.strip().lower()[:40], METHODS, n=1, cutoff=0.5)
        guess = close[0] if close else guess
    raise refuse(
        "E07",
        f"`method` is {typed(method)}, which is not known; spelling and case count. Allowed: "
        f"{', '.join(METHODS)} (alias: deepseek_mtp for mtp).",
        f'method="{guess}"',
    )


def detected_method(shape: Verdict, *, named: bool) -> str | None:
    """The method when none was asked for; None when nothing drafts and no draft was named.

    Raises:
        ConfigError: E03, a draft was named and is none.
    """
    if shape.is_dspark:
        return "dspark"
    if shape.kind == "v4_mtp":
        return "mtp"
    if named:
        raise nothing_to_draft(shape, None, named=True)
    return None


def check_method(method: str, shape: Verdict, *, named: bool) -> None:
    """Raises unless `method` can run on `shape`; `named` says that a draft path was given.

    Raises:
        ConfigError: E01-E06.
    """
    if method in FREE_METHODS:
        return
    if method in _DRAFT_MODELS:
        if shape.kind != "none":
            raise _not_a_model(method, shape)
    elif method in _OTHER_FORMATS:
        raise _other_format(method, shape)
    elif method == "dspark" and not shape.is_dspark:
        if shape.kind == "v4_mtp":
            raise _dspark_on_mtp(shape)
        if "dflash" in shape.hints:
            raise _dspark_on_dflash(shape)
        raise nothing_to_draft(shape, method, named=named)
    elif method == "mtp" and shape.kind != "v4_mtp":
        if shape.kind == "v4_dspark":
            raise _mtp_on_dspark(shape)
        if shape.kind == "drafter":
            raise _mtp_on_drafter(shape)
        raise nothing_to_draft(shape, method, named=named)


def nothing_to_draft(shape: Verdict, method: str | None, *, named: bool) -> ConfigError:
    """E03: no drafter in this config; what was found and what would qualify.

    `method` None: speculation was asked for by a draft path or a K alone.
    """
    asked = "speculation" if method is None else f"method={method!r}"
    looks = f"; it looks like {', '.join(shape.hints)}" if shape.hints else ""
    if method == "mtp":
        qualifies = "DeepSeek-V4 with `num_nextn_predict_layers` above 0 and no `dspark_*` keys"
    else:
        qualifies = (
            "DeepSeek-V4 with the four `dspark_*` keys, or a drafter whose `architectures` ends in "
            "DSparkModel or whose `speculators_model_type` is dspark"
        )
    ways = ["leave out method, draft and K to run without drafts"]
    if method != "mtp":
        another = "another draft checkpoint" if named else "a separate drafter, which must be named"
        ways.insert(0, f"{another}: --draft-model PATH")
    return refuse(
        "E03",
        f"{asked} needs something to draft with, and {shape.label} has nothing: "
        f"`model_type` {show(shape.model_type)}, `architectures` {show(list(shape.architectures))}"
        f"{looks}. What qualifies: {qualifies}.",
        *ways,
    )


def _use_dspark(shape: Verdict) -> str:
    """The setting that runs a DSpark shape."""
    return f'method="dspark" with num_speculative_tokens={shape.trained_len}'


def _use_mtp(shape: Verdict) -> str:
    return f'method="mtp" with num_speculative_tokens={shape.num_nextn}'


def _use(shape: Verdict) -> str:
    if shape.is_dspark:
        return _use_dspark(shape)
    return _use_mtp(shape) if shape.kind == "v4_mtp" else "a DSpark drafter as --draft-model"


def _proof(shape: Verdict) -> str:
    values = {
        "block_size": shape.block_size,
        "target_layer_ids": list(shape.target_layer_ids or ()),
        "markov_rank": shape.markov_rank,
    }
    read = ((shape.sources.get(field), value) for field, value in values.items())
    return ", ".join(f"`{path}` = {show(value)}" for path, value in read if path is not None)


def _what(shape: Verdict) -> str:
    """The shape in words, with the key that decides."""
    if shape.kind == "v4_dspark":
        return f"DeepSeek-V4 with its own DSpark drafter ({_proof(shape)})"
    if shape.kind == "drafter":
        return f"a DSpark drafter of family {shape.family} ({_proof(shape)})"
    if shape.kind == "v4_mtp":
        return f"DeepSeek-V4 with plain MTP (`num_nextn_predict_layers` = {shape.num_nextn})"
    return f"no drafter of ours (`architectures` {show(list(shape.architectures))}" + (
        f", looks like {', '.join(shape.hints)})" if shape.hints else ")"
    )


def _mtp_on_dspark(shape: Verdict) -> ConfigError:
    layer = shape.num_layers if shape.num_layers is not None else "N"
    otherwise = (
        "V4.1 has no classic MTP layout at all, and vLLM refuses it too"
        if shape.family == "deepseek_v41"
        else "a classic MTP loader would die on KeyError "
        f"'model.layers.{layer}.mtp_block.main_norm.weight'"
    )
    return refuse(
        "E01",
        f'method="mtp" cannot run on {shape.label}: it ships a DSpark drafter and no MTP head, as '
        f"{_proof(shape)} show; {otherwise}. On Hopper check the release "
        "and topology first: vLLM 0.27.1 with DP4 on H100 is reported to crash in graph capture, "
        "0.26.0 with TP4 on H200 and nightlies to work (vLLM pull request 52165).",
        _use_dspark(shape),
    )


def _dspark_on_mtp(shape: Verdict) -> ConfigError:
    return refuse(
        "E02",
        f'method="dspark" cannot run on {shape.label}: it is plain MTP (`num_nextn_predict_layers` '
        f"= {shape.num_nextn}) without {', '.join(f'`{key}`' for key in PREFIXED_KEYS)}.",
        _use_mtp(shape),
        "a revision that carries DSpark (DeepSeek-V4-Flash-0731, Pro-0813 or one named -DSpark)",
        "a separate drafter named with --draft-model",
    )


def _mtp_on_drafter(shape: Verdict) -> ConfigError:
    return refuse(
        "E04",
        f'method="mtp" cannot run on {shape.label}: it is a DSpark drafter of family '
        f"{shape.family} ({_proof(shape)}), and an explicit method is never rewritten.",
        _use_dspark(shape),
    )


def _other_format(method: str, shape: Verdict) -> ConfigError:
    return refuse(
        "E05",
        f"method={method!r} cannot run on {shape.label}: it is {_what(shape)}. {method} drafts in "
        "another format, which this project does not serve.",
        _use(shape),
    )


def _dspark_on_dflash(shape: Verdict) -> ConfigError:
    path = shape.sources.get("markov_rank")
    if shape.markov_rank == 0 and path:
        key = f"`{path}` is 0, so there is no Markov head"
    else:
        key = f"`architectures` {show(list(shape.architectures))} without `projector_type` 'dspark'"
    return refuse(
        "E05",
        f'method="dspark" cannot run on {shape.label}: it is a DFlash drafter ({key}).',
        "a drafter with `markov_rank` above 0 as --draft-model",
        'relabel `architectures` as ["Qwen3DSparkModel"] if it really is DSpark',
    )


def _not_a_model(method: str, shape: Verdict) -> ConfigError:
    return refuse(
        "E06",
        f"method={method!r} cannot run on {shape.label}: it is {_what(shape)}. The explicit method "
        "is honoured or refused, never replaced.",
        _use(shape),
        f"a checkpoint made for {method} as --draft-model",
    )
