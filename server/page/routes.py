"""The web UI at `/`, which loads nothing from other servers, and its JSON data."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, partial
from importlib.resources import files
from typing import Annotated, Any, Final, Literal

import orjson
from fastapi import FastAPI, Query
from starlette.responses import Response

from headway.core.contract.metadata import Phase
from headway.core.engine.cache.usage import Occupancy
from headway.core.engine.execution.graph_set import as_run
from headway.core.engine.loop import EngineLoop
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector
from headway.hosting.driver import EngineDriver
from headway.server.errors import ApiError
from headway.server.routing import RouteGroup, answers
from headway.server.service import Service
from headway.version import __version__

MOST_SEQUENCES: Final = 48
"""Maximum number of sequences to list. Only the number of further sequences is shown."""
_TOTALS: Final = (
    *("num_steps", "num_graph_steps", "num_output_tokens", "num_prompt_tokens", "num_cached_tokens", "num_preemptions"),
    *("num_draft_tokens", "num_accepted_tokens", "blocks_offloaded", "offload_hits"),
)


class Choices:
    """Explains a selector's choices without affecting the choices for the engine's steps, for the group of layers of one kind
    that has the most layers."""

    def __init__(self, selector: Selector, device_type: str) -> None:
        self.selector = selector.main
        self.kind = next(kind for kind, each in selector.groups.items() if each is selector.main)
        self._device_type = device_type

    @cached_property
    def reasons(self) -> Mapping[Phase, dict[str, list[str]]]:
        """Phase -> backend -> reasons why the backend cannot run the phase; an empty list means it can. Computed once."""
        return {
            phase: {name: [str(reason) for reason in found] for name, found in self.selector.why_not(phase).items()}
            for phase in Phase
        }

    def look_up(self, shape: Shape) -> dict[str, Any]:
        """Return the measured time of each backend for a step, fastest first, from the measurements that `auto` uses.

        `backends`: the engine's candidates for the step, the default first. `ranking`: the times; empty without measurements.
        `covered`: whether the shape is within the measured grid. For a shape outside the grid, the nearest measured point
        decides.
        """
        shape = as_run(shape, self._device_type)
        costs, candidates = self.selector.costs, self.selector.candidates_for(shape.phase, shape.batch)
        ranking = [] if costs is None else costs.ranking(shape, dict.fromkeys([*candidates, *self._able(shape.phase)]))
        return {
            "phase": shape.phase.value,
            "batch": shape.batch,
            "query_len": shape.query_len,
            "kv_len": shape.kv_len,
            "backends": candidates,
            "ranking": [{"backend": name, "us": round(us, 2)} for name, us in ranking],
            "covered": costs is not None and costs.covers(shape),
        }

    def points(self, phase: Phase) -> list[dict[str, Any]]:
        """Return the measured points of a phase; a time is None if a backend was not measured."""
        selection, costs = self.selector.selection, self.selector.costs
        if costs is None:
            return []
        names = dict.fromkeys([selection.names[phase], *selection.others.get(phase, ()), *self._able(phase)])
        return [
            {
                "batch": shape.batch,
                "query_len": shape.query_len,
                "kv_len": shape.kv_len,
                "us": {name: round(us, 2) if math.isfinite(us := costs.step_us(name, shape)) else None for name in names},
            }
            for shape in costs.shapes(phase)
        ]

    def _able(self, phase: Phase) -> list[str]:
        return [name for name, found in self.reasons[phase].items() if not found]


def state_of(driver: EngineDriver, now: Occupancy, queued: int) -> dict[str, Any]:
    """Return the engine's statistics as plain data. queued: number of requests not yet passed to the engine. The values in
    `totals` only increase."""
    engine = now.engine
    decode = None
    if now.num_decoding:
        decode = explained(driver, Shape(Phase.DECODE, now.num_decoding, 1, max(now.num_decoding_tokens // now.num_decoding, 1)))
    steps = sorted(engine.totals.steps_by_phase.items())
    return {
        "time": engine.time,
        "running": engine.num_running,
        "waiting": engine.num_waiting + queued,
        "blocks": {
            "total": engine.num_blocks,
            "used": engine.num_used_blocks,
            "cached": engine.num_cached_blocks,
            "offloaded": engine.num_offloaded_blocks,
        },
        "totals": {name: getattr(engine.totals, name) for name in _TOTALS},
        "steps": [{"phase": phase, "backend": name, "steps": count} for (phase, name), count in steps],
        "decode": decode,
        "sequences": [each._asdict() for each in now.holdings],
        "num_sequences": now.num_holding,
    }


def choices_of(driver: EngineDriver) -> Choices:
    """Return the Choices of an engine, created at the first call."""
    found: Choices = driver.task_state.setdefault(
        "choices", Choices(driver.engine.executor.selector, driver.assembly.device.type)
    )
    return found


def explained(driver: EngineDriver, shape: Shape) -> dict[str, Any]:
    """Return Choices.look_up for an engine."""
    return choices_of(driver).look_up(shape)


def table_of(driver: EngineDriver) -> dict[str, Any]:
    """Return the backends chosen at start, the reasons against other backends, and the measured points for the chosen layout and
    block size. `plan` has the backends of every kind of layer; all else is about `kind`, which has the most layers."""
    choices = choices_of(driver)
    selection, costs = choices.selector.selection, choices.selector.costs
    return {
        "model": driver.assembly.model.name,
        "device": str(driver.assembly.device),
        "layout": selection.layout.name,
        "block_size": selection.block_size,
        "why": selection.why,
        "plan": [row._asdict() for row in driver.engine.executor.plan],
        "kind": choices.kind,
        "noise": None if costs is None else costs.noise,
        "layers": 0 if costs is None else sum(count for _, count in costs.parts),
        "phases": [
            {
                "phase": phase.value,
                "backends": [selection.names[phase], *selection.others.get(phase, ())],
                "refused": [{"backend": name, "reasons": why} for name, why in choices.reasons[phase].items() if why],
                "points": choices.points(phase),
            }
            for phase in Phase
        ],
    }


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
"""Path -> (file, media type). The files are the same for all users and need no API key; requests for the data need the key."""
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_FRESH: Final = 0.5  # Seconds for which all open pages share one reading of the engine
_Number = Annotated[int, Query(ge=1, le=2**31)]


class PageRoutes(RouteGroup):
    """Routes of the web UI and its data."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._llm = service.llm
        self._state: asyncio.Task[bytes] | None = None
        self._stale_at = 0.0
        self._table: bytes | None = None

    def add_to(self, app: FastAPI) -> None:
        """Add the routes and the files to an application."""
        super().add_to(app)
        folder = files(__package__)
        for path, (name, kind) in ASSETS.items():
            data = folder.joinpath(name).read_bytes()
            if name == "index.html":
                key = b"none" if self._service.options.api_key is None else b"required"
                data = data.replace(b'data-key=""', b'data-key="' + key + b'"')
            response = Response(data, headers=_HEADERS, media_type=f"{kind}; charset=utf-8")
            app.add_api_route(path, _asset(response), methods=["GET"], include_in_schema=False)

    @answers("GET", "/headway/state")
    async def state(self) -> Response:
        """Return the engine's current state: statistics, sequences, blocks, and why the decode backend was chosen."""
        clock = asyncio.get_running_loop().time
        if self._state is None or clock() >= self._stale_at:
            self._state = asyncio.ensure_future(self._read())
            self._stale_at = clock() + _FRESH
        return _json(await asyncio.shield(self._state))

    @answers("GET", "/headway/table")
    async def table(self) -> Response:
        """Return the backends chosen at start, the reasons against other backends, and the measured times that `auto` uses."""
        if self._table is None:
            found = await self._llm.run_task(table_of, concurrently=True)
            served = {"served_as": self._service.names, "sampling": self._service.recommended_sampling()}
            self._table = orjson.dumps({"version": __version__, **served, **found})
        return _json(self._table)

    @answers("GET", "/headway/explain")
    async def explain(
        self, phase: Literal["prefill", "extend", "decode"], batch: _Number = 1, query_len: _Number = 1, kv_len: _Number = 1
    ) -> Response:
        """Return each backend's time for a step of `batch` equal sequences, each with `query_len` new tokens and `kv_len` tokens
        in total."""
        shape = Shape(Phase(phase), batch, query_len, kv_len)
        if query_len > kv_len:
            raise ApiError(400, f"query_len: needs at most kv_len ({kv_len}) new tokens, got {query_len}", "query_len")
        if phase == "prefill" and query_len != kv_len:
            raise ApiError(400, f"query_len: needs kv_len ({kv_len}), since prefill has no cached tokens, got {query_len}")
        return _json(orjson.dumps(await self._llm.run_task(partial(explained, shape=shape), concurrently=True)))

    async def _read(self) -> bytes:
        now: Occupancy = await self._llm.query(partial(EngineLoop.occupancy, most=MOST_SEQUENCES))
        queued = self._service.num_unsubmitted
        return orjson.dumps(await self._llm.run_task(partial(state_of, now=now, queued=queued), concurrently=True))


def _asset(response: Response) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return response

    return answer


def _json(data: bytes) -> Response:
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(data, headers=headers, media_type="application/json")
