"""K (`num_speculative_tokens`) against what the drafter was trained for.

The most contested rule of the field: vLLM 0.26-0.28 refuse K below the block (pull request 47419),
its maintainer calls that wrong, the model card recommends K = 7 on a block of 5, and forks measured
that as a collapse. So type and sign are facts, and K against B is a policy. Knows no method.
"""

from common.detect.fields import MAX_INT, is_int
from common.detect.refusal import refuse, show, typed
from common.detect.speculators import proposal_excess
from common.detect.verdict import Remark, Verdict
from common.errors import ConfigError

POLICIES = ("floor", "strict", "lenient")
# What the public integrations of these two families demand, whatever the policy.
_EXACT_FAMILIES = ("qwen3_omni",)
_CAPPED_FAMILIES = ("qwen3_omni", "qwen3_vl")


def check_policy(policy: object) -> None:
    """Raises E07 for a policy that does not exist."""
    if policy not in POLICIES:
        raise refuse(
            "E07",
            f"`k_policy` is {typed(policy)}; allowed: {', '.join(POLICIES)}.",
            '`k_policy`="floor"',
        )


def check_number(k: object, suggestion: int) -> int:
    """`k` if it is a positive integer; E12 otherwise, also for 5.0, "5" and true."""
    if not is_int(k) or not 0 < k <= MAX_INT:
        raise refuse(
            "E12",
            f"`num_speculative_tokens` is {typed(k)}; it must be a positive integer (below 2**31).",
            f"num_speculative_tokens={suggestion}",
        )
    return k


def dspark_k(shape: Verdict, k: object, policy: str) -> tuple[int, list[Remark]]:
    """K for the DSpark drafter `shape`, with what is to be said about it.

    The policy judges a K that somebody asked for; an omitted one comes from the checkpoint.
    `num_nextn_predict_layers` plays no part.

    Raises:
        ConfigError: E10 too short for the policy, E11 too long, E12 no number, E18 the file's own
            proposal does not fit its block.
    """
    trained = shape.trained_len
    assert trained is not None and trained > 0, shape
    if k is None:
        k, source = _default_k(shape, trained)
        remarks = [Remark("I01", f"num_speculative_tokens = {k}, from `{source}`")]
        return k, remarks + ([_short(k, trained)] if k < trained else [])
    number = check_number(k, trained)
    exact = policy == "strict" or shape.family in _EXACT_FAMILIES
    if number < trained:
        if exact or policy == "floor":
            raise _too_short(shape, number, trained, exact)
        return number, [_short(number, trained)]
    if number > trained:
        if exact or shape.family in _CAPPED_FAMILIES:
            raise _too_long(shape, number, trained)
        return number, [_long(number, trained)]
    return number, []


def mtp_k(shape: Verdict, k: object) -> tuple[int, list[Remark]]:
    """K for classic MTP: the declared layers, or a multiple of them when more are asked for."""
    nextn = shape.num_nextn
    assert nextn is not None and nextn > 0, shape
    if k is None:
        text = f"num_speculative_tokens = {nextn}, from `num_nextn_predict_layers`"
        return nextn, [Remark("I01", text)]
    number = check_number(k, nextn)
    if number > nextn and number % nextn:
        raise refuse(
            "E12",
            f"`num_speculative_tokens` is {show(number)}, above `num_nextn_predict_layers` = "
            f"{nextn} and no multiple of it; the MTP layers can only be rerun as a whole.",
            f"num_speculative_tokens={nextn}",
            f"num_speculative_tokens={number // nextn * nextn}",
        )
    return number, []


def free_k(method: str, k: object) -> int:
    """K for a method whose checkpoint says nothing about it: it must be given (E13)."""
    if k is None:
        raise refuse(
            "E13",
            f"`num_speculative_tokens` is missing and method {method!r} has no default. A DSpark "
            "checkpoint would supply it by `dspark_block_size` or `block_size`, plain V4 by "
            "`num_nextn_predict_layers`.",
            "num_speculative_tokens=5",
        )
    return check_number(k, 5)


def _default_k(shape: Verdict, trained: int) -> tuple[int, str]:
    if shape.proposal_tokens is None:
        return trained, shape.sources["block_size"]
    if shape.proposal_tokens > trained:
        excess = proposal_excess(shape, shape.proposal_tokens)
        raise refuse("E18", excess, f"num_speculative_tokens={trained}")
    return shape.proposal_tokens, "speculators_config.proposal_methods[0].speculative_tokens"


def _read_at(shape: Verdict) -> str:
    text = f"B = {shape.block_size}, read at `{shape.sources['block_size']}`"
    return text + (", of which the anchor predicts none" if shape.layout == "fill_in" else "")


def _too_short(shape: Verdict, k: int, trained: int, exact: bool) -> ConfigError:
    why = "must equal" if exact else "may not be below"
    body = (
        f"`num_speculative_tokens` is {k}, but it {why} the {trained} drafts that {shape.label} "
        f"was trained for ({_read_at(shape)}). {_elsewhere(trained)}"
    )
    hints = [f"num_speculative_tokens={trained}"]
    if shape.family not in _EXACT_FAMILIES:
        hints.append(f"--k-policy lenient, which takes {k} with a warning")
    return refuse("E10", body, *hints)


def _too_long(shape: Verdict, k: int, trained: int) -> ConfigError:
    body = (
        f"`num_speculative_tokens` is {show(k)}, more than the {trained} drafts that {shape.label} "
        f"was trained for ({_read_at(shape)}); positions past the block are untrained noise. "
        f"{_elsewhere(trained)}"
    )
    hints = [f"num_speculative_tokens={trained}"]
    if shape.family not in _CAPPED_FAMILIES:
        hints.append("--k-policy floor or lenient, which take it with a warning")
    return refuse("E11", body, *hints)


def _elsewhere(trained: int) -> str:
    return (
        f"The same length elsewhere: vLLM K={trained}, SGLang gamma {trained} "
        f"(num_draft_tokens {trained + 1}), llama.cpp n-max {trained}."
    )


def _short(k: int, trained: int) -> Remark:
    return Remark(
        "W01",
        f"K = {k} is shorter than the {trained} drafts trained for: the rest of each block is "
        "drafted for nothing (public reports disagree on harm: vLLM pull request 47419, issue "
        "50012)",
    )


def _long(k: int, trained: int) -> Remark:
    return Remark(
        "W02",
        f"K = {show(k)} is longer than the {trained} drafts trained for: positions past the block "
        "are untrained. Measured for 7 on 5: acceptance 4.4 % against 34.7 % (vLLM pull request "
        "41834), no loss on H200 (52165)",
    )
