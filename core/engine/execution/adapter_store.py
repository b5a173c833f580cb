"""Adapters in the host's memory on one rank, and their way into the model's slots."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable

from headway.core.contract.adapters import HostAdapter, LoRARequest, ModelAdapters, adapters_of
from headway.core.contract.errors import ConfigError
from headway.core.engine.data.adapters import AdapterLoad

log = logging.getLogger("headway")


class AdapterStore:
    """Keeps adapters as a model's slots take them, by their content.

    On rank 0 requests have them read before they run; another rank reads one when a step wants it in a slot.
    """

    def __init__(self, adapters: ModelAdapters, most: int, follows: bool = False) -> None:
        """most: adapters that stay when nobody wants them (max_cpu_loras). follows: the rank hears of adapters by steps alone."""
        self.slots = adapters
        self._most = most
        self.num_slots = adapters.num_slots
        self._follows = follows
        self._kept: OrderedDict[bytes, HostAdapter] = OrderedDict()
        """The one that was used last stands last."""

    @classmethod
    def of(cls, model: object, most: int, follows: bool) -> AdapterStore | None:
        """Make one for the slots of a model; None: it has none. most, follows: as of the class."""
        slots = adapters_of(model)
        return None if slots is None else cls(slots, most, follows)

    def read(self, request: LoRARequest) -> HostAdapter:
        """See `ModelAdapters.read`; any thread may call it."""
        return self.slots.read(request)

    def keep(self, request: LoRARequest, adapter: HostAdapter | None = None, digest: bytes | None = None) -> HostAdapter:
        """See AdapterReader."""
        found = adapter or (None if digest is None else self._kept.get(digest))
        if found is None:
            found = self.slots.read(request)
            log.info("adapter %s: read from %s", request.lora_name, request.lora_path)
        if digest is not None and found.digest != digest:
            need = "the files that were read when it was loaded"
            raise ConfigError(f"adapter {request.lora_name}", need, "others in their place", "unload it, and load it again")
        self._kept[found.digest] = found
        self._kept.move_to_end(found.digest)
        return found

    def trim(self, wanted: Iterable[bytes] = ()) -> None:
        """See AdapterReader."""
        must_stay = set(wanted)
        spare = [digest for digest in self._kept if digest not in must_stay]
        for digest in spare[: max(len(self._kept) - self._most, 0)]:
            del self._kept[digest]

    def put(self, loads: Iterable[AdapterLoad]) -> None:
        """Copy adapters into slots, before the step that wants them there.

        :raises HeadwayError: one has to be read again, and cannot be.
        """
        for slot, request, digest in loads:
            self.slots.put(slot, self.keep(request, digest=digest))
        if self._follows:
            self.trim()
