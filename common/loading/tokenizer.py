"""Text to token ids and back, through `tokenizer.json`; a decoder for streams of ids.

Knows no chat template and no model. Emitted text is final: never half a character, never rewritten.
"""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from common.errors import LoadError

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
CONTEXT_IDS = 4  # decoded again with each new id; an unfinished character has at most three bytes


class Tokenizer:
    """`tokenizer.json` of a checkpoint folder. Raises LoadError if it is missing or broken."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise LoadError(
                f"{path} holds no tokenizer.json; add the model's own one (it is needed to turn "
                "prompts into token ids and tokens into text)"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise LoadError(f"{file} cannot be read ({error}); download it again") from error
        names = (f"<0x{byte:02X}>" for byte in range(256))
        ids = (self._tokenizer.token_to_id(name) for name in names)
        self.byte_ids = frozenset(i for i in ids if i is not None)  # byte fallback, if it has any
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added tokens included; a model's own may be padded."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Special tokens inside `text` are always recognised; the flag adds BOS and the like.

        As a batch of one: only batches let other Python threads run meanwhile.
        """
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; ids that the tokenizer does not know are left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def is_silent(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """`decode` leaves this id out."""
        if token_id in self._special_ids:
            return skip_special_tokens
        return self._tokenizer.id_to_token(token_id) is None

    def token_id(self, token: str) -> int | None:
        """The id of one token's exact text, if there is one."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class StreamDecoder:
    """Turns ids that arrive one at a time into pieces of text that add up to the whole text.

    `prompt_ids`: what came before; its tail decides whether a first word brings its leading space.
    Held back: an unfinished UTF-8 character, and a run of byte-fallback tokens until it ends,
    because `tokenizers` decodes such a run as a whole.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # Context, then ids with text to come; none that is silent, so that each has a byte.
        self._ids = [i for i in prompt_ids[-CONTEXT_IDS:] if not self._is_silent(i)]
        # A prompt that ends inside a character leaves it to the first ids to finish it.
        self._shown = len(self._text().rstrip(REPLACEMENT))  # characters of _text() that are out

    def push(self, token_id: int) -> str:
        """The text that became final with this id: often a word, sometimes ''."""
        if self._is_silent(token_id):
            return ""
        self._ids.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""
        text = self._text()
        # Only a last replacement character can still turn into something else.
        unfinished = text.endswith(REPLACEMENT)
        piece = text[self._shown : len(text) - unfinished]
        self._shown += len(piece)
        if len(self._ids) > CONTEXT_IDS:
            del self._ids[:-CONTEXT_IDS]
            self._shown = len(self._text()) - unfinished
        return piece

    def flush(self) -> str:
        """What is still held back, unfinished characters as U+FFFD. Ends the stream."""
        piece = self._text()[self._shown :]
        self._shown += len(piece)
        return piece

    def _is_silent(self, token_id: int) -> bool:
        return self._tokenizer.is_silent(token_id, self._skip)

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip)
