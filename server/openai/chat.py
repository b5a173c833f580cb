"""Chats of a server: conversion of a chat's body to a prompt, and of outputs to answers of /v1/chat/completions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs

from headway.core.contract.errors import ConfigError, PromptError
from headway.core.contract.text_plugins import ChatPiece
from headway.core.engine.data.request_limits import CheckedRequest
from headway.outputs import CompletionOutput, RequestOutput
from headway.requests.chats import ChatReader, ChatText
from headway.requests.request_state import TextBytes, TokenBytes
from headway.requests.tool_use import ToolUse
from headway.server.openai.answers import Answer, ChunkedAnswer, chat_logprobs, extras, num_written, prompt_extras, usage
from headway.server.openai.params import chat_params, template_kwargs, tool_use
from headway.server.openai.requests import BatchChatRequest, ChatRequest, TokenizeRequest
from headway.server.service import Service

log = logging.getLogger("headway")


class ChatAnswer(ChunkedAnswer):
    """Writer of the answer to a ChatRequest."""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    around: ClassVar[tuple[str, str]] = ('"delta":{"content":', '},"logprobs":null')

    def __init__(self, body: ChatRequest, model: str, token_bytes: TokenBytes, name: str = "") -> None:
        """model, name: see `Answer`. token_bytes: bytes of the model's tokens."""
        super().__init__(body, model, bool(body.logprobs), name)
        self._most = body.top_logprobs or 0
        self._logprobs = bool(body.logprobs)
        self._token_bytes = token_bytes
        self.hides_special = True
        """True if special tokens are left out of texts."""
        self._text_bytes: dict[int, TextBytes] = {}  # index of a choice -> the bytes of its text
        self._includes_reasoning = body.include_reasoning
        last = body.messages[-1] if body.echo and body.messages else {}
        content = last.get("content") if last.get("role") == "assistant" or not body.add_generation_prompt else ""
        self._echo = content if isinstance(content, str) else ""
        self.make_reader: Callable[[], ChatReader | None] = lambda: None
        self._readers: dict[int, ChatReader | None] = {}  # index of a choice -> its text's parser; None if all text is content

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """Write the role, and the last message if the request asks for an echo."""
        choice = {"index": index, "delta": {"role": "assistant", "content": self._echo}, "logprobs": None, "finish_reason": None}
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output().prompt_token_ids
        return self.chunk([choice])

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        """Write the new part of a choice as events. A text that contains parts other than content takes one event per part."""
        reader = self._reader(index)
        if reader is None:
            return super().piece(index, new, used)
        pieces = self._read(reader, new)
        if self._plain and new.finish_reason is None and all(piece.kind == "content" for piece in pieces):
            text = "".join(piece.text for piece in pieces)
            return super().piece(index, CompletionOutput(index, text, new.token_ids), used) if text else b""
        deltas = [_delta(piece) for piece in pieces]
        if new.finish_reason is not None or not (deltas or self._plain):
            deltas.append({})  # for the fields that belong to tokens, not to a part of the text
        counted = None if used is None else usage([used], self.body)
        parts = [
            self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], counted)
            for delta in deltas[:-1]
        ]
        last = {**self._choice(index, new, self._finish_reason(new, reader)), "delta": deltas[-1]} if deltas else None
        return b"".join(parts) + (b"" if last is None else self.chunk([last], counted))

    def read(self, index: int, new: CompletionOutput) -> tuple[list[ChatPiece], str | None]:
        """Return the pieces of a completion's new text, and the completion's finish reason, which is None while the completion
        runs."""
        reader = self._reader(index)
        pieces = [ChatPiece("content", new.text)] * bool(new.text) if reader is None else self._read(reader, new)
        return pieces, self._finish_reason(new, reader)

    def choice(self, index: int, new: CompletionOutput) -> dict[str, Any]:
        return {
            **self._choice(index, new, new.finish_reason),
            "delta": {"content": new.text} if new.text or new.token_ids else {},
        }

    def _choice(self, index: int, new: CompletionOutput, reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {},
            "logprobs": self._logprobs_of(new),
            "finish_reason": reason,
            **extras(self.body, new),
        }

    def _reader(self, index: int) -> ChatReader | None:
        if index not in self._readers:
            self._readers[index] = self.make_reader()
        return self._readers[index]

    def _read(self, reader: ChatReader, new: CompletionOutput) -> list[ChatPiece]:
        """Return the pieces of a completion's new text, including the remaining pieces if the completion has ended."""
        pieces = reader.feed(new.text)
        if new.finish_reason is not None:
            pieces += reader.end()
            if reader.is_malformed:
                log.warning("%s: invalid tool call in the answer; it stays in the content", self.id)
            if reader.num_dropped:
                log.info("%s: dropped %d tool calls: the request allows one", self.id, reader.num_dropped)
        return [piece for piece in pieces if self._includes_reasoning or piece.kind != "reasoning"]

    @staticmethod
    def _finish_reason(new: CompletionOutput, reader: ChatReader | None) -> str | None:
        calls = reader is not None and reader.has_calls and new.finish_reason == "stop"
        return "tool_calls" if calls else new.finish_reason

    def _logprobs_of(self, new: CompletionOutput) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        text = self._text_bytes.get(new.index)
        if text is None:
            text = self._text_bytes[new.index] = TextBytes(self._token_bytes, self.hides_special)
        return chat_logprobs(new.logprobs or [], self._most, self.body.return_tokens_as_token_ids, text)

    def _message(self, new: CompletionOutput, reader: ChatReader | None) -> ChatCompletionMessage:
        found = ChatText.of([ChatPiece("content", new.text)] if reader is None else self._read(reader, new))
        fields: dict[str, Any] = dict.fromkeys(("reasoning", "reasoning_content"), found.reasoning or None)
        if found.calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in found.calls
            ]
        content = self._echo + found.content
        none = not content and (found.calls or found.reasoning)
        return ChatCompletionMessage(**{**fields, "role": "assistant", "content": None if none else content, "refusal": None})

    def choices(self, output: RequestOutput, more: Mapping[str, Any]) -> list[Choice]:
        """Return the choices of a finished output. more: fields that replace fields of the choice."""
        choices = []
        for new in output.outputs:
            listed, reader = self._logprobs_of(new), self._reader(new.index)
            fields = {
                "index": new.index,
                "message": self._message(new, reader),
                "logprobs": None if listed is None else ChoiceLogprobs.model_validate(listed),
                "finish_reason": self._finish_reason(new, reader),
            }
            choices.append(Choice(**{**fields, **extras(self.body, new), **more}))
        return choices

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        return _completion(self, self.choices(output, {}), outputs, prompt_extras(self.body, output))


