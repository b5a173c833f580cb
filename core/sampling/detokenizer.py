"""Incremental detokenization that never returns part of a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Interface of the transformers tokenizer methods that Headway's detokenizer calls."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str:
        """Return the text of the tokens."""


class NoTokenizer:
    """Replacement tokenizer for a model that is used only with token ids: every text is empty."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return an empty text."""
        return ""


class Detokenizer:
    """Incremental detokenizer for one sequence.

    A token's text depends on its neighbours, for example because of spaces or the bytes of one character. So a window is decoded
    twice, without and with the newest tokens, and the difference is the new text. The new text is withheld while it ends in an
    incomplete character. text-generation-inference and vLLM use the same method.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """stop: texts that end a sequence of more than `min_tokens` tokens. include_stop: True to include the stop text at the
        end of `text`."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []
        self._window = 0
        self._read = 0
        self.text = ""
        self.stopped_by: str | None = None
        """The stop text that ended the sequence, or None."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens added so far."""
        return len(self._ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that are known to complete no stop text, without updating `text` after each token."""
        self._ids += tokens

    def append(self, token: int) -> bool:
        """Add one token. Return True if it completes a stop text. `text` then ends before the stop text or, if `include_stop` is
        True, after it."""
        self._ids.append(token)
        return self._grow(final=False)

    def flush(self) -> str:
        """Return the whole text, including text that was withheld."""
        if self.stopped_by is None:
            self._grow(final=True)
        return self.text

    def _grow(self, final: bool) -> bool:
        """Add the text of the newest tokens. Return True if this completes a stop text. final: True to add text that ends in an
        incomplete character."""
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :])
        known = len(self.text)
        if len(after) > len(before) and (final or not after.endswith("\N{REPLACEMENT CHARACTER}")):
            self.text += after[len(before) :]
            self._window = self._read
            self._read = len(self._ids)
        return len(self.text) > known and len(self._ids) > self._min_tokens and self._stop_at(known)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def _stop_at(self, known: int) -> bool:
        """Truncate the text at the first stop text that ends after the first `known` characters. Return whether such a stop text
        was found."""
        places = [(self.text.find(stop, max(known - len(stop) + 1, 0)), stop) for stop in self._stop]
        found = min((place for place in places if place[0] >= 0), default=None)
        if found is not None:
            at, stopped_by = found
            self.stopped_by = stopped_by
            self.text = self.text[: at + len(self.stopped_by)] if self._include_stop else self.text[:at]
        return found is not None

    @property
    def safe_text(self) -> str:
        """Text that can already be shown. An ending that may be the start of a stop text is excluded."""
        held = 0
        for stop in () if self._include_stop else self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:size]):
                    held = size
                    break
        return self.text[: len(self.text) - held]
