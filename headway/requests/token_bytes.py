"""Bytes of single tokens, which join to the UTF-8 of a completion's text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from headway.requests.request_state import fastest_decoder

_REMEMBERED: Final = 8192
"""Number of pairs of tokens whose bytes are remembered."""
_PART: Final = "\N{REPLACEMENT CHARACTER}"
"""Text of bytes that are a part of a character."""
_BYTE_NAME: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Name of a token of one byte in vocabularies of sentencepiece."""


def _byte_of_sign() -> dict[str, int]:
    """Return the byte for each character of a name in byte-level BPE: printable Latin-1 stands for itself (GPT-2)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_SIGN: Final = _byte_of_sign()


class TokenBytes:
    """The bytes of one tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: transformers' tokenizer; None if there is none, and no token has bytes."""
        self._tokenizer = tokenizer
        self._decoder = fastest_decoder(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self.special = frozenset(token for token, each in added.items() if each.special)
        """Special tokens, which most texts leave out."""
        self.of = lru_cache(_REMEMBERED)(self._of)
        """The bytes of a token after another token; after None, of the first token of a text."""

    def _of(self, token: int, before: int | None) -> bytes:
        text = self._decode(token)
        name = str(self._tokenizer.convert_ids_to_tokens(token)) if self._tokenizer is not None else ""
        byte = _BYTE_NAME.fullmatch(name)
        if byte is not None and text != name:
            return bytes.fromhex(byte[1]) if text or before is not None else b""  # a space that the decoder takes away
        if _PART in text and all(sign in _BYTE_OF_SIGN for sign in name):
            return bytes(_BYTE_OF_SIGN[sign] for sign in name)
        if before is not None:
            text = self._decode(before, token)[len(self._decode(before)) :]
        return text.encode("utf-8", "replace")

    def _decode(self, *token_ids: int) -> str:
        return self._decoder.decode(list(token_ids), skip_special_tokens=False)


class TextBytes:
    """The bytes of the tokens of one completion as they come.

    Without those of hidden special tokens they join to the UTF-8 of its text. So the first token has no leading space if the
    tokenizer's decoder takes one from the start of a text, as sentencepiece's do; all others have theirs.
    """

    def __init__(self, tokens: TokenBytes, hides_special: bool) -> None:
        """hides_special: True if the text leaves special tokens out."""
        self._tokens = tokens
        self._hidden = tokens.special if hides_special else frozenset()
        self._before: int | None = None

    def take(self, candidates: Sequence[int]) -> list[bytes]:
        """Return the bytes of the tokens that might have come next, of which the first has come."""
        found = [self._tokens.of(token, self._before) for token in candidates]
        if candidates[0] not in self._hidden:
            self._before = candidates[0]
        return found