class BatchChatAnswer(Answer):
    """Writer of the answer to a BatchChatRequest: one choice per conversation, with the conversation's index."""

    prefix = ChatAnswer.prefix

    def __init__(self, body: BatchChatRequest, model: str, token_bytes: TokenBytes, name: str = "") -> None:
        super().__init__(body, model, name)
        self.chats = [ChatAnswer(each, model, token_bytes, name) for each in body.chats]

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        pairs = zip(self.chats, outputs, strict=True)
        choices = [
            choice
            for number, (chat, output) in enumerate(pairs)
            for choice in chat.choices(output, {"index": number, **prompt_extras(self.body, output)})
        ]
        return _completion(self, choices, outputs, {})


def _completion(answer: Answer, choices: list[Choice], outputs: Sequence[RequestOutput], more: Mapping[str, Any]) -> bytes:
    fields = {"id": answer.id, "object": "chat.completion", "created": answer.created, "model": answer.model, **more}
    used = usage([(output, num_written(output)) for output in outputs], answer.body)
    return ChatCompletion(**{**fields, "choices": choices, "usage": used}).model_dump_json(exclude_unset=True).encode()


def _delta(piece: ChatPiece) -> dict[str, Any]:
    """Return a piece as OpenAI's delta. Reasoning is given under both of its field names."""
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "reasoning":
        return {"reasoning": piece.text, "reasoning_content": piece.text}
    if piece.kind == "call":
        begun = {"index": piece.call, "id": piece.id, "type": "function", "function": {"name": piece.text, "arguments": ""}}
        return {"tool_calls": [begun]}
    return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}


