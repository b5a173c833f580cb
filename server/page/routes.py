"""The web UI at `/`, which needs no network but this server, and its data."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib.resources import files
from typing import Annotated, Final, Literal

import orjson
from fastapi import FastAPI, Query
from starlette.responses import Response

from headway.core.contract.metadata import Phase
from headway.core.engine.loop import Occupancy, occupancy
from headway.core.select.costs import Shape
from headway.server.errors import ApiError
from headway.server.page.live import MOST_SEQUENCES, explained, state_of, table_of
from headway.server.routing import endpoint
from headway.server.service import Service
from headway.version import __version__

ASSETS: Final = {
    "/": ("index.html", "text/html"),
    "/headway/page/page.css": ("page.css", "text/css"),
    "/headway/page/main.js": ("main.js", "text/javascript"),
    "/headway/page/chat.js": ("chat.js", "text/javascript"),
    "/headway/page/live.js": ("live.js", "text/javascript"),
    "/headway/page/cache.js": ("cache.js", "text/javascript"),
    "/headway/page/table.js": ("table.js", "text/javascript"),
    "/headway/page/dom.js": ("dom.js", "text/javascript"),
}
"""Path -> file, media type. The files are the same for everybody and need no API key; the data do."""
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_FRESH: Final = 0.5
"""Seconds for which one reading of the engine serves every page that is open."""
_Number = Annotated[int, Query(ge=1, le=2**31)]


class PageRoutes:
    """The routes of the web UI."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._llm = service.llm
        self._state: asyncio.Task[bytes] | None = None
        self._stale_at = 0.0
        self._table: bytes | None = None

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        folder = files(__package__)
        for path, (name, kind) in ASSETS.items():
            data = folder.joinpath(name).read_bytes()
            if name == "index.html":
                key = b"none" if self._service.options.api_key is None else b"required"
                data = data.replace(b'data-key=""', b'data-key="' + key + b'"')
            app.add_api_route(path, _Asset(data, kind).answer, methods=["GET"], include_in_schema=False)
        for path, answer in (("/headway/state", self.state), ("/headway/table", self.table), ("/headway/explain", self.explain)):
            app.add_api_route(path, endpoint(answer), methods=["GET"])

    async def state(self) -> Response:
        """The engine at this moment: figures, sequences and their blocks, and why this backend serves decode."""
        clock = asyncio.get_running_loop().time
        if self._state is None or clock() >= self._stale_at:
            self._state = asyncio.ensure_future(self._read())
            self._stale_at = clock() + _FRESH
        return _json(await asyncio.shield(self._state))

    async def table(self) -> Response:
        """The choice made at start, why other backends were not taken, and the measured times that `auto` uses."""
        if self._table is None:
            found = await self._llm.run_task(table_of, concurrently=True)
            served = {"served_as": self._service.names, "sampling": self._service.recommended_sampling()}
            self._table = orjson.dumps({"version": __version__, **served, **found})
        return _json(self._table)

    async def explain(
        self, phase: Literal["prefill", "extend", "decode"], batch: _Number = 1, query_len: _Number = 1, kv_len: _Number = 1
    ) -> Response:
        """Each backend's time for a step of `batch` equal sequences, each of `query_len` new and `kv_len` tokens in all."""
        shape = Shape(Phase(phase), batch, query_len, kv_len)
        if query_len > kv_len:
            raise ApiError(400, f"query_len: needs at most kv_len ({kv_len}) new tokens, got {query_len}", "query_len")
        if phase == "prefill" and query_len != kv_len:
            raise ApiError(400, f"query_len: needs kv_len ({kv_len}), since prefill has no cached tokens, got {query_len}")
        return _json(orjson.dumps(await self._llm.run_task(partial(explained, shape=shape), concurrently=True)))

    async def _read(self) -> bytes:
        now: Occupancy = await self._llm.query(partial(occupancy, most=MOST_SEQUENCES))
        queued = self._service.num_unsubmitted
        return orjson.dumps(await self._llm.run_task(partial(state_of, now=now, queued=queued), concurrently=True))


class _Asset:
    """A file of the web UI."""

    def __init__(self, data: bytes, kind: str) -> None:
        self._response = Response(data, headers=_HEADERS, media_type=f"{kind}; charset=utf-8")

    async def answer(self) -> Response:
        """Answer with the file."""
        return self._response


def _json(data: bytes) -> Response:
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(data, headers=headers, media_type="application/json")
