"""Routes for operators, with vLLM's names: load, adapters, pausing, sleeping and profiles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headway.core.contract.adapters import LoRARequest, check_name
from headway.core.contract.errors import HeadwayError
from headway.core.system.json_text import parse_model
from headway.core.system.logs import log_traceback
from headway.core.system.text import shown
from headway.hosting.host import EngineDeadError
from headway.hosting.profiling import ProfileRequest, start_profile, stop_profile, write_trace
from headway.server.errors import ApiError, Fields
from headway.server.routing import RouteGroup, answers, json_response, read_body, read_text
from headway.server.service import Service


class LoadAdapterRequest(Fields):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    """Name that requests use as their model."""
    lora_path: str
    """Folder in peft's format."""
    load_inplace: bool = False
    """True to replace an adapter of this name; running requests keep using the old adapter."""


class UnloadAdapterRequest(Fields):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """Ignored: `lora_name` identifies the adapter."""


class AdapterRoutes(RouteGroup):
    """Loads and unloads adapters. Routes return 404 unless operator paths are enabled."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._llm = service.llm
        self._numbers = max((each.lora_int_id for each in service.adapters.values()), default=0)
        self._loading: set[str] = set()

    @answers("POST", "/v1/load_lora_adapter", body=[LoadAdapterRequest])
    async def load(self, request: Request) -> Response:
        """Load an adapter. Requests may use it as their model after this response."""
        self._service.check_operator()
        parsed = await read_body(request, LoadAdapterRequest, self._service.options)
        name, adapters = parsed.lora_name, self._service.adapters
        check_name("lora_name", name)
        if name in self._service.names:
            raise ApiError(400, f"lora_name: needs a name of its own, got {shown(name)}, which is the model's", "lora_name")
        before = adapters.get(name)
        if name in self._loading or (before is not None and not parsed.load_inplace):
            what = "is being loaded" if name in self._loading else "has been loaded already"
            hint = "unload it, or say load_inplace=true"
            raise ApiError(400, f"lora_name: the adapter {shown(name)} {what}; {hint}", "lora_name")
        self._loading.add(name)
        try:
            known = await self._llm.list_loras()  # other code may have added adapters with numbers of its choice
            self._numbers = max([self._numbers, *known]) + 1
            made = LoRARequest(name, self._numbers, parsed.lora_path)
            await self._llm.add_lora(made)
        finally:
            self._loading.discard(name)
        adapters[name] = made
        if before is not None:
            await self._llm.remove_lora(before.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @answers("POST", "/v1/unload_lora_adapter", body=[UnloadAdapterRequest])
    async def unload(self, request: Request) -> Response:
        """Unload an adapter; running requests keep using it."""
        self._service.check_operator()
        parsed = await read_body(request, UnloadAdapterRequest, self._service.options)
        known = self._service.adapters.pop(parsed.lora_name, None)
        if known is None:
            raise ApiError(
                404, f"lora_name: this server has no adapter {shown(parsed.lora_name)}", "lora_name", "model_not_found"
            )
        await self._llm.remove_lora(known.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{parsed.lora_name}' removed successfully.")


def models_of(adapters: Sequence[LoRARequest], parent: str, model: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries of /v1/models for adapters, in vLLM's format. model: function that returns the entry for a name."""
    return [{**model(each.lora_name), "root": each.lora_path, "parent": each.base_model_name or parent} for each in adapters]


