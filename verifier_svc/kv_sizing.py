"""How large the KV cache becomes: block size and number of blocks, from settings and the target.

Feature rows share the memory, because a slot of the cache has one of them beside it.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable

from common.errors import StartupError
from common.logs import fields
from common.models.interfaces import KVCache, Target, TargetFacts
from verifier_svc.config import VerifierConfig

log = logging.getLogger(__name__)

DEFAULT_KV_MEMORY_MB = 512
USUAL_BLOCK_SIZE = 16


def kv_block_size(config: VerifierConfig, target: TargetFacts) -> int:
    """Tokens per block. StartupError for a size that this target cannot use."""
    multiple, size = target.kv_block_multiple, config.kv_block_size
    if size is None:
        return -(-USUAL_BLOCK_SIZE // multiple) * multiple
    if size % multiple:
        raise StartupError(
            f"--kv-block-size {size} must be a multiple of {multiple} for {config.model}, whose "
            "layers condense that many tokens at a time; leave it out for the smallest that works"
        )
    return size


def make_kv(
    config: VerifierConfig,
    model: Target,
    block_size: int,
    feature_bytes: int,
    max_drafts: int,
    *,
    keep_all: bool,
) -> KVCache:
    """The cache: as many blocks as set, or as fit the memory with the feature rows of their slots.

    feature_bytes: of one row; keep_all: the drafter attends to rows of every position, so each
    must keep its slot. StartupError when the memory holds no block.
    """
    recent = one = None
    if not keep_all:
        recent = model.num_recent_blocks(block_size, config.max_running, config.max_batch_tokens)
        one = model.num_recent_blocks(block_size, 1, 0)
    if recent is not None and max_drafts + 2 > block_size:
        raise StartupError(
            f"--kv-block-size {block_size} must be at least {max_drafts + 2}: a round of "
            f"{max_drafts} drafts may be set back by that much"
        )

    def cache(num_blocks: int, recent: int | None, device: str | None = None) -> KVCache:
        bounded = recent is not None and recent < num_blocks
        return model.new_kv(num_blocks, block_size, recent if bounded else None, device)

    def num_bytes(num_blocks: int, recent: int | None = recent) -> int:
        kv = cache(num_blocks, recent, "meta")
        return kv.num_bytes + kv.num_slots * feature_bytes

    longest = -(-(config.max_context_len or model.config.max_context_len) // block_size)
    num_blocks = config.kv_blocks or _num_blocks(config, longest, block_size, num_bytes, recent)
    kv = cache(num_blocks, recent)
    log.info(
        "KV cache",
        extra=fields(
            num_blocks=num_blocks,
            kv_block_size=block_size,
            num_slots=kv.num_slots,
            mib=_mib(num_bytes(num_blocks)),
            mib_of_longest_request=_mib(num_bytes(min(longest, num_blocks), one)),
        ),
    )
    return kv


def _mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 2)


def _num_blocks(
    config: VerifierConfig,
    longest: int,
    block_size: int,
    num_bytes: Callable[[int], int],
    recent: int | None,
) -> int:
    """As many as the memory holds, but none that no request could ever use.

    longest: blocks of the longest request; recent: blocks that all running requests keep rows for,
    which the default memory grows to hold: with less of them requests would run one by one.
    """
    memory_mb = config.kv_memory_mb or DEFAULT_KV_MEMORY_MB
    useful = range(1, config.max_running * longest + 1)
    num_blocks = bisect_right(useful, memory_mb << 20, key=num_bytes)
    if config.kv_memory_mb is None and recent is not None:
        num_blocks = max(num_blocks, min(recent, len(useful)))
    if not num_blocks:
        raise StartupError(
            f"a KV cache of one block, {block_size} tokens, takes {num_bytes(1)} bytes, more than "
            f"--kv-memory-mb {memory_mb} holds; raise it or lower --kv-block-size"
        )
    return num_blocks
