"""Sampling parameters, prompts and tools from request bodies."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from io import BytesIO
from typing import Any, Final

from headway.core.contract.errors import ConfigError
from headway.core.sampling.guidance_notation import format_of
from headway.core.sampling.params import RequestOutputKind, SamplingParams
from headway.core.sampling.structured import StructuredOutputsParams, may_be_closed
from headway.core.system.text import shown
from headway.requests.tool_use import ToolUse
from headway.server.errors import ApiError
from headway.server.openai.requests import (
    MOST_PROMPTS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    SamplingRequest,
    TokenizeRequest,
)

_SAME: Final = tuple(
    each.name
    for each in fields(SamplingParams)
    if each.name in SamplingRequest.model_fields and each.name not in ("max_tokens", "structured_outputs")
)
"""Names of request fields that have the same name and meaning in SamplingParams."""
_COMPLETION_TOKENS: Final = 16  # default max_tokens of a completion in OpenAI's API


_REMEMBERED: Final = 256  # Number of cached parameter sets: clients repeat theirs, and checks are costly


class ParamsMaker:
    """Factory for request parameters, with the model's recommended parameters as defaults."""

    def __init__(self, default: SamplingParams) -> None:
        """default: values of fields that a request leaves out."""
        self._default = default
        self._remembered = lru_cache(_REMEMBERED)(lambda *given: replace(default, **dict(given)))

    def make(self, given: dict[str, Any]) -> SamplingParams:
        """Return parameters with the given field values. Equal values return the same object. :raises ConfigError: if a value is
        invalid."""
        items = tuple(given.items())
        try:
            hash(items)
        except TypeError:  # a value is a list
            return replace(self._default, **given)
        return self._remembered(*items)


def chat_params(body: ChatRequest, maker: ParamsMaker) -> SamplingParams:
    """Return the parameters of a chat. :raises ConfigError: if a value is invalid."""
    if body.top_logprobs and not body.logprobs:
        raise ConfigError("top_logprobs", "logprobs=true beside it", body.top_logprobs)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, maker, body.most_tokens, logprobs)  # no limit means until the answer ends or the context is full


def completion_params(body: CompletionRequest, maker: ParamsMaker) -> SamplingParams:
    """Return the parameters of a completion request. :raises ConfigError: if a value is invalid."""
    if body.suffix and body.echo:
        raise ConfigError("echo", "false beside suffix", "true")
    most = body.max_tokens
    if most == 0 and body.echo:  # only the prompt and its log-probabilities are wanted
        most = 1
    params = _params(body, maker, _COMPLETION_TOKENS if most is None else most, body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=body.logprobs)
    return params


def _params(body: SamplingRequest, maker: ParamsMaker, most: int | None, logprobs: int | None) -> SamplingParams:
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    best = body.best_of
    if body.stream and best is not None and best > (body.n or 1):
        raise ConfigError(
            "best_of", f"at most n={body.n or 1} with stream=true", best, "which is the best shows at the end alone"
        )
    if body.stream_options is not None and not body.stream:
        raise ConfigError("stream_options", "stream=true beside it", "stream=false")
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    if body.vllm_xargs is not None:
        given["extra_args"] = body.vllm_xargs
    form = _form(body)
    if form is not None:
        given["structured_outputs"] = form
    return maker.make({**given, "max_tokens": most, "logprobs": logprobs, "output_kind": kind})


def _form(body: SamplingRequest) -> StructuredOutputsParams | None:
    """Return the structured output that the request asks for, or None."""
    wanted, older = body.response_format, body.older_form
    if older and older.items() <= (body.structured_outputs or {}).items():  # vLLM's clients may send it under both names
        older = {}
    if older:
        if body.structured_outputs or (wanted is not None and wanted.type != "text"):
            raise ConfigError(f"guided_{next(iter(older))}", "no other form beside it", "another")
        return StructuredOutputsParams.of(older)
    if wanted is not None and wanted.type != "text":
        if body.structured_outputs:
            raise ConfigError("response_format", "no structured_outputs beside it", "both")
        if wanted.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if wanted.type == "structural_tag":
            return StructuredOutputsParams(structural_tag=_structural_tag(wanted.model_extra or {}))
        if wanted.json_schema is None:
            raise ConfigError("response_format.json_schema", "a schema", "none")
        schema: Any = wanted.json_schema.schema_
        closed = wanted.json_schema.strict is not False and may_be_closed(schema)
        return StructuredOutputsParams(json=schema, disable_additional_properties=closed)
    return StructuredOutputsParams.of(body.structured_outputs) if body.structured_outputs else None


