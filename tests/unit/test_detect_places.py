"""Where a value is read, and what happens when two places of one config give different ones."""

from typing import Any

import pytest

from common.detect.api import detect
from common.errors import ConfigError
from common.testing import configs as c
from common.testing.configs import DROP, with_, within

ONLY_NESTED_B = within(with_(c.SPECFORGE, block_size=DROP), "dflash_config", block_size=11)
EAGLE_NESTED = with_(c.QWEN8B, block_size=DROP, eagle_config={"block_size": 7})


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (c.FLASH_0731, "dspark_block_size"),
        (c.V41, "text_config.dspark_block_size"),
        (c.QWEN8B, "block_size"),
        (ONLY_NESTED_B, "dflash_config.block_size"),
        (EAGLE_NESTED, "eagle_config.block_size"),
        (c.QWEN8B | {"dspark_block_size": 7}, "dspark_block_size"),
    ],
)
def test_each_value_says_where_it_was_read(config: dict[str, Any], path: str) -> None:
    assert detect(config).sources["block_size"] == path


@pytest.mark.parametrize(
    ("config", "both"),
    [
        (c.QWEN8B | {"dflash_config": {"block_size": 16}}, ["`block_size` is 7", "16"]),
        (c.QWEN8B | {"dspark_block_size": 5}, ["`dspark_block_size` is 5", "`block_size` is 7"]),
        (c.V41 | c.DSPARK_KEYS | {"dspark_block_size": 7}, ["`dspark_block_size` is 7", "is 5"]),
        (
            c.QWEN8B | {"aux_hidden_state_layer_ids": [1, 9, 17, 25, 33]},
            ["`target_layer_ids`", "`aux_hidden_state_layer_ids`"],
        ),
        (
            c.SPEC8 | {"dspark_bonus_anchor": True},
            ["`sample_from_anchor`", "`dspark_bonus_anchor`"],
        ),
        (
            c.QWEN8B | {"dspark_config": {"mask_token_id": 4}},
            ["`dspark_config.mask_token_id` is 4"],
        ),
        (c.QWEN8B | {"text_config": {"markov_rank": 0}}, ["`text_config.markov_rank` is 0"]),
        *(
            (c.FLASH_0731 | {"text_config": {key: 8192}}, [f"`{key}` is", f"`text_config.{key}`"])
            for key in ("hidden_size", "num_hidden_layers", "vocab_size")
        ),
        (c.FLASH_MTP | {"text_config": {"num_nextn_predict_layers": 3}}, ["is 1", "is 3"]),
    ],
)
def test_two_places_that_differ_are_named(config: dict[str, Any], both: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(config)
    assert caught.value.code == "E16", caught.value
    for words in both:
        assert words in caught.value.message


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (c.FLASH_MTP, {"num_stages": "num_nextn_predict_layers", "hidden_size": "hidden_size"}),
        (c.V41, {"num_layers": "text_config.num_hidden_layers", "num_stages": "default"}),
        (c.QWEN8B, {"num_stages": "num_hidden_layers", "num_layers": "num_target_layers"}),
        (
            c.SPEC8,
            {"vocab_size": "transformer_layer_config.vocab_size", "layout": "sample_from_anchor"},
        ),
        (c.QWEN8B | {"target_hidden_size": 2048}, {"hidden_size": "target_hidden_size"}),
    ],
)
def test_sizes_say_where_they_were_read_too(config: dict[str, Any], paths: dict[str, str]) -> None:
    sources = detect(config).sources
    for field, path in paths.items():
        assert sources[field] == path


def test_two_places_that_agree_are_fine() -> None:
    twice = c.QWEN8B | {"dflash_config": {"block_size": 7, "mask_token_id": 151669}}
    assert detect(twice | {"aux_hidden_state_layer_ids": [2, 10, 18, 26, 34]}).block_size == 7
