"""Limits of an engine's requests, and the check of a request against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.sequence import EmbeddedPrompt
from headway.core.sampling.params import SamplingParams
from headway.core.system.text import shown

_POLICY = 'scheduling_policy="priority" serves lower priorities first'


class CheckedRequest(NamedTuple):
    """A request that `RequestLimits.checked` has accepted. `EngineLoop.add_request` accepts only such requests."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    """Complete sampling parameters. Bad words are given as token ids, because the engine has no tokenizer."""
    priority: int = 0
    """Priority of the request. Lower values run first."""
    prompt: str | None = None
    """Text of the prompt, to show in outputs. The engine reads only the token ids."""
    lora_request: LoRARequest | None = None
    """LoRA adapter of the request. None means the base model."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Checks the requests of one engine before anything is queued."""

    max_model_len: int
    vocab_size: int
    advice: str
    """Hint for the error about a prompt that is too long. It names only remedies that would help."""
    max_logprobs: int = -1
    """Maximum number of log-probabilities per token in a request. -1 means the whole vocabulary."""
    by_priority: bool = False
    embedding_size: int | None = None
    """Number of elements of an embedding row. None if prompts cannot be embeddings."""
    takes_adapters: bool = False
    ahead: int = 0
    """Minimum number of prompt tokens: `LayerSpecs.ahead`."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        max_model_len: int,
        max_position_embeddings: int,
        vocab_size: int,
        embedding_size: int | None = None,
        ahead: int = 0,
    ) -> RequestLimits:
        """Return the limits of an engine. max_position_embeddings: the model's maximum. embedding_size, ahead: see the fields."""
        advice = "shorten it or raise kv_cache_memory"
        if max_model_len >= max_position_embeddings:
            advice = "shorten it; the model was made for no more"
        elif config.max_model_len is not None:
            advice = "shorten it or raise max_model_len"
        elif not config.enable_chunked_prefill and max_model_len >= config.step_tokens:
            advice = "shorten it, raise max_num_batched_tokens, or turn chunked prefill on"
        size, by_priority = embedding_size if config.enable_prompt_embeds else None, config.scheduling_policy == "priority"
        return cls(max_model_len, vocab_size, advice, config.max_logprobs, by_priority, size, config.enable_lora, ahead)

    def checked(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        prompt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> CheckedRequest:
        """Check a request and return it. The engine checks the files of its adapter later.
        :raises PromptError: if the prompt is empty, leaves no room for one token, or has ids outside the vocabulary.
        :raises ConfigError: if the engine or its model does not support the parameters, the priority or the adapter."""
        if lora_request is not None:
            self.check_adapter(lora_request)
        self.check_prompt(prompt_token_ids)
        self.check_params(params)
        if isinstance(prompt_token_ids, EmbeddedPrompt) and (
            params.prompt_logprobs is not None or params.repetition_penalty != 1
        ):
            need = "no prompt_logprobs and no repetition_penalty, which read the prompt's token ids"
            raise ConfigError("prompt_embeds", need, "one of them")
        self.check_priority(priority)
        return CheckedRequest(prompt_token_ids, params, priority, prompt, lora_request)

    def most_prompt_tokens(self, params: SamplingParams) -> int | None:
        """Return the number of tokens to which a request truncates its prompt, or None if it does not."""
        kept, output = params.truncate_prompt_tokens, params.max_tokens or 1
        if kept != -1:
            return kept
        return self.max_model_len - (output if output < self.max_model_len else 1)  # a larger output gets what is left

    def check_adapter(self, lora_request: object) -> None:
        """Check that a request may name an adapter.

        :raises ConfigError: if the adapter is invalid, or the engine has no adapter slots.
        """
        if not isinstance(lora_request, LoRARequest):
            raise ConfigError("lora_request", "a LoRARequest(name, id, path)", shown(lora_request))
        if not self.takes_adapters:
            raise ConfigError("lora_request", "an engine that was started with enable_lora=True", lora_request.lora_name)

    def check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Check a prompt. :raises PromptError: if it is empty, leaves no room for a token, or has ids outside the vocabulary."""
        if not prompt_token_ids:
            raise PromptError("prompt", "at least one token", "an empty prompt")
        if len(prompt_token_ids) >= self.max_model_len:
            raise PromptError(
                "prompt",
                f"at most {self.max_model_len - 1} tokens (max_model_len={self.max_model_len}, one is for the output)",
                f"{len(prompt_token_ids)} tokens",
                self.advice,
            )
        if len(prompt_token_ids) < self.ahead:
            need = f"at least {self.ahead} tokens, because an attention rule lets these see each other (ahead)"
            raise PromptError("prompt", need, f"{len(prompt_token_ids)} tokens")
        if isinstance(prompt_token_ids, EmbeddedPrompt):
            self.check_embedded(prompt_token_ids)
        else:
            self.check_ids(prompt_token_ids)

    def check_embedded(self, prompt: EmbeddedPrompt) -> None:
        """Check a prompt of embeddings.

        :raises PromptError: if the engine does not accept embeddings, or a size or value is wrong.
        """
        if self.embedding_size is None:
            need = "an engine with enable_prompt_embeds=True, whose model Headway's decoder computes"
            raise PromptError("prompt_embeds", need, "another")
        if prompt.rows.shape[1] != self.embedding_size:
            raise PromptError("prompt_embeds", f"[num_tokens, {self.embedding_size}]", f"{list(prompt.rows.shape)}")
        if not prompt.rows.isfinite().all():
            raise PromptError("prompt_embeds", "finite numbers", "NaN or infinite ones")

    def check_ids(self, token_ids: Sequence[int], what: str = "prompt") -> None:
        """Check token ids. what: name of the argument. :raises PromptError: if an id is outside the vocabulary."""
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self.vocab_size:
                raise PromptError(what, f"token ids from 0 to {self.vocab_size - 1}", shown(token))

    def check_params(self, params: SamplingParams) -> None:
        """Check parameters against the model.

        :raises ConfigError: if the parameters contain unknown token ids, or ask for more logprobs than max_logprobs.
        """
        bad_words = [token for word in params.bad_words_token_ids or () for token in word]
        listed = {
            "logit_bias": list(params.logit_bias or ()),
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words_token_ids": bad_words,
            "stop_token_ids": params.stop_token_ids or (),
        }
        for name, tokens in listed.items():
            if tokens and max(tokens) >= self.vocab_size:
                raise ConfigError(name, f"token ids from 0 to {self.vocab_size - 1}", shown(max(tokens)))
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            most = self.vocab_size if self.max_logprobs == -1 else min(self.max_logprobs, self.vocab_size)
            if wanted is not None and (wanted > most or (wanted == -1 and most < self.vocab_size)):
                raise ConfigError(
                    name, f"at most max_logprobs={most}", shown(wanted), "raise max_logprobs; -1 allows the whole vocabulary"
                )

    def check_priority(self, priority: int) -> None:
        """Check a priority. :raises ConfigError: if it is not an integer, or this engine runs requests in arrival order."""
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ConfigError("priority", "a whole number; lower ones are served first", repr(priority))
        if priority and not self.by_priority:
            raise ConfigError("priority", "0, because requests are served first come, first served", priority, _POLICY)
