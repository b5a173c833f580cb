"""/start_profile and /stop_profile, as in vLLM's server: profiles of the engine's steps while it serves."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headway.core.system.json_text import parse_model
from headway.hosting.profiling import ProfileRequest, start_profile, stop_profile, write_trace
from headway.server.errors import ApiError
from headway.server.routing import endpoint, read_text
from headway.server.service import Service


class ProfileRoutes:
    """Routes that start and stop a profile; 404 unless a folder for traces is named, for a profile slows everybody down."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._llm = service.llm
        self._profiling = False
        self._turn = asyncio.Lock()
        """Held while a profile is started or stopped: the next begins when the trace of the last is written."""

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        schema = {"content": {"application/json": {"schema": ProfileRequest.model_json_schema()}}}
        app.add_api_route("/start_profile", endpoint(self.start), methods=["POST"], openapi_extra={"requestBody": schema})
        app.add_api_route("/stop_profile", endpoint(self.stop), methods=["POST"])

    async def start(self, request: Request) -> Response:
        """Start a profile. The body may be empty."""
        folder = self._folder()
        asked = parse_model(await read_text(request, self._service.options) or b"{}", ProfileRequest)
        async with self._turn:
            if self._profiling:
                raise ApiError(409, "a profile is being taken already; /stop_profile ends it")
            await self._llm.run_task(partial(start_profile, folder=folder, request=asked))
            self._profiling = True
        return Response(b"{}", media_type="application/json")

    async def stop(self) -> Response:
        """Stop the profile; the answer says where the time of a step went, and names the trace file."""
        self._folder()
        async with self._turn:
            if not self._profiling:
                raise ApiError(409, "no profile is being taken; /start_profile begins one")
            self._profiling = False
            found = await self._llm.run_task(stop_profile)
            found.trace = await self._llm.run_task(write_trace, concurrently=True)
        return Response(orjson.dumps(found.model_dump()), media_type="application/json")

    def _folder(self) -> Path:
        folder = self._service.options.profile_dir
        if folder is None:
            raise ApiError(404, "this server takes no profiles; start it with --profile-dir FOLDER")
        return folder
