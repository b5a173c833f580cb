"""Adapters as the engine knows them, and what it tells an executor of them: plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headway.core.contract.adapters import HostAdapter, LoRARequest


@dataclass(eq=False, slots=True)
class KnownAdapter:
    """An adapter that the engine has read once."""

    request: LoRARequest
    digest: bytes
    """What tells its content from any other's: names of its blocks in the cache begin with it."""
    num_unfinished: int = 0
    """Sequences that want it and have not ended."""
    leaving: bool = False
    """Whether it was unloaded while requests used it: it goes with the last of them."""


class AdapterLoad(NamedTuple):
    """An adapter that a step wants in a slot before it runs."""

    slot: int
    request: LoRARequest
    digest: bytes


class AdapterReader(Protocol):
    """Reads adapters and keeps them in host memory; rank 0's."""

    @property
    def num_slots(self) -> int:
        """Adapters that a step may use."""

    def read(self, request: LoRARequest) -> HostAdapter:
        """See `ModelAdapters.read`; any thread may call it."""

    def keep(self, request: LoRARequest, adapter: HostAdapter | None = None, digest: bytes | None = None) -> HostAdapter:
        """Return an adapter from host memory, `adapter`, or its files. digest: the files' expected one, or None.
        :raises HeadwayError: it cannot be served, or its files have changed."""

    def trim(self, wanted: Iterable[bytes]) -> None:
        """Forget what was used longest ago of the adapters beyond max_cpu_loras. wanted: digests of those that must stay."""
