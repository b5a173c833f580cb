"""LoRA adapters of an engine: which adapters are registered, in slots, and in use."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from headway.core.contract.adapters import NO_ADAPTER, HostAdapter, LoRARequest
from headway.core.contract.errors import ConfigError
from headway.core.engine.data.adapters import AdapterLoad, AdapterReader, KnownAdapter


class AdapterTable:
    """Adapters by ID, and the slots that contain them.

    The adapter of a running sequence stays in its slot, so a step has at most as many adapters as there are slots. An unused
    adapter stays in its slot until a different adapter needs the slot. The least recently used adapter is evicted first. The
    adapters of unfinished requests stay in host memory, so that no step reads a file.
    """

    def __init__(self, reader: AdapterReader) -> None:
        self.reader = reader
        self._by_id: dict[int, KnownAdapter] = {}
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # Digest of each adapter in a slot -> the slot; last used last
        self._free = list(range(reader.num_slots))
        self._running: dict[bytes, int] = {}  # Digest -> sequences that run with it
        self._unfinished: Counter[bytes] = Counter()  # Digest -> unfinished sequences that use it, replaced adapters included
        self._loads: list[AdapterLoad] = []

    @property
    def known(self) -> Sequence[LoRARequest]:
        """Adapters that requests may name by only their ID."""
        return [each.request for each in self._by_id.values() if not each.leaving]

    @property
    def num_in_slots(self) -> int:
        """Number of adapters in slots."""
        return len(self._slot_of)

    def add(self, request: LoRARequest, adapter: HostAdapter | None = None) -> KnownAdapter:
        """Register an adapter and return it. adapter: contents of the adapter, or None to read them from its files.

        :raises ConfigError: if the ID is taken or the adapter is not supported.
        """
        known = self._find(request) or self._remember(request, adapter)
        self.reader.trim(self._unfinished)
        return known

    def claim(self, request: LoRARequest, count: int) -> KnownAdapter:
        """Return the adapter for a request of `count` sequences, for each of which `release` must be called. Raises the same
        errors as `add`."""
        known = self._find(request)
        if known is None:
            known = self._remember(request)
        else:
            self.reader.keep(known.request, digest=known.digest)
        known.num_unfinished += count
        self._unfinished[known.digest] += count
        self.reader.trim(self._unfinished)
        return known

    def _find(self, request: LoRARequest) -> KnownAdapter | None:
        known = self._by_id.get(request.lora_int_id)
        if known is None or known.leaving or request.load_inplace:
            return None
        if (known.request.lora_name, known.request.lora_path) != (request.lora_name, request.lora_path):
            got = f"{request.lora_int_id}, which is adapter {known.request.lora_name} of {known.request.lora_path}"
            hint = "a number of its own, or load_inplace=True"
            raise ConfigError("lora_int_id", f"a number that adapter {request.lora_name} alone has", got, hint)
        return known

    def _remember(self, request: LoRARequest, adapter: HostAdapter | None = None) -> KnownAdapter:
        made = KnownAdapter(request, self.reader.keep(request, adapter).digest)
        self._by_id[request.lora_int_id] = made
        return made

    def release(self, adapter: KnownAdapter) -> None:
        """Record that a sequence that uses the adapter has ended."""
        adapter.num_unfinished -= 1
        self._unfinished[adapter.digest] -= 1
        if not self._unfinished[adapter.digest]:
            del self._unfinished[adapter.digest]
        if adapter.num_unfinished == 0:
            if adapter.leaving and self._by_id.get(adapter.request.lora_int_id) is adapter:
                del self._by_id[adapter.request.lora_int_id]
            self.reader.trim(self._unfinished)

    def remove(self, adapter_id: int) -> bool:
        """Forget an adapter. Unfinished requests continue with it. Returns False if the ID is unknown."""
        known = self._by_id.get(adapter_id)
        if known is None or known.leaving:
            return False
        known.leaving = True
        if known.num_unfinished == 0:
            del self._by_id[adapter_id]
            self.reader.trim(self._unfinished)
        return True

    def occupy(self, adapter: KnownAdapter) -> int | None:
        """Record that one more sequence runs with an adapter. Returns the adapter's slot, or None if running sequences use all
        slots."""
        digest = adapter.digest
        slot = self._slot_of.get(digest)
        if slot is None:
            slot = self._free_slot()
            if slot is None:
                return None
            self._slot_of[digest] = slot
            self._loads.append(AdapterLoad(slot, adapter.request, digest))
        self._slot_of.move_to_end(digest)
        self._running[digest] = self._running.get(digest, 0) + 1
        return slot

    def has_slot_for(self, adapter: KnownAdapter) -> bool:
        """Return whether `occupy` would return a slot."""
        return adapter.digest in self._slot_of or bool(self._free) or len(self._running) < len(self._slot_of)

    def vacate(self, adapter: KnownAdapter) -> None:
        """Record that a sequence that uses the adapter no longer runs."""
        self._running[adapter.digest] -= 1
        if not self._running[adapter.digest]:
            del self._running[adapter.digest]

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Return the adapters to load into slots before the next step runs, and clear the list."""
        loads = self._loads
        self._loads = []
        return tuple(loads)

    def _free_slot(self) -> int | None:
        if self._free:
            return self._free.pop(0)
        oldest = next((digest for digest in self._slot_of if digest not in self._running), None)
        return None if oldest is None else self._slot_of.pop(oldest)

    def check_integrity(self) -> None:
        """Assert that each slot is free or contains one adapter, and that every running adapter has a slot."""
        slots = [*self._slot_of.values(), *self._free]
        assert len(set(slots)) == len(slots), "a slot stands in two places"
        assert set(self._running) <= set(self._slot_of), "an adapter runs without a slot"
        assert NO_ADAPTER not in slots
