"""Prompts of models that fill in the middle: the text before a gap and the text behind it, between the model's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from headway.core.contract.errors import ConfigError
from headway.requests.prompts import Prompt, whole_text


class InfillTokens(NamedTuple):
    """The tokens before the prefix, before the suffix, and before what fills the gap."""

    prefix: str
    suffix: str
    middle: str


FAMILIES: Final = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, Granite 4
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
"""The tokens of families of models, all of which have the prefix first.

Bavarian et al., "Efficient training of language models to fill in the middle", 2022."""
_ENDS: Final = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|endoftext|>")
"""Tokens with which some of these models end what fills a gap."""


class Infill:
    """Writes the prompts of one tokenizer."""

    def __init__(self, tokenizer: Any, model: str) -> None:
        """:raises ConfigError: the tokenizer has no tokens of a known family."""
        known: Mapping[str, int] = tokenizer.get_vocab() if tokenizer is not None else {}
        found = next((each for each in FAMILIES if all(token in known for token in each)), None)
        if found is None:
            need = "a model with fill-in-the-middle tokens, such as Qwen-Coder, StarCoder, DeepSeek-Coder or CodeGemma"
            raise ConfigError("suffix", need, model, "leave suffix out")
        self._tokenizer = tokenizer
        self._ids = [known[token] for token in found]
        self.stop_token_ids = sorted({*self._ids, *(known[token] for token in _ENDS if token in known)})
        """Tokens that what fills a gap does not hold: they end it."""

    def prompt(self, prefix: str, suffix: str, encode: Callable[[str], list[int]]) -> Prompt:
        """The prompt whose completion fills the gap. encode: token ids of a text, without a tokenizer's own around it.

        :raises PromptError: a text that is no Unicode.
        """
        before, behind, middle = self._ids
        around = list(self._tokenizer("")["input_ids"])  # BOS, where the model has one; an end of text would be none of a prompt
        begun = [token for token in around if token != self._tokenizer.eos_token_id]
        ids = [*begun, before, *encode(whole_text(prefix)), behind, *encode(whole_text(suffix, "suffix")), middle]
        return {"prompt": prefix, "prompt_token_ids": ids}
