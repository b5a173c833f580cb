"""The short way in: paths whose requests are answered by ASGI itself, past the routing and dependencies of FastAPI."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

log = logging.getLogger("headway")

App = Callable[[Any, Any, Any], Awaitable[None]]
Endpoint = Callable[[Request], Awaitable[Response]]


class Direct:
    """ASGI middleware. What FastAPI does before and around an endpoint takes longer than reading a request's body does, and of
    requests that arrive together the last waits for all others."""

    def __init__(
        self, app: App, endpoints: Mapping[str, Endpoint], refuse: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        """endpoints: path -> what answers its POSTs; FastAPI has them too, for its schema and for other paths before them (an
        application that is mounted). refuse: answers a request whose endpoint has raised."""
        self._app, self._endpoints, self._refuse = app, endpoints, refuse

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or pass it on."""
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except Exception as error:
            response = await self._refuse(request, error)
            if response.status_code == 500:  # nobody's mistake but ours
                log.error("a request has failed", exc_info=error)
        await response(scope, receive, send)
