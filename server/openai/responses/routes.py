"""The routes of OpenAI's responses: asked for, told again, continued and forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headway.server.errors import ApiError
from headway.server.openai.chats import Chats
from headway.server.openai.reply import Reply
from headway.server.openai.responses.answer import ResponsesAnswer
from headway.server.openai.responses.requests import Item, ResponsesRequest
from headway.server.openai.responses.store import ResponseStore, StoredResponse
from headway.server.routing import Endpoint, add_posts, endpoint
from headway.server.service import Service


class ResponsesRoutes:
    """/v1/responses and what hangs below it."""

    def __init__(self, service: Service, chats: Chats) -> None:
        self._service = service
        self._chats = chats
        self.store = ResponseStore(service.options.max_stored_responses)

    @property
    def direct(self) -> dict[str, Endpoint]:
        """The paths whose first token a client waits for."""
        return {"/v1/responses": self.responses}

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        add_posts(app, ("/v1/responses", self.responses, ResponsesRequest))
        path = "/v1/responses/{response_id}"
        app.add_api_route(path, endpoint(self.stored), methods=["GET"])
        app.add_api_route(path, endpoint(self.forget), methods=["DELETE"])
        app.add_api_route(f"{path}/input_items", endpoint(self.input_items), methods=["GET"])
        app.add_api_route(f"{path}/cancel", endpoint(self.cancel), methods=["POST"])

    async def responses(self, request: Request) -> Response:
        """Answer a conversation."""
        self._service.check_room()
        asked = await self._service.read(request, ResponsesRequest)
        asked.check()
        before: Sequence[Item] = ()
        if asked.previous_response_id is not None:
            before = self.store.get(asked.previous_response_id, "previous_response_id").conversation
        chat = asked.chat(before)
        keep = partial(self._keep, before, asked.items) if asked.store is not False else _forget
        answer = ResponsesAnswer(self._chats.answer(chat), asked, self._service.default_params(), keep)
        return Reply(self._service, answer, partial(self._chats.prepare, chat, answer.chat), asked.ignored())

    def _keep(self, before: Sequence[Item], own: Sequence[Item], response: dict[str, Any]) -> None:
        self.store.put(StoredResponse(response, before, own))

    async def stored(self, response_id: str, stream: bool = False) -> Response:
        """Tell a stored response again."""
        if stream:
            raise ApiError(400, "stream: needs false, because the events of a response are not stored, got true", "stream")
        return _json(self.store.get(response_id).response)

    async def forget(self, response_id: str) -> Response:
        """Forget a stored response."""
        self.store.remove(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, response_id: str) -> Response:
        """Tell what a stored response was an answer to."""
        data = [{**each, "id": f"{response_id}-{number}"} for number, each in enumerate(self.store.get(response_id).input)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return _json({"object": "list", "data": data, **ends, "has_more": False})

    async def cancel(self, response_id: str) -> Response:
        """Refuse: responses end with their client's connection."""
        self.store.get(response_id)
        raise ApiError(400, "cancel: needs a response in the background, which this server has none of", "response_id")


def _forget(_: dict[str, Any]) -> None:
    """Keep nothing."""


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
