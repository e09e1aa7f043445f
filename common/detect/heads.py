"""Reads what every DSpark drafter's config says about its block and heads, whatever its family.

Knows the field names of all public formats (DeepSeek `dspark_*`, DeepSpec, SpecForge, speculators),
no family and no requirement: the caller decides what may be absent.
"""

from common.detect.fields import AUX_KEY, Reader, flag, head_type, tap_ids, whole
from common.detect.refusal import refuse, show
from common.detect.source import Source
from common.detect.verdict import Verdict


def read_heads(
    source: Source, reader: Reader, *, lowest_tap: int, lowest_rank: int, confidence: bool
) -> Verdict:
    """A verdict holding the block, tap and head fields of `source`; the rest is the caller's.

    `lowest_tap` is -1 where the embedding's output may be tapped; `lowest_rank` 0 where "no Markov
    head" can be said; `confidence` is the family's default for an absent `enable_confidence_head`.

    Raises:
        ConfigError: E08, E14, E15 for an unusable value, E16 for two places that differ.
    """
    rank = reader.read(
        "markov_rank", whole(lowest_rank, example=256), "dspark_markov_rank", "markov_rank"
    )
    markov_type = reader.read(
        "markov_head_type", head_type, "dspark_markov_head_type", "markov_head_type"
    )
    if markov_type is None and rank:
        markov_type = reader.default("markov_head_type", "vanilla")
    has_confidence = reader.read("confidence_head", flag, "enable_confidence_head")
    if has_confidence is None:
        has_confidence = reader.default("confidence_head", confidence)
    with_markov = reader.read("confidence_with_markov", flag, "confidence_head_with_markov")
    return Verdict(
        kind="none",
        name=source.name,
        model_type=source.model_type,
        architectures=source.architectures,
        block_size=reader.read(
            "block_size", whole(1, example=7), "dspark_block_size", "block_size"
        ),
        layout="anchor_first" if _anchor_predicts(reader) else "fill_in",
        target_layer_ids=reader.read(
            "target_layer_ids",
            tap_ids(lowest_tap),
            "dspark_target_layer_ids",
            "target_layer_ids",
            AUX_KEY,
        ),
        filler_token_id=reader.read(
            "filler_token_id",
            whole(0, "E15", example=128799),
            "dspark_noise_token_id",
            "mask_token_id",
        ),
        markov_rank=rank,
        markov_head_type=markov_type,
        confidence_head=has_confidence,
        confidence_with_markov=with_markov,
        draft_vocab_size=reader.read(
            "draft_vocab_size", whole(1, example=32000), "draft_vocab_size"
        ),
        sources=reader.sources,
    )


def _anchor_predicts(reader: Reader) -> bool:
    """True unless said otherwise, by `sample_from_anchor` or by vLLM's negation of it."""
    said = reader.read("layout", flag, "sample_from_anchor")
    negated = reader.read("layout", flag, "dspark_bonus_anchor")
    if said is not None and negated is not None and said == negated:
        raise refuse(
            "E16",
            f"`sample_from_anchor` and `dspark_bonus_anchor` are both {show(said)}, but one is the "
            "negation of the other.",
            "keep `sample_from_anchor` as trained and remove `dspark_bonus_anchor`",
        )
    if said is None and negated is None:
        return reader.default("layout", True)
    return said if said is not None else not negated
