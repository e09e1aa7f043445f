"""`resolve`: target, draft, method, K and policy to one plan, or a refusal.

Knows verdicts only; runs before a weight is read, a device is touched or a process is spawned.
"""

from typing import Literal

from common.detect import k_rules
from common.detect.index import missing_weights
from common.detect.methods import (
    FREE_METHODS,
    check_method,
    detected_method,
    nothing_to_draft,
    parse_method,
)
from common.detect.pairing import check_pair, check_servable_taps
from common.detect.verdict import Plan, Remark, Verdict


def resolve(
    target: Verdict,
    draft: Verdict | None = None,
    method: object = None,
    k: object = None,
    policy: str = "floor",
) -> Plan:
    """Decides how `target` is drafted for.

    `draft` is the verdict of a separately named draft checkpoint; without one `target` is judged as
    its own draft (or, being a stand-alone drafter, on its own). `method` None takes the detected
    one; an explicit one is kept or refused. `k` None takes the checkpoint's own length. `policy`
    is how K may differ from it: "floor" (not below), "strict" (equal), "lenient" (any).
    `method` and `k` are typed loosely because user input reaches them as it was given.

    Raises:
        ConfigError: E01-E07 method, E10-E13 and E18 K, E14, E15 and E19 the pair, E22 weights.
    """
    k_rules.check_policy(policy)
    chosen, remarks = parse_method(method)
    shape, named = draft or target, draft is not None
    if chosen is None:
        chosen = detected_method(shape, named=named)
    else:
        check_method(chosen, shape, named=named)
    if chosen is None:
        if k is not None:
            raise nothing_to_draft(shape, None, named=False)
        return Plan(None, None, policy)
    if chosen in FREE_METHODS:
        return _plan(chosen, k_rules.free_k(chosen, k), policy, _ignored(chosen, shape, named))
    if draft is not None:
        remarks += check_pair(target, draft)
    if chosen in ("dspark", "mtp") and shape.draft_weights is False:
        raise missing_weights(shape)
    if chosen == "dspark":
        depth = target.num_layers if named else shape.num_layers
        remarks += check_servable_taps(shape, depth)
        number, said = k_rules.dspark_k(shape, k, policy)
    elif chosen == "mtp":
        number, said = k_rules.mtp_k(shape, k)
    else:
        number, said = k_rules.free_k(chosen, k), [] if named else [_unnamed(chosen)]
    # A draft path may name the target's own folder: equal verdicts, name and all, are one file.
    own = shape == target and shape.kind.startswith("v4_")
    return _plan(chosen, number, policy, remarks + said, shape, "self" if own else "separate")


def _plan(
    method: str,
    k: int,
    policy: str,
    remarks: list[Remark],
    shape: Verdict | None = None,
    draft: Literal["self", "separate"] | None = None,
) -> Plan:
    return Plan(
        method=method,
        num_speculative_tokens=k,
        policy=policy,
        draft=draft,
        family=shape.family if shape else None,
        block_size=shape.block_size if shape else None,
        notes=tuple(r for r in remarks if r.code.startswith("I")),
        warnings=tuple(r for r in remarks if not r.code.startswith("I")),
    )


def _unnamed(method: str) -> Remark:
    text = f"method {method!r} drafts with a checkpoint of its own and none is named: --draft-model"
    return Remark("W05", text)


def _ignored(method: str, shape: Verdict, named: bool) -> list[Remark]:
    if not named and shape.kind != "drafter":
        return []
    text = f"method {method!r} drafts without a checkpoint; {shape.label} is not used"
    return [Remark("W05", text)]
