"""Which requests a server lets in: those for its model, as long as not too many wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from headway.core.contract.adapters import LoRARequest
from headway.core.system.text import shown
from headway.server.errors import ApiError
from headway.server.options import ServerOptions

_LONGEST_RETRY: Final = 60
_MOST_SHOWN: Final = 10
"""Names of models that an error lists."""
_LONGEST_SHOWN: Final = 60
"""Characters of each of them."""


class Admission:
    """The names of a server's model and its queue; for the server's event loop alone."""

    def __init__(self, names: Sequence[str], options: ServerOptions) -> None:
        self.names = list(names)
        self.options = options
        self.adapters: dict[str, LoRARequest] = {}
        """Adapters by the names that requests give as their model."""
        self.num_queued = 0
        """Requests without a first token, or without an answer where that comes as a whole."""
        self._seconds = 1.0
        """Seconds from arrival to end of recent requests, as a moving average."""

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names.

        :raises ApiError: this server has no such model.
        """
        if name is not None and name not in self.names and name not in self.adapters:
            known = [*self.names, *self.adapters]
            listed = [each if len(each) <= _LONGEST_SHOWN else f"{each[:_LONGEST_SHOWN]}..." for each in known[:_MOST_SHOWN]]
            listed += [f"{len(known) - _MOST_SHOWN} more"] * (len(known) > _MOST_SHOWN)
            message = f"model: this server has {', '.join(listed)}, not {shown(name)}"
            raise ApiError(404, message, "model", "model_not_found")

    def adapter_of(self, name: str | None) -> LoRARequest | None:
        """The adapter that a request names as its model; None: it names the model itself. Raises as `check_model`."""
        self.check_model(name)
        return None if name is None or name in self.names else self.adapters[name]

    def check_operator(self) -> None:
        """Check that requests may change what all clients feel.

        :raises ApiError: they may not.
        """
        if not self.options.operator_paths:
            raise ApiError(404, "this server lets nobody do that; start it with --operator-paths, and with an API key")

    def check_room(self) -> None:
        """Check that one more request may wait.

        :raises ApiError: too many wait already.
        """
        if self.num_queued >= self.options.max_queue:
            retry = min(max(round(self._seconds), 1), _LONGEST_RETRY)
            message = f"{self.num_queued} requests wait already (max_queue={self.options.max_queue}); try again in {retry} s"
            raise ApiError(429, message, code="queue_full", retry_after=retry)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Count a request that is answered as a whole, until it is; raises as `check_room`."""
        self.check_room()
        self.num_queued += 1
        try:
            yield
        finally:
            self.num_queued -= 1

    def took(self, seconds: float) -> None:
        """Add the seconds of a request to the moving average."""
        self._seconds += 0.1 * (seconds - self._seconds)
