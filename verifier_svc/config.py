"""Every setting of the verifier process, with unit and range; checked before torch is imported.

Knows no checkpoint: what depends on one is resolved in `build.py`.
"""

import dataclasses
from pathlib import Path

from common.config import ServiceConfig, setting
from common.errors import StartupError

POLICIES = ("floor", "strict", "lenient")


@dataclasses.dataclass(frozen=True)
class VerifierConfig:
    """One frozen value per process; components get the fields they need, not this object."""

    model: Path = setting(dataclasses.MISSING, "target checkpoint folder")
    service: ServiceConfig = dataclasses.field(default_factory=ServiceConfig)

    # Drafting.
    drafter: str | None = setting(None, "address of the drafter service: HOST:PORT or unix:PATH")
    draft_model: Path | None = setting(
        None, "folder with the drafter's config.json; its weights are read for PROJECTED only"
    )
    method: str | None = setting(None, "drafting method; absent: what the configs say")
    num_speculative_tokens: int | None = setting(
        None, "drafts per round (K); absent: the trained block size", low=1, high=1024
    )
    k_policy: str = setting("floor", "how K may differ from the trained block", choices=POLICIES)
    draft_timeout_ms: float = setting(
        100.0, "longest wait of a step for its drafts, milliseconds", low=0, high=60_000
    )
    look_ahead: str = setting(
        "auto",
        "tell the drafter during a step how it will probably end; auto: if the target runs on cpu",
        choices=("auto", "on", "off"),
    )
    min_survival: float = setting(
        0.0, "verify only drafts whose predicted survival reaches this share", low=0, high=1
    )
    sts: Path | None = setting(None, "calibration file of the drafter's confidences")
    feature_form: str = setting(
        "raw_layers", "which hidden rows travel to the drafter", choices=("raw_layers", "projected")
    )
    feature_dtype: str = setting(
        "auto",
        "type of those rows; auto: fp32 beside an fp32 model",
        choices=("auto", "bf16", "fp32"),
    )

    # Computing.
    dtype: str = setting("bf16", "type of weights and activations", choices=("bf16", "fp32"))
    device: str = setting("cpu", "where the target runs: cpu, cuda or cuda:N")
    batch_invariant: bool = setting(
        False, "a request's numbers never depend on what runs beside it; slower"
    )

    # Room.
    kv_block_size: int | None = setting(
        None, "tokens per KV block; absent: 16, or the next size that the model can use", low=1
    )
    kv_blocks: int | None = setting(None, "KV blocks; absent: what --kv-memory-mb holds", low=1)
    kv_memory_mb: int | None = setting(
        None,
        "MiB for the KV cache and the feature rows; absent: 512, more where the windows of "
        "--max-running requests take more",
        low=1,
    )
    max_running: int = setting(32, "requests decoded at a time", low=1, high=4096)
    max_waiting: int = setting(256, "requests queued behind those", low=0, high=1_000_000)
    max_batch_tokens: int = setting(512, "rows of one forward pass", low=1, high=65_536)
    max_context_len: int | None = setting(
        None, "tokens, prompt and output together; absent: the model's", low=2
    )
    max_stream_events: int = setting(
        1024,
        "unread rounds from which a client that takes none for 1 s is cut",
        low=1,
        high=1_000_000,
    )
    stall_seconds: float = setting(
        30.0, "seconds without a finished step, with work at hand, until NOT_SERVING", low=0.1
    )

    def __post_init__(self) -> None:
        if self.drafter is not None and not _is_address(self.drafter):
            raise StartupError(
                f"--drafter {self.drafter!r} is neither HOST:PORT nor unix:PATH; give the address "
                "that the drafter serves"
            )
        if self.drafter is not None and self.draft_model is None:
            raise StartupError(
                f"--drafter {self.drafter} needs --draft-model: the folder with that drafter's "
                "config.json, from which the contract is made"
            )
        if self.drafter is None and self.sts is not None:
            raise StartupError(f"--sts {self.sts} has no effect without --drafter; drop one")
        if self.kv_blocks is not None and self.kv_memory_mb is not None:
            raise StartupError(
                f"--kv-blocks {self.kv_blocks} and --kv-memory-mb {self.kv_memory_mb} both size "
                "the KV cache; give one of them"
            )
        if self.max_running > self.max_batch_tokens:
            raise StartupError(
                f"--max-running {self.max_running} must not be above --max-batch-tokens "
                f"{self.max_batch_tokens}: every running request takes at least one row"
            )


def _is_address(text: str) -> bool:
    if text.startswith("unix:"):
        return text != "unix:"
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) <= 65535
