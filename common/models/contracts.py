"""The contract of a drafter and its target, from their two config.json files; reads no weight.

Both services call this, each on its own copy of the files, and compare the results at `Hello`.
"""

from pathlib import Path

from common.contract import Contract
from common.models.drafters import read_drafter_config
from common.models.interfaces import DrafterFacts, TargetFacts
from common.models.registry import read_target_config


def contract_of(draft: DrafterFacts, target: TargetFacts) -> Contract:
    """Of two configs that were read already."""
    return Contract(
        target_family=target.family,
        drafter_family=draft.family,
        hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        target_layer_ids=draft.target_layer_ids,
        block_size=draft.block_size,
        mask_token_id=draft.mask_token_id,
        rope=target.rope.canonical(),
        context_window=draft.context_window,
    )


def read_contract(draft_path: Path, target_path: Path) -> Contract:
    """Of two checkpoint folders. Raises LoadError as the configs' own readers do."""
    return contract_of(
        read_drafter_config(draft_path, target_path), read_target_config(target_path)
    )