def _structural_tag(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a structural tag after checking its outermost fields. :raises ConfigError: if the tag is invalid."""
    for name, need, kind in (("format", "an object", Mapping), ("structures", "a list", list), ("triggers", "a list", list)):
        if given.get(name) is not None and not isinstance(given[name], kind):
            raise ConfigError(f"response_format.{name}", need, shown(given[name], 60))
    for number, trigger in enumerate(given.get("triggers") or ()):
        if not isinstance(trigger, str) or not trigger:
            raise ConfigError(f"response_format.triggers.{number}", "a text that is not empty", shown(trigger, 60))
    try:
        format_of(given)
    except ValueError as error:
        raise ConfigError("response_format", "a structural tag", str(error)) from None
    return given


def prompts_of(body: CompletionRequest) -> list[Any]:
    """Return prompts as texts, token ids or embeddings. :raises ApiError: if there are no prompts, too many prompts, or invalid
    prompts."""
    given, embedded = body.prompt, body.prompt_embeds
    if given is None and not embedded:
        raise ApiError(400, "prompt: needs a text, token ids, or prompt_embeds in its place, got none", "prompt")
    prompts: list[Any] = [given] if isinstance(given, str) or not given or isinstance(given[0], int) else list(given)
    if embedded:
        if body.echo or body.suffix:
            raise ApiError(400, "prompt_embeds: needs no echo and no suffix, because the prompt has no text", "prompt_embeds")
        rows = [_read_embedded(each) for each in ([embedded] if isinstance(embedded, str) else embedded)]
        prompts = rows + (prompts if given else [])
    if len(prompts) * (body.best_of or body.n or 1) > MOST_PROMPTS:
        raise ApiError(400, f"prompt: needs at most {MOST_PROMPTS} completions in all, got {len(prompts)} prompts", "prompt")
    return prompts


def _read_embedded(text: str) -> dict[str, Any]:
    """Return a prompt of embeddings from base64. :raises ApiError: if the data is not a tensor written by torch.save."""
    import torch

    need = "prompt_embeds: needs base64 of torch.save(tensor), floating point [num_tokens, hidden_size]"
    try:
        content = b64decode(text, validate=True)
    except ValueError as error:
        raise ApiError(400, f"{need}, got text that is not base64", "prompt_embeds") from error
    try:
        tensor = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # pickle may raise anything; weights_only runs no code
        got = f"{len(content)} bytes in which torch.load(weights_only=True) finds no tensor"
        raise ApiError(400, f"{need}, got {got}", "prompt_embeds") from error
    dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_nested
    if dense and not tensor.is_contiguous():  # otherwise a few bytes could represent any number of rows
        got = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        raise ApiError(400, f"{need}, whose rows follow one another, got {got}", "prompt_embeds")
    return {"prompt_embeds": tensor}


def tool_use(body: ChatRequest) -> ToolUse:
    """Return a chat's tools and tool choice. :raises ConfigError: if the tools or the choice are invalid, or deprecated fields
    are used."""
    for field, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, field) is not None:
            raise ConfigError(field, f"{instead}, which OpenAI has put in its place", "the older field", f"use {instead}")
    return ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)


def template_kwargs(body: ChatRequest | TokenizeRequest | EmbeddingRequest) -> dict[str, Any]:
    """Return the chat template's arguments. :raises ConfigError: if the request has its own template, since a template could loop
    forever."""
    given = dict(body.chat_template_kwargs or {})
    if body.chat_template is not None or "chat_template" in given:
        raise ConfigError("chat_template", "the model's own", "another", "leave it out")
    documents = getattr(body, "documents", None)
    if documents is not None:
        given.setdefault("documents", documents)
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        given.setdefault("reasoning_effort", effort)
        if effort == "none":
            given.setdefault("enable_thinking", False)
    return given
