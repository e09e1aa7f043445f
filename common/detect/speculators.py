"""Files of the `speculators` library: `speculators_model_type` decides, the class name misleads.

Its taps count hidden states (0 = the embedding's output), one more than the layer whose output they
are. Knows only what vLLM needs from such a file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.detect.drafters import gaps, require, vocabulary_notes, without_markov
from common.detect.fields import Reader, whole
from common.detect.heads import read_heads
from common.detect.refusal import refuse, show, typed
from common.detect.source import Source, class_names
from common.detect.verdict import Remark, Verdict
from common.errors import ConfigError

_LAYERS = "transformer_layer_config"
TYPE_KEY = "speculators_model_type"
_KNOWN_TYPES = ("dspark", "dflash", "eagle3", "peagle", "medusa", "mtp")


def read_speculators(source: Source) -> Verdict:
    """The verdict for a file that has `speculators_model_type`.

    Raises:
        ConfigError: E21 unknown type or a required path is missing, E08 block size, taps or filler
            token missing, E14-E16 and E24 unusable values.
    """
    kind = source.config[TYPE_KEY]
    if not isinstance(kind, str) or kind not in _KNOWN_TYPES:
        raise refuse(
            "E21",
            f"`{TYPE_KEY}` is {typed(kind)}; known: {', '.join(_KNOWN_TYPES)}.",
            f"`{TYPE_KEY}`: 'dspark' for a DSpark drafter",
        )
    if kind != "dspark":
        return Verdict(
            kind="none",
            family=source.model_type,
            name=source.name,
            model_type=source.model_type,
            architectures=source.architectures,
            hints=(kind,),
        )
    return _read_dspark(source)


def _read_dspark(source: Source) -> Verdict:
    _required(source.config, _LAYERS, Mapping)
    spec = _required(source.config, "speculators_config", Mapping)
    methods = _required(spec, "proposal_methods", list, "speculators_config")
    verifier = _required(spec, "verifier", Mapping, "speculators_config")
    verifier_name = _required(verifier, "name_or_path", str, "speculators_config.verifier")
    reader = Reader(source.config)
    heads = read_heads(source, reader, lowest_tap=-1, lowest_rank=0, confidence=False)
    if heads.markov_rank == 0:
        remark = Remark(
            "W07", f"`{TYPE_KEY}` says dspark, yet `markov_rank` is 0: this is plain DFlash"
        )
        verdict = without_markov(heads)
        return replace(verdict, warnings=(remark, *verdict.warnings))
    require(heads, "block_size", "target_layer_ids", "filler_token_id")
    vocab_size = reader.size("vocab_size", "vocab_size", _LAYERS)
    proposal = _proposal(methods)
    return replace(
        heads,
        kind="drafter",
        family="speculators",
        num_stages=reader.size("num_stages", "num_hidden_layers", _LAYERS),
        hidden_size=reader.size("hidden_size", "hidden_size", _LAYERS),
        vocab_size=vocab_size,
        proposal_tokens=proposal,
        verifier_name=verifier_name,
        verifier_architectures=class_names(
            verifier.get("architectures"), "speculators_config.verifier.architectures"
        ),
        notes=vocabulary_notes(heads, vocab_size),
        warnings=(*gaps(heads), *_long_proposal(heads, proposal)),
    )


def _proposal(methods: list[Any]) -> int | None:
    path = "speculators_config.proposal_methods[0]"
    first = methods[0] if methods else None
    if not isinstance(first, Mapping):
        raise _missing(path, first)
    value = first.get("speculative_tokens")
    return None if value is None else whole(1, "E21")(f"{path}.speculative_tokens", value)


def _long_proposal(heads: Verdict, proposal: int | None) -> tuple[Remark, ...]:
    limit = heads.trained_len
    if proposal is None or limit is None or proposal <= limit:
        return ()
    return (Remark("E18", proposal_excess(heads, proposal)),)


def proposal_excess(heads: Verdict, proposal: int) -> str:
    """What E18 says, as a warning here and as an error when K would be taken from the file."""
    anchor = "true" if heads.layout == "anchor_first" else "false"
    return (
        f"`speculators_config.proposal_methods[0].speculative_tokens` is {show(proposal)}, more "
        f"than the {heads.trained_len} drafts of a block (`block_size` {heads.block_size}, "
        f"`sample_from_anchor` {anchor})."
    )


def _required(body: Mapping[str, Any], key: str, kind: type, parent: str = "") -> Any:
    value = body.get(key)
    if not isinstance(value, kind) or (kind is str and not value):
        raise _missing(f"{parent}.{key}".lstrip("."), value)
    return value


def _missing(path: str, value: object) -> ConfigError:
    return refuse(
        "E21",
        f"a DSpark speculators file needs `{path}`; it is {typed(value)}.",
        "a file saved by the speculators library, with `transformer_layer_config`, "
        "`speculators_config.proposal_methods[0].speculative_tokens` and "
        "`speculators_config.verifier.name_or_path`",
    )
