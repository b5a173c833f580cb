"""Text from tokens as they come, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str:
        """Text of the tokens."""


class NoTokenizer:
    """Stands in where a model is used by token ids alone: every text is empty."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Nothing."""
        return ""


class Detokenizer:
    """Grows the text of one sequence token by token.

    A token's text depends on its neighbours (spaces, bytes of one character), so a window is decoded twice, without and with the
    newest tokens, and the difference is the new text; it is held back while it ends in an incomplete character. The method of
    text-generation-inference and vLLM.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._window = 0
        self._read = 0
        self.text = ""

    @property
    def num_tokens(self) -> int:
        """Tokens taken."""
        return len(self._ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that end no stop text, without growing `text` after each."""
        self._ids += tokens

    def append(self, token: int) -> bool:
        """Take one token; True if a stop text is complete, in which case `text` ends before it."""
        self._ids.append(token)
        self._grow(final=False)
        return self._cut()

    def flush(self) -> str:
        """The whole text, with whatever was held back."""
        self._grow(final=True)
        self._cut()
        return self.text

    def _grow(self, final: bool) -> None:
        before = self._tokenizer.decode(self._ids[self._window : self._read], skip_special_tokens=True)
        after = self._tokenizer.decode(self._ids[self._window :], skip_special_tokens=True)
        if len(after) > len(before) and (final or not after.endswith("\N{REPLACEMENT CHARACTER}")):
            self.text += after[len(before) :]
            self._window, self._read = self._read, len(self._ids)

    def _cut(self) -> bool:
        found = [at for at in (self.text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    @property
    def safe_text(self) -> str:
        """The text less an end that may turn out to be the start of a stop text: what can be shown already."""
        held = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return self.text[: len(self.text) - held]
