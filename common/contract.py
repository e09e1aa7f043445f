"""The facts on which drafter and verifier must agree, and the comparison that refuses a mismatch.

Pure; both sides build it from config.json files. Knows nothing of protobuf: the services convert.
"""

from dataclasses import dataclass, fields

PROTOCOL_VERSION = 2  # of proto/dspark/v1/drafter.proto; both sides must speak the same
MAX_MESSAGE_BYTES = 64 << 20  # on the Draft stream, either way


@dataclass(frozen=True)
class Contract:
    """Field meanings and units as in proto/dspark/v1/drafter.proto."""

    target_family: str
    drafter_family: str
    hidden_size: int
    num_target_layers: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    rope: str
    context_window: int = 0

    def differences(self, other: "Contract") -> list[str]:
        """One line per field that differs, naming both values; empty when the two agree."""
        return [
            f"{f.name}: {getattr(self, f.name)!r} here, {getattr(other, f.name)!r} at the peer"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
