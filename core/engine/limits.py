"""Which prompts an engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.contract.errors import PromptError
from headway.core.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Checks a prompt before anything is queued."""

    max_model_len: int
    vocab_size: int
    advice: str
    """What to do about a prompt that is too long: only what would help."""

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int, max_position_embeddings: int, vocab_size: int) -> PromptLimits:
        """The limits of an engine. max_position_embeddings: what the model was made for."""
        advice = "shorten it or raise kv_cache_memory"
        if max_model_len >= max_position_embeddings:
            advice = "shorten it; the model was made for no more"
        elif config.max_model_len is not None:
            advice = "shorten it or raise max_model_len"
        elif not config.enable_chunked_prefill and max_model_len >= config.step_tokens:
            advice = "shorten it, raise max_num_batched_tokens, or turn chunked prefill on"
        return cls(max_model_len, vocab_size, advice)

    def check(self, prompt_token_ids: Sequence[int]) -> None:
        """Check a prompt.

        :raises PromptError: it is empty, leaves no room for one token, or has ids outside the vocabulary.
        """
        if not prompt_token_ids:
            raise PromptError("prompt", "at least one token", "an empty prompt")
        if len(prompt_token_ids) >= self.max_model_len:
            raise PromptError(
                "prompt",
                f"at most {self.max_model_len - 1} tokens (max_model_len={self.max_model_len}, one is for the output)",
                f"{len(prompt_token_ids)} tokens",
                self.advice,
            )
        for token in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= token < self.vocab_size:
                raise PromptError("prompt", f"token ids from 0 to {self.vocab_size - 1}", token)
