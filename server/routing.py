"""Request routing: a fast path that bypasses FastAPI, reading of bodies, and methods as endpoints."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakMethod

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from openai.types import Model
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headway.core.contract.errors import ConfigError
from headway.core.system.json_text import parse_json, parse_model
from headway.core.system.text import shown
from headway.hosting.host import EngineDeadError
from headway.server.errors import ApiError, api_error
from headway.server.options import ServerOptions
from headway.version import __version__

log = logging.getLogger("headway")

App = Callable[[Any, Any, Any], Awaitable[None]]
Endpoint = Callable[[Request], Awaitable[Response]]
_LONGEST_PATH: Final = 200  # Number of characters of an unknown path to compare with the known paths
Answer = TypeVar("Answer")
Body = TypeVar("Body", bound=BaseModel)
Marked = TypeVar("Marked", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class DirectMiddleware:
    """ASGI middleware that calls endpoints directly, without FastAPI's routing and dependencies.

    FastAPI's overhead per endpoint call exceeds the time to read a request's body, and it adds up for requests that arrive
    together.
    """

    app: App
    endpoints: Mapping[str, Endpoint]
    """Path -> endpoint for POST. FastAPI also has these endpoints, for its schema and for applications mounted at other paths."""
    refuse: Callable[[Request, Exception], Awaitable[Response]]
    """Function that returns the response for a request whose endpoint has raised an error."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        endpoint = self.endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await endpoint(request)
        except Exception as error:
            response = await self.refuse(request, error)
            if response.status_code == 500:  # a bug in the server
                log.error("server: a request failed", exc_info=error)
        await response(scope, receive, send)


def endpoint(method: Callable[..., Awaitable[Answer]]) -> Callable[..., Awaitable[Answer]]:
    """Return a function that calls a bound method without keeping the method's object alive.

    FastAPI caches endpoints in its module. A bound method in this cache would keep the engine, its weights and KV cache alive
    after the application is gone.
    """
    held = WeakMethod(method)

    async def answer(*arguments: Any, **named: Any) -> Answer:
        found = held()
        assert found is not None, "the application holds its routes"
        return await found(*arguments, **named)

    answer.__name__ = method.__name__
    answer.__doc__ = method.__doc__
    answer.__signature__ = inspect.signature(method, eval_str=True)  # type: ignore[attr-defined]
    return answer


class Route(NamedTuple):
    """Paths and properties of an endpoint; see `answers`."""

    method: str
    paths: tuple[str, ...]
    bodies: tuple[type[BaseModel], ...]
    required: bool
    direct: bool


def answers(
    method: str, paths: str | Collection[str], body: Sequence[type[BaseModel]] = (), required: bool = True, direct: bool = False
) -> Callable[[Marked], Marked]:
    """Mark a method of a `RouteGroup` as an endpoint. body: types of the request body, for the schema. direct: see
    `DirectMiddleware`."""

    def mark(function: Marked) -> Marked:
        listed = (paths,) if isinstance(paths, str) else tuple(paths)
        function.__dict__.setdefault("routes", []).append(Route(method, listed, tuple(body), required, direct))
        return function

    return mark


class RouteGroup:
    """Group of endpoints, which are the methods marked with `answers`."""

    def _marked(self) -> Iterator[tuple[Route, Callable[..., Awaitable[Response]]]]:
        for kind in type(self).__mro__:
            for name, function in vars(kind).items():
                for route in getattr(function, "routes", ()):
                    yield route, getattr(self, name)

    def posts(self, direct: bool = False) -> dict[str, Endpoint]:
        """Return path -> endpoint for POST. direct: True for only the latency-critical endpoints, which `DirectMiddleware`
        calls."""
        marked = [(route, method) for route, method in self._marked() if route.method == "POST" and route.direct >= direct]
        return {path: method for route, method in marked for path in route.paths}

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        for route, method in self._marked():
            extra: dict[str, Any] = {}
            if route.bodies:
                schemas = [each.model_json_schema() for each in route.bodies]
                schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
                extra["requestBody"] = {"content": {"application/json": {"schema": schema}}}
                extra["requestBody"] |= {"required": True} if route.required else {}
            for path in route.paths:
                shown = route.method != "HEAD"
                made = endpoint(method)
                app.add_api_route(path, made, methods=[route.method], openapi_extra=extra or None, include_in_schema=shown)


