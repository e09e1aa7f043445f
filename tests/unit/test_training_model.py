"""What a block of the training model can and cannot see, and the names it is saved under."""

import torch

from drafter_svc.training.model import Blocks, Drafter, DrafterConfig

CONFIG = DrafterConfig(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=100,
    draft_vocab_size=40,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    num_target_layers=9,
    target_layer_ids=[1, 4, 7],
    num_hidden_layers=2,
    block_size=4,
    markov_rank=8,
    mask_token_id=3,
)


def make_drafter() -> Drafter:
    torch.manual_seed(0)
    return Drafter(CONFIG, torch.randn(100, 32), torch.randn(100, 32), torch.arange(40) * 2).eval()


def make_blocks() -> Blocks:
    """Two texts of 12 and 9 context rows with three and two anchors."""
    torch.manual_seed(1)
    return Blocks(
        features=torch.randn(21, 96),
        context_lens=[12, 9],
        num_anchors=[3, 2],
        anchors=torch.tensor([5, 8, 11, 4, 7]),
        tokens=torch.randint(0, 100, (5, 5)),
    )


@torch.no_grad()
def test_blocks_do_not_see_each_other_nor_the_other_text() -> None:
    drafter, blocks = make_drafter(), make_blocks()
    together, confidence = drafter(blocks)
    for block, (start, length) in enumerate([(0, 12)] * 3 + [(12, 9)] * 2):
        alone = Blocks(
            blocks.features[start : start + length],
            [length],
            [1],
            blocks.anchors[block : block + 1],
            blocks.tokens[block : block + 1],
        )
        logits, alone_confidence = drafter(alone)
        torch.testing.assert_close(logits[0], together[block], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(alone_confidence[0], confidence[block], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_block_sees_context_before_its_anchor_only() -> None:
    drafter, blocks = make_drafter(), make_blocks()
    before, _ = drafter(blocks)
    blocks.features[8:12] += 1.0  # positions 8.. of the first text
    after, _ = drafter(blocks)
    torch.testing.assert_close(after[:2], before[:2])
    assert (after[2] - before[2]).abs().max() > 1e-3
    torch.testing.assert_close(after[3:], before[3:])


@torch.no_grad()
def test_rows_see_later_rows_of_their_block_but_only_their_own_previous_token() -> None:
    drafter, blocks = make_drafter(), make_blocks()
    before, _ = drafter(blocks)
    blocks.tokens[0, 2] = (blocks.tokens[0, 2] + 1) % 100
    after, _ = drafter(blocks)
    changed = (after[0] - before[0]).abs().amax(-1) > 1e-6
    # Token 2 is the previous token of row 2 alone (Markov bias); it never enters the backbone.
    assert changed.tolist() == [False, False, True, False]


def test_parameter_names_are_the_checkpoint_names() -> None:
    names = set(make_drafter().state_dict())
    assert "layers.1.self_attn.q_norm.weight" in names
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "d2t"} <= names
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} <= names
    assert {"confidence_head.proj.weight", "confidence_head.proj.bias"} <= names
    assert not any(name.startswith(("embed", "head", "cos", "sin")) for name in names)
