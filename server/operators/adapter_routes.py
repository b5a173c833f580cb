"""Adapters of a server: by what names requests call them, and paths that load and unload them, by the names that vLLM's have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headway.core.contract.adapters import LoRARequest, check_name
from headway.core.system.text import shown
from headway.server.errors import ApiError
from headway.server.routing import add_posts, read_body
from headway.server.service import Service
from headway.server.unknown_fields import Fields


class LoadAdapterRequest(Fields):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    """What requests will name as their model."""
    lora_path: str
    """The folder that peft has written."""
    load_inplace: bool = False
    """Whether an adapter of this name is replaced; requests that use it go on with it."""


class UnloadAdapterRequest(Fields):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """Not needed: the name says which."""


class AdapterRoutes:
    """Loads adapters into a server, and takes them out of it; 404 unless the operator's paths are switched on."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._llm = service.llm
        self._numbers = max((each.lora_int_id for each in service.adapters.values()), default=0)
        self._loading: set[str] = set()

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        add_posts(
            app,
            ("/v1/load_lora_adapter", self.load, LoadAdapterRequest),
            ("/v1/unload_lora_adapter", self.unload, UnloadAdapterRequest),
        )

    async def load(self, request: Request) -> Response:
        """Read an adapter; requests may name it as their model once this has answered."""
        self._service.check_operator()
        asked = await read_body(request, LoadAdapterRequest, self._service.options)
        name, adapters = asked.lora_name, self._service.adapters
        check_name("lora_name", name)
        if name in self._service.names:
            raise ApiError(400, f"lora_name: needs a name of its own, got {shown(name)}, which is the model's", "lora_name")
        before = adapters.get(name)
        if name in self._loading or (before is not None and not asked.load_inplace):
            what = "is being loaded" if name in self._loading else "has been loaded already"
            hint = "unload it, or say load_inplace=true"
            raise ApiError(400, f"lora_name: the adapter {shown(name)} {what}; {hint}", "lora_name")
        self._loading.add(name)
        try:
            known = await self._llm.list_loras()  # a program may have given the engine numbers of its own
            self._numbers = max(self._numbers, *known, 0) + 1
            made = LoRARequest(name, self._numbers, asked.lora_path)
            await self._llm.add_lora(made)
        finally:
            self._loading.discard(name)
        adapters[name] = made
        if before is not None:
            await self._llm.remove_lora(before.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Forget an adapter; requests that have begun with it go on to their ends."""
        self._service.check_operator()
        asked = await read_body(request, UnloadAdapterRequest, self._service.options)
        known = self._service.adapters.pop(asked.lora_name, None)
        if known is None:
            raise ApiError(404, f"lora_name: this server has no adapter {shown(asked.lora_name)}", "lora_name", "model_not_found")
        await self._llm.remove_lora(known.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def models_of(adapters: Sequence[LoRARequest], parent: str, model: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of /v1/models for adapters, as vLLM lists them. model: makes the entry of a name."""
    return [{**model(each.lora_name), "root": each.lora_path, "parent": each.base_model_name or parent} for each in adapters]
