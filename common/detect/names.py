"""Tensor names of a DeepSeek-V4 checkpoint's own DSpark drafter: renaming and name checks.

Pure functions over strings, for the loader and for the index check. The layout on disk is
`mtp.<stage>.<rest>`; the one in the model follows vLLM's public DSpark module: stage-less heads
under `model.`, everything else under `model.layers.<stage>.`. Knows no tensor and no file.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

STAGE_NAME = re.compile(r"(?:(?:model|language_model)\.)*mtp\.(\d{1,4})\.(.+)")

# Belong to the drafter as a whole; the first two sit in stage 0, the others in the last stage.
_FIRST_STAGE = ("main_proj", "main_norm")
_LAST_STAGE = ("norm", "markov_head", "confidence_head")  # and hc_head_{fn,base,scale}
_HC_HEAD = re.compile(r"hc_head_(fn|base|scale)")
# Copies of the target's vocabulary tensors that some repacks (Ascend w8a8) add to the stages.
_VOCABULARY = {"embed": "model.embed_tokens", "head": "lm_head"}
# V4.1 names its Markov tables after what they are.
_V41_MARKOV = {
    "markov_head.embed.": "markov_head.markov_w1.",
    "markov_head.head.": "markov_head.markov_w2.",
}
_ROUTED_SCALE = re.compile(r"ffn\.experts\.\d+\.w[123]\.scale")
# Within a layer: module on disk -> (module in the model, which part of a stacked parameter).
_LAYER_RULES: tuple[tuple[str, str, int | None], ...] = (
    # Before any padding decision and at every TP size: the padding axis follows the new name.
    ("ffn.shared_experts.w2", "ffn.shared_experts.down_proj", None),
    ("ffn.shared_experts.w1", "ffn.shared_experts.gate_up_proj", 0),
    ("ffn.shared_experts.w3", "ffn.shared_experts.gate_up_proj", 1),
    ("attn.wq_a", "attn.fused_wqa_wkv", 0),
    ("attn.wkv", "attn.fused_wqa_wkv", 1),
    ("ffn.gate.bias", "ffn.gate.e_score_correction_bias", None),
)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """Where a checkpoint tensor goes: a parameter, and its place in it when several are stacked."""

    name: str
    shard: int | None = None


def model_tensor(name: str, *, expert_dtype: str = "fp4") -> ModelTensor | None:
    """The place of draft tensor `name`, or None when `name` is no `mtp.<stage>.` tensor.

    Matching goes by whole components and only inside a layer, so `markov_w1` is not taken for a
    `w1` nor `attn_norm` for `norm`. `.scale` becomes `.weight_scale` for routed experts in fp4 and
    `.weight_scale_inv` everywhere else; names that end in `_scale` are parameters of their own.
    """
    match = STAGE_NAME.fullmatch(name)
    if match is None:
        return None
    stage, rest = int(match[1]), match[2]
    for old, new in _V41_MARKOV.items():
        rest = rest.replace(old, new) if rest.startswith(old) else rest
    head = rest.split(".", 1)[0]
    if head in _VOCABULARY:
        return ModelTensor(_VOCABULARY[head] + _scale_suffix(rest[len(head) :]))
    if head in _FIRST_STAGE or _is_last_stage(head):
        return ModelTensor("model." + _scale_suffix(rest))
    prefix = f"model.layers.{stage}."
    if _ROUTED_SCALE.fullmatch(rest) and expert_dtype == "fp4":
        return ModelTensor(prefix + rest.removesuffix("scale") + "weight_scale")
    for old, new, shard in _LAYER_RULES:
        if rest == old or rest.startswith(old + "."):
            return ModelTensor(prefix + _scale_suffix(new + rest[len(old) :]), shard)
    return ModelTensor(prefix + _scale_suffix(rest))


def stages(names: Iterable[str]) -> tuple[int, ...]:
    """The distinct `mtp.<stage>` numbers among `names`, ascending."""
    return tuple(sorted({int(m[1]) for name in names if (m := STAGE_NAME.fullmatch(name))}))


def name_problems(names: Iterable[str], *, expert_dtype: str = "fp4") -> list[str]:
    """What is wrong with the names of a DSpark drafter, judged without any tensor.

    Stages must run from 0 without a gap, `main_*` sit in stage 0 only, the heads in the last stage
    only, and no two names may end up in the same place of the model.
    """
    draft_names = [name for name in names if STAGE_NAME.fullmatch(name)]
    found = stages(draft_names)
    problems = []
    if found != tuple(range(len(found))):
        problems.append(f"stages are {list(found)}; they must run from 0 without a gap")
    places: dict[ModelTensor, str] = {}
    for name in draft_names:
        match = STAGE_NAME.fullmatch(name)
        place = model_tensor(name, expert_dtype=expert_dtype)
        assert match is not None and place is not None, name
        stage, head = int(match[1]), match[2].split(".", 1)[0]
        if head in _FIRST_STAGE and stage != 0:
            problems.append(f"{name} sits outside stage 0")
        if _is_last_stage(head) and stage != found[-1]:
            problems.append(f"{name} sits outside the last stage, {found[-1]}")
        twin = places.setdefault(place, name)
        if twin != name and head not in _VOCABULARY:
            problems.append(f"{twin} and {name} both become {place.name}")
    return problems


def _is_last_stage(head: str) -> bool:
    return head in _LAST_STAGE or _HC_HEAD.fullmatch(head) is not None


def _scale_suffix(rest: str) -> str:
    if rest.endswith(".scale"):
        return rest.removesuffix("scale") + "weight_scale_inv"
    return rest
