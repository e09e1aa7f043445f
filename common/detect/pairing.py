"""Drafter against target, from the two verdicts: shapes decide, names only warn.

A value that either config leaves out is not compared; the loaders check the tensors. Knows no K.
"""

from common.detect.fields import check_filler, check_tap_range
from common.detect.refusal import refuse, show
from common.detect.verdict import Remark, Verdict

_SHAPES = {
    "hidden_size": "hidden size",
    "num_layers": "number of target layers",
    "vocab_size": "vocabulary size",
}


def check_pair(target: Verdict, draft: Verdict) -> list[Remark]:
    """What is worth saying about using `draft` for `target`.

    Raises:
        ConfigError: E19 the shapes differ or `target` is itself a drafter, E14 a tap past the
            target's last layer, E15 a filler token outside its vocabulary.
    """
    check_target(target)
    for field, words in _SHAPES.items():
        ours, theirs = getattr(target, field), getattr(draft, field)
        if ours is not None and theirs is not None and ours != theirs:
            raise refuse(
                "E19",
                f"drafter {draft.label} was made for another target: its {words} (`{field}`) is "
                f"{show(theirs)}, that of {target.label} is {show(ours)}.",
                f"a drafter trained for a target with {words} {show(ours)}",
                f"the target with {words} {show(theirs)}",
            )
    if draft.target_layer_ids is not None:
        path = draft.sources["target_layer_ids"]
        origin = target.sources.get("num_layers", "num_hidden_layers")
        check_tap_range(draft.target_layer_ids, target.num_layers, path, origin)
    check_filler(
        draft.filler_token_id,
        target.vocab_size,
        draft.sources.get("filler_token_id", ""),
        target.sources.get("vocab_size", "vocab_size"),
    )
    return _name_remarks(target, draft)


def check_target(target: Verdict) -> None:
    """Raises E19 when `target` is a stand-alone drafter, which is no model to draft for."""
    if target.kind == "drafter":
        raise refuse(
            "E19",
            f"{target.label} is given as the target, but its `architectures` "
            f"{show(list(target.architectures))} make it a DSpark drafter.",
            "the full model as the target and the drafter as --draft-model; swap the two paths "
            "if they are the wrong way round",
        )


def check_layout(draft: Verdict) -> None:
    """Refuses the fill-in layout (E05): both services run anchor-first blocks only."""
    if draft.layout == "fill_in":
        raise refuse(
            "E05",
            f"{draft.label} drafts in the fill-in layout (`{draft.sources['layout']}`): its "
            "anchor's row predicts nothing. The services here run anchor-first blocks only.",
            "a drafter trained with `sample_from_anchor` true",
        )


def check_servable_taps(draft: Verdict, num_layers: int | None) -> list[Remark]:
    """Refuses the embedding tap (E14): it can be described, not served. Warns of the last layer.

    V4's own taps do end in the last layer, so only stand-alone drafters are warned about.
    """
    taps = draft.target_layer_ids
    if draft.kind != "drafter" or taps is None:
        return []
    path = draft.sources["target_layer_ids"]
    if taps[0] < 0:
        raise refuse(
            "E14",
            f"`{path}` {show(list(taps))} taps -1, the embedding's output; no engine serves "
            f"that (target N = {show(num_layers)}).",
            "a drafter that taps layers from 0",
        )
    if num_layers is None or taps[-1] != num_layers - 1:
        return []
    text = (
        f"`{path}` taps the last layer, {taps[-1]}: training caches differ on whether that is "
        "before or after the final norm"
    )
    return [Remark("W10", text)]


def _name_remarks(target: Verdict, draft: Verdict) -> list[Remark]:
    """E19 findings that rest on names alone, so they only warn."""
    remarks = []
    if target.name and draft.verifier_name:
        ours, theirs = (
            n.rstrip("/").rsplit("/", 1)[-1] for n in (target.name, draft.verifier_name)
        )
        if ours.lower() != theirs.lower():
            remarks.append(
                f"`speculators_config.verifier.name_or_path` is {show(draft.verifier_name)}, the "
                f"target is called {show(target.name)}"
            )
    named = draft.verifier_architectures
    if named and target.architectures and not set(named) & set(target.architectures):
        remarks.append(
            f"`speculators_config.verifier.architectures` is {show(list(named))}, the target's "
            f"`architectures` {show(list(target.architectures))}"
        )
    return [Remark("E19", text) for text in remarks]
