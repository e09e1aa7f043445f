"""`dspark generate` against the running pair."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from common.cli.main import main

GREEDY = ["--temperature", "0", "--max-tokens", "24"]


def run(served: Any, *args: str) -> int:
    return main(["generate", *args, "--address", served.verifier.listen])


def test_it_streams_exactly_the_text(served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(served, "hello", *GREEDY) == 0
    streamed = capsys.readouterr()
    assert run(served, "hello", *GREEDY, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert streamed.out == answer["text"] + "\n" and streamed.err == ""
    assert answer["reason"] == "max_tokens" and answer["num_output_tokens"] == 24
    assert len(answer["token_ids"]) == 24
    assert answer["speculation"]["num_accepted_tokens"] > 0


def test_accepted_drafts_stand_out_on_a_terminal(
    served: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(served, "hello", *GREEDY)
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(served, "hello", *GREEDY) == 0
    shown = capsys.readouterr()
    marked = "".join(re.findall(r"\x1b\[30;42m(.*?)\x1b\[0m", shown.out, re.S))
    assert re.sub(r"\x1b\[[\d;]*m", "", shown.out) == plain
    assert 0 < len(marked) < len(plain.strip())
    assert re.search(r"24 tokens \(max_tokens\), .* tokens/s, \d+ of \d+ drafts", shown.err)
    assert run(served, "hello", *GREEDY, "--no-drafting") == 0
    assert "\x1b[30;42m" not in capsys.readouterr().out


def test_the_prompt_can_come_from_standard_input(
    served: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(served, "hello", *GREEDY)
    expected = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run(served, "-", *GREEDY) == 0
    assert capsys.readouterr().out == expected


def test_chat_uses_the_models_own_template(
    served: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(served, "<hi>", *GREEDY)
    expected = capsys.readouterr().out
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert run(served, "hi", *GREEDY, "--chat", "--chat-model", str(tmp_path)) == 0
    assert capsys.readouterr().out == expected
    assert run(served, "hi", "--chat") == 2, "the tiny checkpoint has no template"
    assert "chat_template" in capsys.readouterr().err


def test_errors_say_what_the_verifier_said(
    served: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(served, "hello", "--top-p", "0") == 1
    assert "INVALID_ARGUMENT: sampling.top_p is 0" in capsys.readouterr().err
    assert run(served, "hello", "--timeout", "0.000001") == 1
    assert "DEADLINE_EXCEEDED" in capsys.readouterr().err
    assert main(["generate", "hello", "--address", f"unix:{tmp_path}/none"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["generate"])
    assert caught.value.code == 2
