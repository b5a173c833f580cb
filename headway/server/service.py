"""What all requests of a server share: the engine, its limits and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headway.async_llm import AsyncLLM
from headway.server.errors import ApiError
from headway.server.metrics import Metrics
from headway.server.params import ParamsMaker

_LONGEST_RETRY: Final = 60


@dataclass(frozen=True)
class ServerOptions:
    """How a server treats its clients."""

    served_model_names: Sequence[str] = ()
    """By which requests call the model; none: the name that it was loaded by."""
    api_key: str | None = None
    """What requests must bring; None: nothing."""
    max_queue: int = 1024
    """Requests that may wait for their first token; one more is answered 429."""
    max_body_bytes: int = 16 * 2**20
    max_connections: int = 4096
    """One more is answered 503 and closed."""
    request_timeout: float | None = None
    """Seconds that a request may take; None: any."""
    read_timeout: float = 30.0
    """Seconds that a client may take to send a request's head, and again its body."""
    write_timeout: float = 60.0
    """Seconds that a client may take to read what is written to it."""
    shutdown_timeout: float = 30.0
    """Seconds that requests may go on after the server was told to stop."""
    profile_dir: Path | None = None
    """Folder for traces of the engine's steps; None: /start_profile is refused."""


class Service:
    """One engine and its clients. For the event loop of the server."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self.llm, self.options = llm, options
        self.names = list(options.served_model_names) or [llm.model.name]
        self.metrics = Metrics(self.names[0], llm.facts.block_size)
        self.params_maker = ParamsMaker(llm.get_default_sampling_params())
        self.num_queued = 0
        """Requests without a first token."""
        self.num_unsubmitted = 0
        """Those of them that the engine does not know of yet: they are being tokenised."""
        self._seconds = 1.0
        """What a request has taken lately from arrival to end, as a moving average."""

    def check_model(self, name: str | None) -> None:
        """Check whom a request is for.

        :raises ApiError: another model.
        """
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"model: this server has {known}, not {name[:100]!r}", "model", "model_not_found")

    def check_room(self) -> None:
        """Check that one more request may wait.

        :raises ApiError: too many do.
        """
        if self.num_queued >= self.options.max_queue:
            retry = min(max(round(self._seconds), 1), _LONGEST_RETRY)
            message = f"{self.num_queued} requests wait already (max_queue={self.options.max_queue}); try again in {retry} s"
            raise ApiError(429, message, code="queue_full", retry_after=retry)

    def admit(self) -> Ticket:
        """Let a request in; it raises as `check_room`."""
        self.check_room()
        return Ticket(self)

    def took(self, seconds: float) -> None:
        """Note what a request has taken."""
        self._seconds += 0.1 * (seconds - self._seconds)


class Ticket:
    """A request's place in the queue, until its first token or its end."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._waits = self._unsubmitted = True
        service.num_queued += 1
        service.num_unsubmitted += 1

    def submitted(self) -> None:
        """The engine knows of it."""
        if self._unsubmitted:
            self._unsubmitted = False
            self._service.num_unsubmitted -= 1

    def begun(self) -> None:
        """It has its first token, or has ended."""
        self.submitted()
        if self._waits:
            self._waits = False
            self._service.num_queued -= 1