class CommonRoutes(RouteGroup):
    """Routes that every server has, and error responses. Subclasses define the routes for models, metrics and health."""

    def __init__(self, refused: Counter[str]) -> None:
        """refused: status -> number of error responses."""
        self.refused = refused
        self._started = int(time.time())

    def entry(self, name: str, root: str, max_model_len: int) -> dict[str, Any]:
        """Return the entry of /v1/models for a name of the model. root: the name by which the model was loaded."""
        model = Model(id=name, object="model", created=self._started, owned_by="headway")
        return {**model.model_dump(), "root": root, "max_model_len": max_model_len}

    @answers("GET", "/version")
    async def version(self) -> Response:
        """Return Headway's version."""
        return json_response({"version": __version__})

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Return the response to a request that failed before its admission."""
        told = api_error(path_error(request, error))
        self.refused[str(told.status)] += 1
        return told.response(request.scope["path"])

    def add_to(self, app: FastAPI) -> None:
        """Add the routes and the error handlers to an application."""
        super().add_to(app)
        for error in (HTTPException, RequestValidationError, Exception, ApiError, EngineDeadError, ConfigError, ValueError):
            app.add_exception_handler(error, self.refuse)  # pydantic's error is a ValueError


def json_response(data: object) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(data), media_type="application/json")


def replayed(request: Request, text: bytes) -> Request:
    """Return a request whose body, already read as `text`, can be read again."""
    unread = [{"type": "http.request", "body": text, "more_body": False}]

    async def receive() -> Any:
        return unread.pop() if unread else await request.receive()

    return Request(request.scope, receive)


async def read_body(request: Request, kind: type[Body], options: ServerOptions) -> Body:
    """Return the body as an object of `kind`. Raises the same errors as `read_text`. :raises JsonError: if the JSON or a number
    in it is invalid.
    :raises pydantic.ValidationError: if a field has a wrong type.
    """
    return parse_model(await read_text(request, options), kind)


async def read_text(request: Request, options: ServerOptions) -> bytes:
    """Return the body, read within `max_body_bytes` and `read_timeout`. :raises ApiError: if the body is too large, too slow or
    incomplete."""
    most = options.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise _too_large(most)
    parts, size = [], 0
    try:
        async with asyncio.timeout(options.read_timeout):
            async for part in request.stream():
                size += len(part)
                if size > most:  # a chunked body does not declare its length
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body has taken longer than {options.read_timeout:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has gone") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def fields_of(text: bytes) -> dict[str, Any]:
    """Return the fields of a body. :raises JsonError: if the body is not a JSON object."""
    found: dict[str, Any] = parse_json(text, "", dict)
    return found


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body: needs at most {most} bytes (max_body_bytes)", code="body_too_large")


def path_error(request: Request, error: Exception) -> Exception:
    """Return an error that suggests valid paths or methods if the path or method is unknown; else return `error` unchanged."""
    if not isinstance(error, HTTPException) or error.status_code not in (404, 405):
        return error
    scope = request.scope
    path, routes = str(scope["path"]), [each for each in scope["app"].routes if getattr(each, "methods", None)]
    if error.status_code == 405:
        methods = sorted({method for each in routes if each.path_regex.match(path) for method in each.methods})
        told = ApiError(405, f"{shown(path)}: needs {' or '.join(methods)}, got {shown(scope['method'], 20)}")
        told.headers["allow"] = ", ".join(methods)
        return told
    paths = dict.fromkeys(each.path.replace(":path}", "}") for each in routes)
    near = get_close_matches(path[:_LONGEST_PATH].lower(), paths, n=1, cutoff=0.3)
    hint = f"; the nearest is {near[0]}" if near else "; /openapi.json lists its paths"
    return ApiError(404, f"{shown(path)}: this server has no such path{hint}")
