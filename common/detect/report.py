"""Verdict, plan and padding as rows of plain text, for a terminal and for a service's log at start.

Knows how to word values, not how to print them.
"""

from logging import INFO, WARNING

from common.detect.padding import Padding
from common.detect.refusal import one_line
from common.detect.verdict import Plan, Verdict

Row = tuple[str, str]
_LABELS = {
    "kind": "kind",
    "family": "family",
    "looks like": "hints",
    "block size": "block_size",
    "layout": "layout",
    "stages": "num_stages",
    "tapped layers": "target_layer_ids",
    "filler token": "filler_token_id",
    "Markov rank": "markov_rank",
    "Markov head": "markov_head_type",
    "confidence head": "confidence_head",
    "draft vocabulary": "draft_vocab_size",
    "target layers": "num_layers",
    "hidden size": "hidden_size",
    "vocabulary": "vocab_size",
    "made for": "verifier_name",
}


def verdict_rows(verdict: Verdict) -> list[Row]:
    """What was found and at which config path; what the config does not say is left out."""
    rows: list[Row] = []
    for label, field in _LABELS.items():
        value = _words(getattr(verdict, field))
        if value:
            path = verdict.sources.get(field)
            rows.append((label, one_line(value) + (f"  ({path})" if path else "")))
    return [*rows, ("index", "checked" if verdict.index_checked else "not checked")]


def plan_rows(plan: Plan) -> list[Row]:
    """What will run."""
    if plan.method is None:
        return [("plan", "no drafts")]
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


def startup_lines(
    plan: Plan, target: Verdict, draft: Verdict | None = None
) -> list[tuple[int, str]]:
    """(logging level, line) of what a service says before it loads.

    The plan, then every warning and note of the target, the drafter and the plan, each once.
    """
    parts = [part for part in (target, draft, plan) if part is not None]
    lines = [(INFO, f"{label}: {text}") for label, text in plan_rows(plan)]
    for level, kind in ((WARNING, "warnings"), (INFO, "notes")):
        remarks = dict.fromkeys(remark for part in parts for remark in getattr(part, kind))
        lines += [(level, f"{r.code}: {one_line(r.message)}") for r in remarks]
    return lines


def _words(value: object) -> str:
    """A field as text; empty for what the config does not say."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
