"""The contract of a drafter and its target, from their two config.json files; reads no weight.

Both services call this, each on its own copy of the files, and compare the results at `Hello`.
"""

from pathlib import Path

from common.contract import Contract
from common.models.config import TargetConfig
from common.models.dspark_qwen3 import FAMILY, DrafterConfig, drafter_config
from common.models.registry import read_target_config


def contract_of(draft: DrafterConfig, target: TargetConfig) -> Contract:
    """Of two configs that were read already."""
    return Contract(
        target_family=target.family,
        drafter_family=FAMILY,
        hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        target_layer_ids=draft.target_layer_ids,
        block_size=draft.block_size,
        mask_token_id=draft.mask_token_id,
        rope=target.rope.canonical(),
    )


def read_contract(draft_path: Path, target_path: Path) -> Contract:
    """Of two checkpoint folders. Raises LoadError as the configs' own readers do."""
    target = read_target_config(target_path)
    return contract_of(drafter_config(draft_path, target), target)
