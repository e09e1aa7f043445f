"""From settings and the configs' decision to a loaded drafter: read the weights, size the KV."""

import logging
from dataclasses import dataclass

import torch

from common.contract import Contract
from common.device import device_of
from common.errors import StartupError
from common.loading.safetensors_files import LoadReport
from common.logs import fields
from common.models.contracts import contract_of
from common.models.drafters import load_drafter
from common.models.interfaces import DraftModel, KVCache
from common.models.ranks import follow_drafter
from common.models.registry import read_target_config
from common.parallel import ALONE, Parallel, leave_signals_to_rank_0
from common.tensors import DTYPES
from drafter_svc.config import DrafterConfig
from drafter_svc.engine import DraftEngine
from drafter_svc.planning import Decision
from drafter_svc.sessions import Limits, SessionTable

DEFAULT_KV_MEMORY_MB = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter ready to run and what `GetInfo` and `Hello` say about it."""

    engine: DraftEngine
    limits: Limits
    contract: Contract
    feature_width: int  # values per RAW_LAYERS row
    verdict_json: str
    report: LoadReport


def load(config: DrafterConfig, decision: Decision, parallel: Parallel = ALONE) -> LoadedDrafter:
    """Raises StartupError (LoadError) with what is wrong and the way out. parallel: as rank 0."""
    model, report = _load(config, parallel)
    target = read_target_config(config.target_model)
    kv, window = _new_kv(model, config), model.config.context_window
    longest = target.max_context_len
    limits = Limits(
        num_blocks=kv.num_blocks,
        kv_block_size=kv.kv_block_size,
        block_size=model.config.block_size,
        max_sessions=config.max_sessions,
        max_sessions_per_link=config.max_sessions_per_verifier or config.max_sessions,
        max_context_len=longest if window else min(kv.num_slots, longest),
        context_window=window,
        evict_idle_s=config.evict_idle_seconds,
    )
    return LoadedDrafter(
        engine=DraftEngine(model, SessionTable(limits), kv),
        limits=limits,
        contract=contract_of(model.config, target),
        feature_width=model.config.feature_width,
        verdict_json=decision.to_json(),
        report=report,
    )


def follow(config: DrafterConfig, parallel: Parallel) -> None:
    """What a rank other than 0 does from start to end: its part of every block.

    Raises StartupError, and RankLost when another rank ends without a word.
    """
    model, _ = _load(config, parallel)
    leave_signals_to_rank_0()
    follow_drafter(model, parallel)


def _load(config: DrafterConfig, parallel: Parallel) -> tuple[DraftModel, LoadReport]:
    device = device_of(config.device, parallel.local_rank)
    torch.set_num_threads(config.service.threads)
    dtype = DTYPES[config.dtype]
    model, report = load_drafter(config.model, config.target_model, dtype, device, parallel)
    log.info("drafter loaded", extra=fields(**report.facts()))
    return model, report


def _new_kv(model: DraftModel, config: DrafterConfig) -> KVCache:
    """The context cache; StartupError when one session's block would not even fit."""
    num_blocks = config.kv_blocks
    if num_blocks is None:
        budget = (config.kv_memory_mb or DEFAULT_KV_MEMORY_MB) << 20
        num_blocks = budget // model.new_kv(1, config.kv_block_size).num_bytes
    size, window = model.config.block_size, model.config.context_window
    needed = 1 + size
    if window:  # its rows, what a cut may bring back into it, a step's, scratch; a KV block's edge
        needed = window + size + (size + 1) + size + (config.kv_block_size - 1)
    if num_blocks * config.kv_block_size < needed:
        raise StartupError(
            f"{num_blocks} KV blocks of {config.kv_block_size} tokens cannot hold one session of "
            f"{needed} tokens; raise --kv-memory-mb or --kv-blocks"
        )
    return model.new_kv(num_blocks, config.kv_block_size)
