"""Paths for those who run a server, by the names that vLLM's have: what it does now, and switches that all its clients feel."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from headway.core.contract.errors import HeadwayError
from headway.core.system.logs import log_traceback
from headway.core.system.text import shown
from headway.hosting.host import EngineDeadError
from headway.server.errors import ApiError
from headway.server.routing import add_posts, endpoint, read_body
from headway.server.service import Service


class AbortRequest(BaseModel):
    """The body of /abort_requests."""

    request_ids: list[str]
    """Ids of answers, as clients see them."""


class WorkerCall(BaseModel):
    """The body of /collective_rpc."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class OperatorRoutes:
    """The operator's routes; those that change something are 404 unless they are switched on."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._llm = service.llm

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        add_posts(
            app,
            ("/abort_requests", self.abort_requests, AbortRequest),
            ("/collective_rpc", self.collective_rpc, WorkerCall),
        )
        for method, path, answer in (
            ("GET", "/load", self.load),
            ("GET", "/tokenizer_info", self.tokenizer_info),
            ("GET", "/is_paused", self.is_paused),
            ("POST", "/pause", self.pause),
            ("POST", "/resume", self.resume),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("POST", "/sleep", self.sleep),
            ("POST", "/wake_up", self.wake_up),
            ("GET", "/is_sleeping", self.is_sleeping),
        ):
            app.add_api_route(path, endpoint(answer), methods=[method])

    async def load(self) -> Response:
        """Tell how many requests are being served, those that wait included."""
        return _json({"server_load": self._service.num_unsubmitted + self._llm.num_unfinished_requests})

    async def tokenizer_info(self) -> Response:
        """Tell what the tokenizer's configuration says, the chat template included."""
        tokenizer = self._llm.get_tokenizer()
        if tokenizer is None:
            raise ApiError(400, f"{self._llm.model.name} was loaded without a tokenizer")
        found = {"tokenizer_class": type(tokenizer).__name__, "chat_template": getattr(tokenizer, "chat_template", None)}
        given = getattr(tokenizer, "init_kwargs", {})
        return _json({**{name: _plain(value) for name, value in given.items() if not name.endswith("_file")}, **found})

    async def is_paused(self) -> Response:
        """Tell whether requests wait until the server goes on."""
        return _json({"is_paused": self._service.is_paused})

    async def pause(self, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True) -> Response:
        """Let no request begin, until /resume.

        mode: "abort" ends those that run; "wait" answers when they have ended. clear_cache: forget all prompts.
        """
        self._service.check_operator()
        await self._end_all(mode)
        if clear_cache and self._service.is_paused:
            await self._llm.reset_prefix_cache()
        return _json({"status": "paused"})

    async def _end_all(self, mode: str) -> None:
        """Pause, and wait until no request runs. mode: of `pause`."""
        if mode == "keep":
            raise ApiError(400, "mode: needs abort or wait, because steps are not stopped midway, got 'keep'", "mode")
        self._service.pause()
        if mode == "abort":
            await self._llm.abort(each for answer in list(self._service.running.values()) for each in answer.request_ids)
        await self._service.ended()

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> Response:
        """Give the memory of weights and cache back, until /wake_up; requests are refused meanwhile. See LLM.sleep.

        mode: as /pause has it.
        """
        self._service.check_operator()
        await self._end_all(mode)
        try:
            self._service.is_asleep = True
            await self._llm.sleep(level)
        except BaseException:
            self._service.is_asleep = await self._llm.is_sleeping()
            raise
        finally:
            self._service.resume()
        return Response()

    async def wake_up(self, tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Take the memory back: of weights, kv_cache or both."""
        self._service.check_operator()
        await self._llm.wake_up(tags)
        self._service.is_asleep = await self._llm.is_sleeping()
        return Response()

    async def is_sleeping(self) -> Response:
        """Tell whether the engine sleeps."""
        return _json({"is_sleeping": self._service.is_asleep})

    async def collective_rpc(self, request: Request) -> Response:
        """Call a method of the engine's worker, by its name; the results are texts where JSON has nothing for them."""
        self._service.check_operator()
        asked = await read_body(request, WorkerCall, self._service.options)
        if asked.method.startswith("_"):
            raise ApiError(400, f"method: needs a public name, got {shown(asked.method)}", "method")
        try:
            found = await self._llm.collective_rpc(asked.method, args=asked.args, kwargs=asked.kwargs)
        except (HeadwayError, EngineDeadError):
            raise
        except Exception as error:  # whatever a method raises, or a result that cannot leave the engine's process
            log_traceback(f"/collective_rpc: {asked.method}", error)
            raise ApiError(400, f"method: {asked.method} failed: {type(error).__name__}: {error}", "method") from error
        finally:
            self._service.is_asleep = await self._llm.is_sleeping()
        return _json({"results": [_plain(each) for each in found]})

    async def resume(self) -> Response:
        """Let requests begin again, those first that have waited."""
        self._service.check_operator()
        self._service.resume()
        return _json({"status": "resumed"})

    async def reset_prefix_cache(self) -> Response:
        """Forget the prompts that the cache holds."""
        self._service.check_operator()
        await self._llm.reset_prefix_cache()
        return Response()

    async def abort_requests(self, request: Request) -> Response:
        """End requests by the ids of their answers; an unknown one is left alone."""
        self._service.check_operator()
        asked = await read_body(request, AbortRequest, self._service.options)
        wanted, running = frozenset(asked.request_ids), list(self._service.running.values())
        await self._llm.abort(each for answer in running if answer.id in wanted for each in answer.request_ids)
        return Response()


def _plain(value: Any) -> Any:
    """A value as JSON has it; what is no plain one, such as a special token, as its text."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, int) and abs(value) >= 2**63:  # transformers' "no limit" is one
        return float(value)
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
