"""From settings to a loaded drafter: refuse what cannot work, then read weights, then size the KV.

The order is the point: configs are judged by `common.detect` before a weight is read or a device is
touched.
"""

import json
import logging
from dataclasses import dataclass

import torch

from common.contract import Contract
from common.detect.api import resolve
from common.detect.files import detect_checkpoint
from common.errors import ConfigError, StartupError
from common.loading.safetensors_files import LoadReport
from common.logs import fields
from common.models.contracts import contract_of
from common.models.dspark_qwen3 import DSparkQwen3, load_drafter
from common.models.registry import read_target_config
from common.nn.paged_kv import PagedKV
from common.tensors import DTYPES
from drafter_svc.config import DrafterConfig
from drafter_svc.engine import DraftEngine
from drafter_svc.sessions import Limits, SessionTable

log = logging.getLogger(__name__)

DEFAULT_KV_MEMORY_MB = 256


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter ready to run and what `GetInfo` and `Hello` say about it."""

    engine: DraftEngine
    limits: Limits
    contract: Contract
    feature_width: int  # values per RAW_LAYERS row
    verdict_json: str
    report: LoadReport


def judge(config: DrafterConfig) -> str:
    """The detection's verdict on the drafter as JSON; warnings are logged.

    Raises ConfigError; reads no weight.
    """
    draft = detect_checkpoint(config.model)
    plan = resolve(detect_checkpoint(config.target_model), draft, method="dspark")
    if draft.layout == "fill_in":
        raise ConfigError(
            "E05",
            f"{draft.label} drafts in the fill-in layout ({draft.sources.get('layout')}), whose "
            "anchor row predicts nothing; this service runs anchor-first blocks only. What works: "
            "a drafter trained anchor-first",
        )
    for remark in dict.fromkeys((*draft.warnings, *plan.warnings)):
        log.warning(remark.message, extra=fields(code=remark.code))
    return json.dumps(draft.to_json())


def load(config: DrafterConfig) -> LoadedDrafter:
    """Raises StartupError (ConfigError, LoadError) with what is wrong and the way out."""
    verdict_json = judge(config)
    device = _device(config.device)
    torch.set_num_threads(config.service.threads)
    model, report = load_drafter(config.model, config.target_model, DTYPES[config.dtype], device)
    target = read_target_config(config.target_model)
    kv = _new_kv(model, config)
    limits = Limits(
        num_blocks=kv.num_blocks,
        kv_block_size=kv.kv_block_size,
        block_size=model.config.block_size,
        max_sessions=config.max_sessions,
        max_sessions_per_link=config.max_sessions_per_verifier or config.max_sessions,
        max_context_len=min(kv.num_slots, target.max_context_len),
        evict_idle_s=config.evict_idle_seconds,
    )
    return LoadedDrafter(
        engine=DraftEngine(model, SessionTable(limits), kv),
        limits=limits,
        contract=contract_of(model.config, target),
        feature_width=model.config.feature_width,
        verdict_json=verdict_json,
        report=report,
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StartupError(f"--device {name!r} is unknown; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"--device {name}: torch finds no CUDA device here; use --device cpu")
    return device


def _new_kv(model: DSparkQwen3, config: DrafterConfig) -> PagedKV:
    """The context cache; StartupError when one session's block would not even fit."""
    num_blocks = config.kv_blocks
    if num_blocks is None:
        budget = (config.kv_memory_mb or DEFAULT_KV_MEMORY_MB) << 20
        num_blocks = budget // model.new_kv(1, config.kv_block_size).num_bytes
    needed = model.config.block_size + 1
    if num_blocks * config.kv_block_size < needed:
        raise StartupError(
            f"{num_blocks} KV blocks of {config.kv_block_size} tokens cannot hold one session of "
            f"{needed} tokens; raise --kv-memory-mb or --kv-blocks"
        )
    return model.new_kv(num_blocks, config.kv_block_size)
