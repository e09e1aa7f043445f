"""The training prompts: a function of their number, complete, and apart from the held-out ones."""

import json
from pathlib import Path

from drafter_svc.training.prompts import OPENERS_FILE, load_words, make_prompt

HELDOUT = Path(OPENERS_FILE).with_name("heldout_prompts.json")
TOKENS = ["Ġplain", "Ġwords", "Ġtokens"]


def test_a_prompt_depends_on_its_number_alone() -> None:
    words = load_words(TOKENS)
    first = [make_prompt(index, words) for index in range(300)]
    assert first == [make_prompt(index, load_words(TOKENS)) for index in range(300)]
    assert len({prompt.text for prompt in first}) > 150
    assert {prompt.kind for prompt in first} == {"chat", "code", "maths", "invented"}


def test_every_slot_is_filled() -> None:
    words = load_words(TOKENS)
    slots = [f"{{{name}}}" for name in words]
    for index in range(1000):
        text = make_prompt(index, words).text
        assert not any(slot in text for slot in slots), text


def test_no_opener_begins_a_held_out_prompt() -> None:
    held_out = [entry["prompt"].lower() for entry in json.loads(HELDOUT.read_text())]
    for openers in json.loads(OPENERS_FILE.read_text()).values():
        for opener in openers:
            fixed = opener.split("{")[0].lower().strip()
            if " " in fixed:
                assert not [text for text in held_out if text.startswith(fixed + " ")], opener
