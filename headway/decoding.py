"""The fastest way from a tokenizer's tokens to text: every token of every stream takes it twice."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from headway.core.sampling.detokenizer import NoTokenizer, Tokenizer

_REMEMBERED: Final = 8192
"""Tokens whose own text is remembered; most of what is written consists of fewer."""


class DirectTokenizer:
    """The library below transformers' tokenizer, where transformers would only pass its answer on: a quarter of the time.

    Every other call is for one token alone, the one before the newest; such texts are remembered.
    """

    def __init__(self, backend: Any) -> None:
        """backend: a tokenizers.Tokenizer."""
        self._decode = backend.decode
        self._one = lru_cache(_REMEMBERED)(lambda token, skip_special_tokens: backend.decode([token], skip_special_tokens))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """See Tokenizer."""
        if len(token_ids) == 1:
            return str(self._one(token_ids[0], skip_special_tokens))
        return str(self._decode(token_ids, skip_special_tokens)) if token_ids else ""


def fastest_decoder(tokenizer: Tokenizer | None) -> Tokenizer:
    """What decodes as a tokenizer does. None: every text is empty."""
    if tokenizer is None:
        return NoTokenizer()
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    plain = isinstance(tokenizer, Fast) and kind.decode is Fast.decode and kind._decode is Fast._decode
    if not plain or tokenizer.clean_up_tokenization_spaces:  # type: ignore[attr-defined]
        return tokenizer
    return DirectTokenizer(tokenizer.backend_tokenizer)  # type: ignore[attr-defined]
