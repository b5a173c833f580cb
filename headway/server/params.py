"""From the body of a request to the engine's parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import orjson

from headway.core.contract.errors import ConfigError
from headway.core.sampling.params import RequestOutputKind, SamplingParams
from headway.core.sampling.structured import StructuredOutputsParams
from headway.server.errors import ApiError
from headway.server.requests import MOST_PROMPTS, ChatRequest, CompletionRequest, SamplingRequest, TokenizeRequest

_SAME: Final = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "prompt_logprobs",
)
"""Fields of the same name and meaning in SamplingParams."""
_TEMPLATE_OPTIONS: Final = frozenset(("chat_template", "tokenize", "return_tensors", "return_dict", "padding", "truncation"))
"""Options of transformers' apply_chat_template that are no business of a request."""
_COMPLETION_TOKENS: Final = 16
"""Of a completion that does not say how many, as in OpenAI's API."""


_REMEMBERED: Final = 256
"""Sets of parameters. Most clients ask for the same ones again and again, and checking them is a fifth of admitting a request."""


class ParamsMaker:
    """Makes the parameters of requests over those of the model."""

    def __init__(self, default: SamplingParams) -> None:
        """default: where a request says nothing."""
        self._default = default
        self._remembered = lru_cache(_REMEMBERED)(lambda *given: replace(default, **dict(given)))

    def make(self, given: dict[str, Any]) -> SamplingParams:
        """The parameters with these fields. Pydantic has given each its type, so that equal values are the same value.

        :raises ConfigError: a value that cannot work.
        """
        items = tuple(given.items())
        try:
            hash(items)
        except TypeError:  # a list among them
            return replace(self._default, **given)
        return self._remembered(*items)


def chat_params(asked: ChatRequest, maker: ParamsMaker) -> SamplingParams:
    """The parameters of a chat.

    :raises ConfigError: a value that cannot work.
    """
    if asked.top_logprobs and not asked.logprobs:
        raise ConfigError("top_logprobs", "logprobs=true beside it", asked.top_logprobs)
    most = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    return _params(asked, maker, most, logprobs)  # no limit: until the answer ends or there is no room left


def completion_params(asked: CompletionRequest, maker: ParamsMaker) -> SamplingParams:
    """The parameters of completions; likewise."""
    if asked.suffix:
        raise ConfigError("suffix", "none, because models continue texts", repr(asked.suffix[:40]))
    most = asked.max_tokens
    if most == 0 and asked.echo:  # the prompt and its log-probabilities are all that is wanted
        most = 1
    params = _params(asked, maker, _COMPLETION_TOKENS if most is None else most, asked.logprobs)
    if asked.echo and asked.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=asked.logprobs)
    return params


def _params(asked: SamplingRequest, maker: ParamsMaker, most: int | None, logprobs: int | None) -> SamplingParams:
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(asked, name)) is not None}
    best = asked.best_of
    if asked.stream and best is not None and best > (asked.n or 1):
        raise ConfigError(
            "best_of", f"at most n={asked.n or 1} with stream=true", best, "which is the best shows at the end alone"
        )
    if asked.stream_options is not None and not asked.stream:
        raise ConfigError("stream_options", "stream=true beside it", "stream=false")
    kind = RequestOutputKind.DELTA if asked.stream else RequestOutputKind.FINAL_ONLY
    form = _form(asked)
    if form is not None:
        given["structured_outputs"] = form
    return maker.make({**given, "max_tokens": most, "logprobs": logprobs, "output_kind": kind})


def _form(asked: SamplingRequest) -> StructuredOutputsParams | None:
    """What the completion must look like."""
    wanted = asked.response_format
    if wanted is not None and wanted.type != "text":
        if asked.structured_outputs:
            raise ConfigError("response_format", "no structured_outputs beside it", "both")
        if wanted.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if wanted.json_schema is None:
            raise ConfigError("response_format.json_schema", "a schema", "none")
        return StructuredOutputsParams(json=wanted.json_schema.schema_)  # type: ignore[arg-type]
    return StructuredOutputsParams(**asked.structured_outputs) if asked.structured_outputs else None


def prompts_of(asked: CompletionRequest) -> list[Any]:
    """The prompts of a request for completions, each a text or a list of token ids.

    :raises ApiError: there are too many.
    """
    given = asked.prompt
    prompts: list[Any] = [given] if isinstance(given, str) or not given or isinstance(given[0], int) else list(given)
    if len(prompts) * (asked.best_of or asked.n or 1) > MOST_PROMPTS:
        raise ApiError(400, f"prompt: needs at most {MOST_PROMPTS} completions in all, got {len(prompts)} prompts", "prompt")
    return prompts


def messages_of(asked: ChatRequest, template: object) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as a chat template reads them. template: the model's, as a text.

    :raises ConfigError: tools that the template does not know, or that must be called.
    """
    tools = asked.tools if asked.tool_choice != "none" else None
    if tools and asked.tool_choice not in (None, "auto"):
        need = "auto or none, because calls come as the text in which the model writes them"
        raise ConfigError("tool_choice", need, repr(asked.tool_choice))
    if tools and "tools" not in str(template):
        raise ConfigError("tools", "a model whose chat template has tools", "one that has none", "leave them out")
    return [_message(each) for each in asked.messages], tools or None


def template_kwargs(asked: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """What a request tells the chat template beside its messages.

    :raises ConfigError: a template of the caller's own: a program that may run for ever.
    """
    given = asked.chat_template_kwargs or {}
    if asked.chat_template is not None or not given.keys().isdisjoint(_TEMPLATE_OPTIONS):
        raise ConfigError("chat_template", "the model's own", "another, or an option of its rendering", "leave it out")
    return given


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content may be null, if it calls tools, with their arguments as objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                call = {**call, "function": {**function, "arguments": orjson.loads(function["arguments"])}}
            except ValueError:
                raise ConfigError("messages", "tool calls whose arguments are JSON", repr(function["arguments"][:60])) from None
        read.append(call)
    return {**message, "content": message.get("content") or "", "tool_calls": read}