class ProfileRoutes(RouteGroup):
    """Starts and stops profiles. Routes return 404 without a folder for traces, since a profile slows down all requests."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._llm = service.llm
        self._profiling = False
        # held while a profile starts or stops, so that a new one starts only after the last trace is written
        self._lock = asyncio.Lock()

    @answers("POST", "/start_profile", body=[ProfileRequest], required=False)
    async def start(self, request: Request) -> Response:
        """Start a profile. The body may be empty."""
        folder = self._folder()
        parsed = parse_model(await read_text(request, self._service.options) or b"{}", ProfileRequest)
        async with self._lock:
            if self._profiling:
                raise ApiError(409, "a profile is being taken already; /stop_profile ends it")
            await self._llm.run_task(partial(start_profile, folder=folder, request=parsed))
            self._profiling = True
        return json_response({})

    @answers("POST", "/stop_profile")
    async def stop(self) -> Response:
        """Stop the profile. Return a breakdown of the step time and the path of the trace."""
        self._folder()
        async with self._lock:
            if not self._profiling:
                raise ApiError(409, "no profile is being taken; /start_profile begins one")
            self._profiling = False
            found = await self._llm.run_task(stop_profile)
            found.trace = await self._llm.run_task(write_trace, concurrently=True)
        return json_response(found.model_dump())

    def _folder(self) -> Path:
        folder = self._service.options.profile_dir
        if folder is None:
            raise ApiError(404, "this server takes no profiles; start it with --profile-dir FOLDER")
        return folder


class AbortRequest(BaseModel):
    """The body of /abort_requests."""

    request_ids: list[str]
    """Ids of answers, as returned to clients."""


class WorkerCall(BaseModel):
    """The body of /collective_rpc."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class OperatorRoutes(RouteGroup):
    """Engine control. Routes that change something return 404 unless operator paths are enabled."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._llm = service.llm

    @answers("GET", "/load")
    async def load(self) -> Response:
        """Return the number of requests in the server, including waiting ones."""
        return json_response({"server_load": self._service.num_unsubmitted + self._llm.num_unfinished_requests})

    @answers("GET", "/tokenizer_info")
    async def tokenizer_info(self) -> Response:
        """Return the tokenizer's configuration, including the chat template."""
        tokenizer = self._llm.get_tokenizer()
        if tokenizer is None:
            raise ApiError(400, f"{self._llm.model.name} was loaded without a tokenizer")
        found = {"tokenizer_class": type(tokenizer).__name__, "chat_template": getattr(tokenizer, "chat_template", None)}
        given = getattr(tokenizer, "init_kwargs", {})
        return json_response({**{name: _plain(value) for name, value in given.items() if not name.endswith("_file")}, **found})

    @answers("GET", "/is_paused")
    async def is_paused(self) -> Response:
        """Return whether new requests wait for /resume."""
        return json_response({"is_paused": self._service.is_paused})

    @answers("POST", "/pause")
    async def pause(self, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True) -> Response:
        """Hold back new requests until /resume. mode: "abort" ends running requests; "wait" waits until they have ended; "keep"
        is rejected.
        clear_cache: True to forget all cached prompts."""
        self._service.check_operator()
        await self._end_all(mode)
        if clear_cache and self._service.is_paused:
            await self._llm.reset_prefix_cache()
        return json_response({"status": "paused"})

    async def _end_all(self, mode: str) -> None:
        if mode == "keep":
            raise ApiError(400, "mode: needs abort or wait, because steps are not stopped midway, got 'keep'", "mode")
        self._service.pause()
        if mode == "abort":
            await self._llm.abort(each for answer in list(self._service.running.values()) for each in answer.request_ids)
        await self._service.ended()

    @answers("POST", "/sleep")
    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> Response:
        """Free the memory of weights and KV cache until /wake_up, rejecting requests. See LLM.sleep. mode: see /pause."""
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

    @answers("POST", "/wake_up")
    async def wake_up(self, tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Allocate the freed memory again. tags: weights, kv_cache or both."""
        self._service.check_operator()
        await self._llm.wake_up(tags)
        self._service.is_asleep = await self._llm.is_sleeping()
        return Response()

    @answers("GET", "/is_sleeping")
    async def is_sleeping(self) -> Response:
        """Return whether the engine sleeps."""
        return json_response({"is_sleeping": self._service.is_asleep})

    @answers("POST", "/collective_rpc", body=[WorkerCall])
    async def collective_rpc(self, request: Request) -> Response:
        """Call a method of the engine's worker by name. Results that JSON cannot represent are returned as text."""
        self._service.check_operator()
        parsed = await read_body(request, WorkerCall, self._service.options)
        if parsed.method.startswith("_"):
            raise ApiError(400, f"method: needs a public name, got {shown(parsed.method)}", "method")
        try:
            found = await self._llm.collective_rpc(parsed.method, args=parsed.args, kwargs=parsed.kwargs)
        except (HeadwayError, EngineDeadError):
            raise
        except Exception as error:  # any error of the method, or a result that cannot be sent between processes
            log_traceback(f"/collective_rpc: {parsed.method}", error)
            raise ApiError(400, f"method: {parsed.method} failed: {type(error).__name__}: {error}", "method") from error
        finally:
            self._service.is_asleep = await self._llm.is_sleeping()
        return json_response({"results": [_plain(each) for each in found]})

    @answers("POST", "/resume")
    async def resume(self) -> Response:
        """Let requests continue, waiting requests first."""
        self._service.check_operator()
        self._service.resume()
        return json_response({"status": "resumed"})

    @answers("POST", "/reset_prefix_cache")
    async def reset_prefix_cache(self) -> Response:
        """Forget all cached prompts."""
        self._service.check_operator()
        await self._llm.reset_prefix_cache()
        return Response()

    @answers("POST", "/abort_requests", body=[AbortRequest])
    async def abort_requests(self, request: Request) -> Response:
        """End requests by the ids of their answers; unknown ids are ignored."""
        self._service.check_operator()
        parsed = await read_body(request, AbortRequest, self._service.options)
        wanted, running = frozenset(parsed.request_ids), list(self._service.running.values())
        await self._llm.abort(each for answer in running if answer.id in wanted for each in answer.request_ids)
        return Response()


def _plain(value: Any) -> Any:
    """Return a value for JSON. Values that JSON cannot represent, such as special tokens, become text."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, int) and abs(value) >= 2**63:  # such as transformers' "no limit"
        return float(value)
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
