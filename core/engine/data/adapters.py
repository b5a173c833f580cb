"""LoRA adapters that the engine tracks, and plain-data instructions for an executor to load them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headway.core.contract.adapters import HostAdapter, LoRARequest


@dataclass(eq=False, slots=True)
class KnownAdapter:
    """An adapter that the engine has read."""

    request: LoRARequest
    digest: bytes
    """Digest of the adapter's content. The names of blocks computed with the adapter depend on this digest."""
    num_unfinished: int = 0
    """Number of unfinished sequences that use the adapter."""
    leaving: bool = False
    """True if the adapter was unloaded while requests use it. It is forgotten when the last of these requests ends."""


class AdapterLoad(NamedTuple):
    """An adapter to load into a slot before a step runs."""

    slot: int
    request: LoRARequest
    digest: bytes


class AdapterReader(Protocol):
    """Reads adapters and caches them in host memory, on rank 0."""

    @property
    def num_slots(self) -> int:
        """Maximum number of adapters per step."""

    def read(self, request: LoRARequest) -> HostAdapter:
        """Return the adapter of a request; see `ModelAdapters.read`. Any thread may call this."""

    def keep(self, request: LoRARequest, adapter: HostAdapter | None = None, digest: bytes | None = None) -> HostAdapter:
        """Return an adapter, and cache it in host memory. The adapter is `adapter` if given, otherwise the cached adapter with
        this digest, otherwise read from the request's files. digest: expected digest, or None.

        :raises HeadwayError: if the adapter is not supported, or its files have changed.
        """

    def trim(self, wanted: Iterable[bytes]) -> None:
        """Evict the least recently used adapters beyond max_cpu_loras. wanted: digests of adapters that must not be evicted."""
