"""Adapters of an engine that runs in a thread or a process: read beside its steps, and told of between two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TypeVar

from headway.core.contract.adapters import LoRARequest
from headway.core.engine.loop import EngineLoop
from headway.hosting.driver import EngineDriver
from headway.hosting.host import EngineHost, Task, query

T = TypeVar("T")


class AsyncAdapters(ABC):
    """The adapters of an `AsyncLLM`; methods are named as those of vLLM's."""

    @abstractmethod
    async def run_task(self, task: Task[T], *, concurrently: bool = False) -> T:
        """Call a task with the engine's driver; see `AsyncLLM.run_task`."""

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter beside the engine's steps, before requests name it; True, as vLLM's returns.

        :raises ConfigError: it cannot be served, or the engine was started without enable_lora.
        :raises EngineDeadError: the engine has ended.
        """
        await self.run_task(partial(_read_adapter, lora_request=lora_request), concurrently=True)
        await self.run_task(partial(_add_adapter, lora_request=lora_request))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that use it go on with it. False: none has this number. Raises as `run_task`."""
        return await self.run_task(query(partial(_remove_adapter, lora_id=lora_id)))

    async def list_loras(self) -> set[int]:
        """The numbers of the adapters that have been read. Raises as `run_task`."""
        return await self.run_task(query(_adapter_ids))


def add_adapter(host: EngineHost, lora_request: LoRARequest) -> None:
    """Have an engine read an adapter, and wait for that. Raises as `AsyncAdapters.add_lora`."""
    host.run_between_steps(partial(_add_adapter, lora_request=lora_request)).result()


def _read_adapter(driver: EngineDriver, lora_request: LoRARequest) -> None:
    driver.task_state[f"adapter {lora_request.lora_int_id}"] = driver.engine.adapter_table.reader.read(lora_request)


def _add_adapter(driver: EngineDriver, lora_request: LoRARequest) -> None:
    driver.engine.adapter_table.add(lora_request, driver.task_state.pop(f"adapter {lora_request.lora_int_id}", None))


def _remove_adapter(engine: EngineLoop, lora_id: int) -> bool:
    return engine.adapter_table.remove(lora_id)


def _adapter_ids(engine: EngineLoop) -> set[int]:
    return {each.lora_int_id for each in engine.adapter_table.known}
