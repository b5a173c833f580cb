"""The routes of Anthropic's API."""

from __future__ import annotations

from functools import partial

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headway.server.anthropic.answer import MessagesAnswer
from headway.server.anthropic.requests import MessagesRequest, TokenCountRequest
from headway.server.openai.chats import Chats
from headway.server.openai.params import tool_use
from headway.server.openai.reply import Reply
from headway.server.openai.requests import ChatRequest
from headway.server.request_ids import request_name
from headway.server.routing import Endpoint, add_posts
from headway.server.service import Service


class MessagesRoutes:
    """/v1/messages, and the count of its tokens."""

    def __init__(self, service: Service, chats: Chats) -> None:
        self._service = service
        self._chats = chats

    @property
    def direct(self) -> dict[str, Endpoint]:
        """The paths whose first token a client waits for."""
        return {"/v1/messages": self.messages}

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        add_posts(
            app,
            ("/v1/messages", self.messages, MessagesRequest),
            ("/v1/messages/count_tokens", self.count_tokens, TokenCountRequest),
        )

    async def messages(self, request: Request) -> Response:
        """Answer a conversation."""
        self._service.check_room()
        body = await self._service.read(request, MessagesRequest)
        chat = body.chat()
        answer = MessagesAnswer(self._chats.answer(chat), request_name(request))
        return Reply(self._service, answer, partial(self._chats.prepare, chat, answer.chat), body.unknown())

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation in the model's template."""
        body = await self._service.read(request, TokenCountRequest)
        chat = ChatRequest(**body.fields())
        prompt = await self._chats.prompt(chat, tool_use(chat))
        return Response(orjson.dumps({"input_tokens": len(prompt["prompt_token_ids"])}), media_type="application/json")
