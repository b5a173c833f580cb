"""How a chat becomes a request of the engine, whichever API it came by, and what writes its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headway.core.contract.errors import ConfigError, PromptError
from headway.core.engine.data.request_limits import CheckedRequest
from headway.requests.tool_use import ToolUse
from headway.server.openai.chat import BatchChatAnswer, ChatAnswer
from headway.server.openai.params import chat_params, template_kwargs, tool_use
from headway.server.openai.requests import BatchChatRequest, ChatRequest, TokenizeRequest
from headway.server.service import Service


class Chats:
    """The chats of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def answer(self, body: ChatRequest, name: str = "") -> ChatAnswer:
        """What writes the answer to a chat; `prepare` tells it how to read. name: see `Answer`."""
        return ChatAnswer(body, body.model or self._service.names[0], self._service.token_bytes, name)

    async def prompt(self, body: ChatRequest | TokenizeRequest, use: ToolUse) -> Any:
        """A chat's conversation in the model's template, as {"prompt": text, "prompt_token_ids": ids}. use: see `tool_use`.

        :raises ConfigError: messages or tools that the model's format does not have.
        """
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
        """Check a chat and tokenise its conversation.

        :raises ConfigError: a parameter that cannot work, or a conversation that is too long.
        """
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
        answer.read_with(partial(chats.reader, use, prompt["prompt"], params.skip_special_tokens))
        try:
            adapter = self._service.adapter_of(body.model)
            return await self._service.llm.check([prompt], formed, priority=body.priority, lora_request=adapter)
        except PromptError as error:  # which the client knows by another name
            raise PromptError("messages", *error.reason[1:]) from None

    async def prepare_all(self, body: BatchChatRequest, answer: BatchChatAnswer) -> Sequence[CheckedRequest]:
        """Check several chats and tokenise their conversations.

        :raises ConfigError: see `prepare`; the error of a conversation names its place.
        """
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
