"""From what a caller passes to requests that an engine takes: parsed, tokenised and checked before anything is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headway.asked import default_params, params_of, resolve
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.engine.limits import PromptLimits
from headway.core.sampling.params import RequestOutputKind, SamplingParams
from headway.prompts import Message, ParsedPrompt, Prompt, chat_prompt, parse_prompts, whole_text

_AT_ONCE = 8
"""Prompts that are checked without a thread, if they are short."""
_SHORT = 4096
"""Token ids of a short prompt, which are checked in less than 50 us."""


class TextModel(Protocol):
    """What is to be known of a model where texts are read and made."""

    @property
    def name(self) -> str:
        """By which it was loaded."""

    @property
    def folder(self) -> Path:
        """Its files."""

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer; None: token ids in, token ids out."""


class CheckedRequest(NamedTuple):
    """A prompt and its parameters that the engine will take."""

    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    params: SamplingParams
    """As the caller gave them."""
    resolved: SamplingParams
    """As the engine reads them."""


class Intake:
    """Checks the requests of one engine. Any thread may call it, several at a time."""

    def __init__(self, model: TextModel, limits: PromptLimits) -> None:
        self.model, self.tokenizer, self.limits = model, model.tokenizer, limits

    def check(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[CheckedRequest]:
        """See `LLM.generate`.

        :raises PromptError: an empty or too long prompt.
        :raises ConfigError: a parameter that cannot work.
        """
        items = parse_prompts(prompts)
        params = params_of(sampling_params, len(items), self.default_params())
        encoded = [self._encode(item, number, own) for number, (item, own) in enumerate(zip(items, params, strict=True))]
        resolved = {id(own): self._resolve(own) for own in params}  # most calls share one
        return [
            CheckedRequest(item.text, ids, own, resolved[id(own)]) for item, ids, own in zip(items, encoded, params, strict=True)
        ]

    def chat_prompt(self, messages: str | Sequence[Message], **options: Any) -> Prompt:
        """See `prompts.chat_prompt`."""
        return chat_prompt(self.tokenizer, self.model.name, messages, **options)

    def default_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends."""
        return self._default_params

    @cached_property
    def _default_params(self) -> SamplingParams:
        return default_params(self.model.folder)

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        resolved = resolve(params, self.tokenizer, self.model.name)
        self.limits.check_params(resolved)
        return resolved

    def _encode(self, prompt: ParsedPrompt, number: int, params: SamplingParams) -> list[int]:
        try:
            ids = self._tokenize(prompt.text or "") if prompt.token_ids is None else prompt.token_ids
            ids = ids[-(params.truncate_prompt_tokens or 0) :]
            self.limits.check(ids)
        except PromptError as error:
            raise PromptError(f"prompt {number}", *error.reason[1:]) from None
        return ids

    def _tokenize(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise PromptError("prompt", "token ids", "a text", f"{self.model.name} was loaded without a tokenizer")
        return list(self.tokenizer(whole_text(prompt))["input_ids"])


def quickly_checked(prompts: object) -> bool:
    """Whether prompts are a list of a few that bring their token ids, and few of them: a thread would take longer to wake."""
    return isinstance(prompts, list) and len(prompts) <= _AT_ONCE and all(map(_short, prompts))


def _short(prompt: object) -> bool:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    return isinstance(ids, list) and 0 < len(ids) <= _SHORT and isinstance(ids[0], int)


def template_options(
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What `chat` takes beside messages, as `prompts.chat_prompt` reads it."""
    return {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template": chat_template,
        "tools": tools,
        **(chat_template_kwargs or {}),
    }


def check_streamed(params: SamplingParams) -> None:
    """Check that completions can be shown as they grow.

    :raises ConfigError: best_of is larger than n, for which completion is returned shows at the end alone.
    """
    if params.num_drawn > params.n and params.output_kind is not RequestOutputKind.FINAL_ONLY:
        raise ConfigError("best_of", f"None or n={params.n} in a stream", params.best_of, "or output_kind=FINAL_ONLY")