class Chats:
    """Preparation of the chats of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def answer(self, body: ChatRequest, name: str = "") -> ChatAnswer:
        """Return the answer writer of a chat; `prepare` sets its parser. name: see `Answer`."""
        return ChatAnswer(body, body.model or self._service.names[0], self._service.token_bytes, name)

    async def prompt(self, body: ChatRequest | TokenizeRequest, use: ToolUse) -> Any:
        """Return a chat as {"prompt": text, "prompt_token_ids": ids}. use: result of `tool_use`. :raises ConfigError: if the chat
        is invalid."""
        messages, tools = self._service.chat_format.conversation(body.messages or [], use)
        return await self._service.llm.chat_prompt(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=tools,
            chat_template=self._service.options.template_text,
            chat_template_kwargs=template_kwargs(body),
            split_special_tokens=self._service.splits(body.split_special_tokens),
        )

    async def prepare(self, body: ChatRequest, answer: ChatAnswer) -> Sequence[CheckedRequest]:
        """Check and tokenize a chat. :raises ConfigError: if a parameter is invalid or the conversation is too long."""
        params = chat_params(body, self._service.params_maker)
        end = self._service.template_end
        if end is not None and end not in self._service.llm.facts.eos_token_ids and not params.ignore_eos:
            params = replace(params, stop_token_ids=[*(params.stop_token_ids or ()), end])
        use, chats = tool_use(body), self._service.chat_format
        prompt = await self.prompt(body, use)
        formed = chats.params(params, use, prompt)
        if formed.structured_outputs is not None and params.structured_outputs is None:
            answer.is_structured = True
            answer.form_field = "tools"
        answer.hides_special = formed.skip_special_tokens
        answer.make_reader = partial(chats.reader, use, prompt["prompt"], params.skip_special_tokens)
        try:
            adapter = self._service.adapter_of(body.model)
            return await self._service.llm.check([prompt], formed, priority=body.priority, lora_request=adapter)
        except PromptError as error:  # the client's field has another name
            raise PromptError("messages", *error.reason[1:]) from None

    async def prepare_all(self, body: BatchChatRequest, answer: BatchChatAnswer) -> Sequence[CheckedRequest]:
        """Check and tokenize several chats. Raises the same errors as `prepare`; an error in a message has the conversation's
        index."""
        checked: list[CheckedRequest] = []
        for number, (chat, one) in enumerate(zip(body.chats, answer.chats, strict=True)):
            try:
                checked += await self.prepare(chat, one)
            except ConfigError as error:
                what, *reason = error.reason
                if what.partition(".")[0] != "messages":
                    raise
                raise ConfigError(what.replace("messages", f"messages.{number}", 1), *reason) from None
        return checked


SHARED_FIELDS: Final = (
    *("seed", "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "repetition_penalty", "min_tokens", "priority"),
    *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "bad_words"),
    *("structured_outputs", "split_special_tokens", "chat_template_kwargs", "truncate_prompt_tokens"),
    "cache_salt",
)
"""Fields of chats that the Messages and Responses APIs accept as extensions."""


def text_parts(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Return the content of a chat message: one text, or parts that are joined as the chat template requires."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


class ConvertedAnswer(Answer):
    """Converter of a chat's answer to a different API's format: the chat parses the text, and this class writes the result."""

    def __init__(self, chat: ChatAnswer, name: str = "") -> None:
        super().__init__(chat.body, chat.model, name)
        self.chat = chat

    def check_ended(self, new: CompletionOutput) -> None:
        self.chat.check_ended(new)
