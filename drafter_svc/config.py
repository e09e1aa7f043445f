"""Every setting of the drafter process, with unit and range; checked before torch is imported.

Knows no checkpoint: what depends on one is resolved in `build.py`.
"""

import dataclasses
from pathlib import Path

from common.config import ServiceConfig, setting
from common.errors import StartupError


@dataclasses.dataclass(frozen=True)
class DrafterServiceConfig(ServiceConfig):
    """The shared settings; only the default port differs, so that both services can run at once."""

    listen: str = setting("127.0.0.1:50052", "address to serve: HOST:PORT or unix:PATH")


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """One frozen value per process; components get the fields they need, not this object."""

    model: Path = setting(dataclasses.MISSING, "draft checkpoint folder")
    target_model: Path = setting(
        dataclasses.MISSING,
        "target checkpoint folder: its config, and the embedding that the drafter shares with it",
    )
    service: DrafterServiceConfig = dataclasses.field(default_factory=DrafterServiceConfig)

    # Computing.
    dtype: str = setting("bf16", "type of weights and activations", choices=("bf16", "fp32"))
    device: str = setting("cpu", "where the drafter runs: cpu, cuda or cuda:N")

    # Room.
    kv_block_size: int = setting(16, "tokens per KV block", low=1, high=1024)
    kv_blocks: int | None = setting(None, "KV blocks; absent: what --kv-memory-mb holds", low=1)
    kv_memory_mb: int | None = setting(None, "MiB for the context KV; absent: 256", low=1)
    max_sessions: int = setting(256, "requests of all verifiers together", low=1, high=65_536)
    max_sessions_per_verifier: int | None = setting(
        None, "requests of one verifier; absent: --max-sessions", low=1, high=65_536
    )
    max_verifiers: int = setting(16, "verifiers connected at a time", low=1, high=1024)
    max_step_rows: int = setting(
        1024, "feature rows in one message; a verifier splits longer prompts", low=1, high=65_536
    )
    evict_idle_seconds: float = setting(
        1.0, "a session unused for so long makes room for others when all is full", low=0.001
    )

    def __post_init__(self) -> None:
        if self.kv_blocks is not None and self.kv_memory_mb is not None:
            raise StartupError(
                f"--kv-blocks {self.kv_blocks} and --kv-memory-mb {self.kv_memory_mb} both size "
                "the context KV; give one of them"
            )
        per_verifier = self.max_sessions_per_verifier
        if per_verifier is not None and per_verifier > self.max_sessions:
            raise StartupError(
                f"--max-sessions-per-verifier {per_verifier} must not be above --max-sessions "
                f"{self.max_sessions}, which all verifiers share"
            )
