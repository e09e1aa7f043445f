"""A training run that is stopped and resumed ends in the same state as one that is not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import LoadError
from drafter_svc.training.data import Corpus, choose_anchors, draft_vocabulary
from drafter_svc.training.settings import Settings
from drafter_svc.training.shards import Text, read_shard, write_shard
from drafter_svc.training.start import EMBED
from drafter_svc.training.train import Trainer

HIDDEN, VOCAB, NUM_TAPS = 16, 50, 2
TARGET = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "num_hidden_layers": 6,
}


def make_text(index: int, head: torch.Tensor, length: int = 20) -> Text:
    """Five prompt tokens and an answer; `lse` fits the states, as generation guarantees."""
    states = torch.randn(length, (NUM_TAPS + 1) * HIDDEN).bfloat16()
    states[-1] = 0
    lse = (states[:, -HIDDEN:].float() @ head.float().T).logsumexp(-1)
    return Text(torch.randint(0, VOCAB, (length,)), states, lse, 5, index, index % 2 == 0)


def layer_weights(index: int) -> dict[str, torch.Tensor]:
    shapes = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (16, HIDDEN),
        "self_attn.k_proj": (8, HIDDEN),
        "self_attn.v_proj": (8, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 16),
        "mlp.gate_proj": (32, HIDDEN),
        "mlp.up_proj": (32, HIDDEN),
        "mlp.down_proj": (HIDDEN, 32),
    }
    return {
        f"model.layers.{index}.{name}.weight": (torch.randn(shape) / 4).bfloat16()
        for name, shape in shapes.items()
    }


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    torch.manual_seed(0)
    target, data = tmp_path / "target", tmp_path / "data"
    target.mkdir()
    data.mkdir()
    weights = {
        EMBED: torch.randn(VOCAB, HIDDEN).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
        **layer_weights(4),
        **layer_weights(5),
    }
    save_file(weights, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(TARGET))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}))
    meta = {"taps": [1, 3], "hidden_size": HIDDEN, "next_prompt": 12, "target": "tiny"}
    write_shard(data, 0, [make_text(i, weights[EMBED]) for i in range(12)], meta)
    return Settings(
        target=target,
        data=data,
        taps=[1, 3],
        drafter_taps=[1, 3],
        num_kv_heads=2,
        intermediate_size=24,
        draft_vocab_size=20,
        block_size=3,
        markov_rank=4,
        mask_token_id=1,
        num_anchors=6,
        num_columns=16,
        texts_per_step=2,
        short_until=0.5,
        steps=8,
        warmup=2,
        learning_rate=1e-2,
    )


def run_steps(trainer: Trainer, count: int) -> None:
    for _ in range(count):
        trainer.train_step()


def test_resumed_run_equals_the_uninterrupted_one(settings: Settings) -> None:
    whole = Trainer(settings)
    run_steps(whole, 4)
    whole.save()
    resumed = Trainer(settings)
    assert resumed.step == 4
    for trainer in (whole, resumed):
        run_steps(trainer, 3)
        assert trainer.epoch == 1  # 11 training texts, two per step
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, resumed.drafter.state_dict()[name]), name


def test_training_lowers_the_loss(settings: Settings) -> None:
    settings.steps = 60
    trainer = Trainer(settings)
    losses = [trainer.train_step()["loss"] for _ in range(40)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_checkpoint_of_another_step_is_refused(settings: Settings) -> None:
    trainer = Trainer(settings)
    run_steps(trainer, 2)
    trainer.save()
    place = settings.data / "train.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "step": 3}))
    with pytest.raises(AssertionError, match="step 2 beside a place of step 3"):
        Trainer(settings)
    assert int(load_file(settings.data / "train.safetensors")["step"]) == 2


def test_shards_round_trip_and_validation_is_kept_apart(settings: Settings) -> None:
    texts = read_shard(settings.data / "shard-00000.safetensors")
    assert [len(text.ids) for text in texts] == [20] * 12
    corpus = Corpus(settings.data)
    assert [ref.prompt_index for ref in corpus.validation] == [7]
    assert 7 not in [ref.prompt_index for ref in corpus.training]


def test_missing_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no shard-\*"):
        Corpus(tmp_path)


def test_anchors_are_answer_tokens_with_a_follower() -> None:
    text = make_text(0, torch.randn(VOCAB, HIDDEN))
    assert choose_anchors(text, None, torch.Generator()).tolist() == list(range(5, 19))
    some = choose_anchors(text, 4, torch.Generator().manual_seed(0)).tolist()
    assert len(set(some)) == 4
    assert some == sorted(some)


def test_draft_vocabulary_is_frequent_required_and_sorted() -> None:
    counts = torch.tensor([5, 0, 9, 1, 7, 0])
    assert draft_vocabulary(counts, 3, required=[5]).tolist() == [2, 4, 5]
