"""Streaming text equals whole text, is never rewritten and never holds half a character."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from common.errors import LoadError
from common.loading.tokenizer import StreamDecoder, Tokenizer
from common.testing.tiny import tiny_target

TEXT = "Grüße, 你好 👩‍👩‍👧 naïve — 🏳️‍🌈!"


def byte_level(folder: Path) -> Path:
    """Every byte is a token, as is a special one."""
    return tiny_target(folder, vocab=300)


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    tokenizer, done, num_ticks = Tokenizer(byte_level(tmp_path)), threading.Event(), 0
    text = "a b" * 100_000  # takes some 0.2 s

    def encode() -> None:
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        num_ticks += 1
    thread.join()
    assert num_ticks >= 5


def byte_fallback(folder: Path) -> Path:
    """As Llama 2: words with a leading-space mark, bytes as <0xHH>."""
    words = ["<unk>", "▁the", "▁river", "s", "▁", "a", "é", "▁é", "."]
    vocab = {w: i for i, w in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=lambda f: f.__name__)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    return Tokenizer(request.param(tmp_path_factory.mktemp("tokenizer")))


def stream(decoder: StreamDecoder, token_ids: list[int]) -> tuple[list[str], str]:
    """Pieces in order of arrival, and what the flush adds."""
    return [decoder.push(i) for i in token_ids], decoder.flush()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    pieces, rest = stream(StreamDecoder(tokenizer), token_ids)
    assert "".join(pieces) + rest == tokenizer.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=12))
def test_valid_text_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    token_ids = tokenizer.encode(text)
    pieces, rest = stream(StreamDecoder(tokenizer), token_ids)
    assert "\ufffd" not in "".join(pieces) + rest
    assert "".join(pieces) + rest == tokenizer.decode(token_ids)


def test_a_character_comes_out_with_its_last_byte(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    token_ids = tokenizer.encode(TEXT)
    assert len(token_ids) > len(TEXT)
    pieces, rest = stream(StreamDecoder(tokenizer), token_ids)
    assert (rest, "".join(pieces)) == ("", TEXT)
    assert all(len(piece) <= 1 for piece in pieces) and "👧" in pieces


def test_an_unfinished_character_waits_for_the_flush(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    euro = tokenizer.encode("é€")[-3:]
    assert [decoder.push(i) for i in euro[:2]] == ["", ""]
    rest = decoder.flush()
    assert rest and set(rest) == {"\ufffd"}
    assert decoder.flush() == ""


def test_a_prompt_decides_about_the_leading_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_fallback(tmp_path))
    river, the = tokenizer.token_id("▁river"), tokenizer.token_id("▁the")
    assert river is not None and the is not None
    assert StreamDecoder(tokenizer).push(river) == "river"
    assert StreamDecoder(tokenizer, prompt_ids=[the]).push(river) == " river"


def test_a_prompt_may_end_inside_a_character(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    euro = tokenizer.encode("€")
    decoder = StreamDecoder(tokenizer, prompt_ids=[*tokenizer.encode("ab"), *euro[:2]])
    assert decoder.push(euro[2]) == "€"


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    eos = tokenizer.token_id("<eos>")
    assert eos == 299 and tokenizer.token_id("<none>") is None
    token_ids = tokenizer.encode("ab<eos>c")
    assert eos in token_ids
    assert "".join(stream(StreamDecoder(tokenizer), token_ids)[0]) == "abc"
    shown = StreamDecoder(tokenizer, skip_special_tokens=False)
    assert "".join(stream(shown, token_ids)[0]) == "ab<eos>c"


def test_long_streams_do_not_decode_everything_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    decode, lengths = tokenizer.decode, []

    def counted(token_ids: Sequence[int], skip: bool = True) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids, skip)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream(StreamDecoder(tokenizer), tokenizer.encode("abc <eos>" * 200))
    assert len(lengths) > 900 and max(lengths) <= 5


def test_nor_do_streams_that_never_finish_a_character(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    euro = tokenizer.encode("€")
    for token_ids in ([euro[0]] * 300, tokenizer.encode("\ufffd" * 100), euro[:2] * 100):
        decoder = StreamDecoder(tokenizer)
        pieces, rest = stream(decoder, token_ids)
        assert "".join(pieces) + rest == tokenizer.decode(token_ids)
        assert len(decoder._ids) <= 4


def test_special_tokens_inside_a_character(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level(tmp_path))
    eos = tokenizer.token_id("<eos>")
    euro = tokenizer.encode("€")
    token_ids = [euro[0], *[eos] * 9, euro[1], *[eos] * 9, euro[2]]
    pieces, rest = stream(StreamDecoder(tokenizer), token_ids)
    assert (pieces[-1], "".join(pieces), rest) == ("€", "€", "")


def test_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"holds no tokenizer.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(LoadError, match=r"cannot be read .* download it again"):
        Tokenizer(tmp_path)
