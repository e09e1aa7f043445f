"""From settings and the configs' decision to a service ready to start: weights, KV, engine, edges.

The only place where the verifier's parts are put together. Imports torch; called inside the running
event loop, before the server starts.
"""

import asyncio
import logging
from collections.abc import Callable

import torch

from common.contract import Contract
from common.device import device_of
from common.errors import StartupError
from common.loading.safetensors_files import LoadReport
from common.loading.tokenizer import StreamDecoder, Tokenizer
from common.logs import fields
from common.models.contracts import read_contract
from common.models.drafters import load_projector
from common.models.interfaces import KVCache, Numerics, Target, TargetFacts
from common.models.ranks import follow_target
from common.models.registry import load_target, read_target_config
from common.parallel import ALONE, Parallel, leave_signals_to_rank_0
from common.telemetry import Telemetry
from common.tensors import DTYPES
from verifier_svc.admission import Admission, Limits
from verifier_svc.config import VerifierConfig
from verifier_svc.draft_link import LinkSettings
from verifier_svc.drafter_client import DrafterClient
from verifier_svc.drafting import NoDrafter
from verifier_svc.engine import Engine
from verifier_svc.events import Event
from verifier_svc.features import FeatureStore
from verifier_svc.kv_blocks import KVBlocks
from verifier_svc.kv_sizing import kv_block_size, make_kv
from verifier_svc.observing import Observer
from verifier_svc.planning import Decision
from verifier_svc.request import Request
from verifier_svc.runner import Runner
from verifier_svc.scheduler import Scheduler, SchedulerLimits
from verifier_svc.service import ModelInfo, VerifierService
from verifier_svc.verify_len import VerifyLength, load_sts

log = logging.getLogger(__name__)


def build_service(
    config: VerifierConfig, decision: Decision, telemetry: Telemetry, parallel: Parallel = ALONE
) -> VerifierService:
    """Raises StartupError; cheap checks come before the weights are read. parallel: as rank 0."""
    device = device_of(config.device, parallel.local_rank)
    torch.set_num_threads(config.service.threads)
    tokenizer = Tokenizer(config.model)
    max_drafts = decision.max_drafts if config.drafter is not None else 0
    verify_length = _verify_length(config, max_drafts)
    contract = None
    if config.drafter is not None and config.draft_model is not None:
        contract = read_contract(config.draft_model, config.model)
    target = read_target_config(config.model)
    max_context_len = _max_context_len(config, target)
    block_size = kv_block_size(config, target)
    model, report = _load(config, device, parallel)

    width = 0 if contract is None else _feature_width(config, contract)
    row_bytes = width * DTYPES[_feature_dtype(config)].itemsize
    keep_all = contract is not None and not contract.context_window
    kv = make_kv(config, model, block_size, row_bytes, max_drafts, keep_all=keep_all)
    drafter = None if contract is None else _drafter(config, contract, telemetry)

    def decoder_for(request: Request) -> StreamDecoder:
        return StreamDecoder(tokenizer, request.token_ids[: request.num_prompt])

    scheduler = Scheduler(
        KVBlocks(kv.num_blocks, block_size, kv.release),
        SchedulerLimits(config.max_running, config.max_batch_tokens, max_drafts),
        decoder_for,
        (drafter or NoDrafter()).release,
    )
    to_loop = _Relay(asyncio.get_running_loop())
    taps = () if contract is None else contract.target_layer_ids
    runner = Runner(model, kv, _feature_store(config, kv, width), taps)
    engine = Engine(
        scheduler, runner, drafter or NoDrafter(), verify_length, to_loop.emit, config.max_waiting
    )
    limits = Limits(
        vocab_size=model.config.vocab_size,
        max_context_len=min(max_context_len, kv.num_blocks * block_size),
        eos_token_ids=frozenset(model.config.eos_token_ids),
    )
    service = VerifierService(
        engine,
        Admission(limits),
        tokenizer,
        ModelInfo(str(config.model), decision.to_json(), report.to_json()),
        Observer(telemetry, str(config.model)),
        drafter,
        max_live=config.max_running + config.max_waiting,
        max_stream_events=config.max_stream_events,
        stall_seconds=config.stall_seconds,
    )
    to_loop.deliver = service.deliver
    if drafter is not None:
        drafter.meanwhile = engine.flush
    return service


def follow(config: VerifierConfig, parallel: Parallel) -> None:
    """What a rank other than 0 does from start to end: its part of every forward.

    Raises StartupError, and RankLost when another rank ends without a word.
    """
    torch.set_num_threads(config.service.threads)
    model, _ = _load(config, device_of(config.device, parallel.local_rank), parallel)
    leave_signals_to_rank_0()
    follow_target(model, parallel)


def _load(
    config: VerifierConfig, device: torch.device, parallel: Parallel
) -> tuple[Target, LoadReport]:
    numerics: Numerics = "batch_invariant" if config.batch_invariant else "fast"
    dtype = DTYPES[config.dtype]
    model, report = load_target(config.model, dtype, device, numerics, parallel)
    log.info("target loaded", extra=fields(**report.facts()))
    return model, report


class _Relay:
    """Carries a step's events from the engine thread to the loop thread, in one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.deliver: Callable[[list[Event]], None]

    def emit(self, events: list[Event]) -> None:
        self._loop.call_soon_threadsafe(self.deliver, events)


def _max_context_len(config: VerifierConfig, target: TargetFacts) -> int:
    own = target.max_context_len
    wished = config.max_context_len
    if wished is not None and wished > own:
        raise StartupError(
            f"--max-context-len {wished} is above the {own} positions that {config.model} was "
            "made for; lower it or leave it out"
        )
    return wished or own


def _verify_length(config: VerifierConfig, max_drafts: int) -> VerifyLength:
    if config.sts is None:
        return VerifyLength(config.min_survival)
    try:
        text = config.sts.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--sts {config.sts} cannot be read: {error}") from error
    return VerifyLength(config.min_survival, load_sts(text, f"--sts {config.sts}", max_drafts))


def _feature_dtype(config: VerifierConfig) -> str:
    auto = "fp32" if config.dtype == "fp32" else "bf16"
    return auto if config.feature_dtype == "auto" else config.feature_dtype


def _feature_width(config: VerifierConfig, contract: Contract) -> int:
    projected = config.feature_form == "projected"
    return contract.hidden_size * (1 if projected else len(contract.target_layer_ids))


def _feature_store(config: VerifierConfig, kv: KVCache, width: int) -> FeatureStore:
    project = None
    if width and config.feature_form == "projected":
        assert config.draft_model is not None
        dtype = DTYPES[config.dtype]
        project = load_projector(config.draft_model, config.model, dtype, config.device)
    return FeatureStore(kv, width, dtype=_feature_dtype(config), project=project)


def _drafter(config: VerifierConfig, contract: Contract, telemetry: Telemetry) -> DrafterClient:
    assert config.drafter is not None
    settings = LinkSettings(
        address=config.drafter,
        draft_timeout_ms=config.draft_timeout_ms,
        projected=config.feature_form == "projected",
        feature_dtype=_feature_dtype(config),
        # Elsewhere, copying rows before the forward has ended stalls the device.
        look_ahead=config.look_ahead == "on"
        or (config.look_ahead == "auto" and config.device == "cpu"),
    )
    return DrafterClient(settings, contract, telemetry)
