"""Verdict, plan and padding as rows of plain text, for a terminal and for a service's log at start.

Knows how to word values, not how to print them.
"""

from common.detect.padding import Padding
from common.detect.verdict import Plan, Verdict

Row = tuple[str, str]


def verdict_rows(verdict: Verdict) -> list[Row]:
    """What was found and at which config path; what the config does not say is left out."""
    fields: list[tuple[str, str | None, object]] = [
        ("kind", None, verdict.kind),
        ("family", None, verdict.family),
        ("looks like", None, ", ".join(verdict.hints) or None),
        ("block size", "block_size", verdict.block_size),
        ("layout", "layout", verdict.layout),
        ("stages", "num_stages", verdict.num_stages),
        ("tapped layers", "target_layer_ids", _ids(verdict.target_layer_ids)),
        ("filler token", "filler_token_id", verdict.filler_token_id),
        ("Markov rank", "markov_rank", verdict.markov_rank),
        ("Markov head", "markov_head_type", verdict.markov_head_type),
        ("confidence head", "confidence_head", _yes_no(verdict.confidence_head)),
        ("draft vocabulary", "draft_vocab_size", verdict.draft_vocab_size),
        ("target layers", None, verdict.num_layers),
        ("hidden size", None, verdict.hidden_size),
        ("vocabulary", None, verdict.vocab_size),
        ("made for", None, verdict.verifier_name),
        ("index", None, "checked" if verdict.index_checked else "not checked"),
    ]
    rows = []
    for label, key, value in fields:
        if value is not None:
            path = verdict.sources.get(key) if key else None
            rows.append((label, f"{value}" + (f"  ({path})" if path else "")))
    return rows


def plan_rows(plan: Plan) -> list[Row]:
    """What will run."""
    if plan.method is None:
        return [("plan", "no drafts: nothing was asked for and nothing was found")]
    who = {"self": "by the checkpoint itself", "separate": "by a separate drafter", None: ""}
    return [
        ("method", f"{plan.method} {who[plan.draft]}".rstrip()),
        ("K", f"{plan.num_speculative_tokens}  (policy {plan.policy})"),
    ]


def padding_rows(padding: Padding) -> list[Row]:
    """The shared expert over tensor-parallel ranks."""
    if padding.block is None:
        text = f"none at TP {padding.tp}: weights are not block-quantised"
    elif padding.pad == 0:
        text = (
            f"none at TP {padding.tp}: {padding.blocks_per_rank} blocks of {padding.block} a rank"
        )
    else:
        text = (
            f"{padding.size} -> {padding.padded_size} (+{padding.pad}) at TP {padding.tp}: "
            f"{padding.blocks_per_rank} blocks of {padding.block} a rank, "
            f"{padding.num_zero_ranks} ranks hold only zeros"
        )
    if not padding.exact_blocks:
        text += "; the block does not divide the size, public loaders disagree here"
    return [("shared-expert padding", text)]


def startup_lines(verdict: Verdict, plan: Plan) -> list[str]:
    """What a service logs before it loads: the plan, then every warning and note."""
    lines = [f"{label}: {text}" for label, text in plan_rows(plan)]
    remarks = (*verdict.warnings, *plan.warnings, *verdict.notes, *plan.notes)
    return lines + [f"{remark.code}: {remark.message}" for remark in remarks]


def _ids(ids: tuple[int, ...] | None) -> str | None:
    return None if ids is None else ", ".join(map(str, ids))


def _yes_no(value: bool | None) -> str | None:
    return None if value is None else ("yes" if value else "no")
