"""Counter-based noise: a pure function of (seed, position, domain, token id), the same everywhere.

No stream is drawn from, so a row's noise depends neither on its batch nor on what ran before,
and the drafter can evaluate the verifier's noise at its few candidates only. Integer mixing is the
SplitMix64 finaliser (Steele, Lea & Flood 2014) in wrapping int64 arithmetic: exact on every device.
Knows nothing of requests or models.
"""

import torch

# Domains are independent of each other for the same (seed, position).
TARGET = 1  # coupled sampling: the target's own choice, shared with the drafter
ACCEPT = 2  # rejection sampling: accept or reject a draft
RESIDUAL = 3  # rejection sampling: correction, bonus and plain tokens
DRAFT = 4  # the drafter's own choice when it samples from the distribution it sends


def to_int64(value: int) -> int:
    """The int64 with the low 64 bits of `value`: how a uint64 seed travels in a tensor."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN = to_int64(0x9E3779B97F4A7C15)
_MIX_1 = to_int64(0xBF58476D1CE4E5B9)
_MIX_2 = to_int64(0x94D049BB133111EB)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """A bijection of int64 with avalanche; overwrites `bits`. Shifts are logical."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits.bitwise_xor_(bits.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1))
        bits.mul_(factor)
    return bits.bitwise_xor_(bits.bitwise_right_shift(31).bitwise_and_((1 << 33) - 1))


def keys(seeds: torch.Tensor, positions: torch.Tensor, domain: int) -> torch.Tensor:
    """One well-mixed int64 per row: all that noise needs besides the token ids."""
    mixed = _mix(seeds + to_int64(domain * _GOLDEN))
    return _mix(mixed.bitwise_xor_(_mix(positions * _GOLDEN)))


def uniform(seeds: torch.Tensor, positions: torch.Tensor, domain: int) -> torch.Tensor:
    """Uniform in the open interval (0, 1), 52 bits. seeds, positions: [N] int64 -> [N] float64."""
    bits = keys(seeds, positions, domain).bitwise_right_shift(12).bitwise_and_((1 << 52) - 1)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def exponential(
    seeds: torch.Tensor, positions: torch.Tensor, domain: int, ids: torch.Tensor
) -> torch.Tensor:
    """Unit exponential noise per row and token id; always positive and finite.

    seeds, positions: [N] int64; ids: [M] or [N, M] int64 -> [N, M] fp32. The arg-max over ids of
    probs / noise is a sample of probs (the "exponential race", equal to Gumbel-max).
    """
    return exponential_of(keys(seeds, positions, domain), ids)


def exponential_of(row_keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`exponential` of rows whose `keys` are at hand. row_keys: [N] int64 -> [N, M] fp32."""
    bits = _mix(row_keys[:, None] ^ (ids + 1) * _GOLDEN)
    bits = bits.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    # The wide end (noise near 0, which wins races) keeps fp32's full relative precision.
    share = bits.to(torch.float32).add_(0.5).mul_(2.0**-52).clamp_(max=1.0 - 2.0**-24)
    return share.neg_().log1p_().neg_()
