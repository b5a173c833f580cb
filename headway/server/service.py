"""The parts of a server that all requests share: the engine, the queue and the figures."""

from __future__ import annotations

from typing import Final

from headway.async_llm import AsyncLLM
from headway.server.errors import ApiError
from headway.server.metrics import Metrics
from headway.server.options import ServerOptions
from headway.server.params import ParamsMaker

_LONGEST_RETRY: Final = 60


class Service:
    """One engine and its clients; for the server's event loop alone."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self.llm, self.options = llm, options
        self.names = list(options.served_model_names) or [llm.model.name]
        self.metrics = Metrics(self.names[0], llm.facts.block_size)
        self.params_maker = ParamsMaker(llm.get_default_sampling_params())
        self.num_queued = 0
        """Requests without a first token."""
        self.num_unsubmitted = 0
        """Requests that the engine does not know of yet: they are being tokenised."""
        self._seconds = 1.0
        """Seconds from arrival to end of recent requests, as a moving average."""

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names.

        :raises ApiError: this server has no such model.
        """
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"model: this server has {known}, not {name[:100]!r}", "model", "model_not_found")

    def check_room(self) -> None:
        """Check that one more request may wait.

        :raises ApiError: too many wait already.
        """
        if self.num_queued >= self.options.max_queue:
            retry = min(max(round(self._seconds), 1), _LONGEST_RETRY)
            message = f"{self.num_queued} requests wait already (max_queue={self.options.max_queue}); try again in {retry} s"
            raise ApiError(429, message, code="queue_full", retry_after=retry)

    def admit(self) -> Ticket:
        """Let a request in; raises as `check_room`."""
        self.check_room()
        return Ticket(self)

    def took(self, seconds: float) -> None:
        """Add the seconds of a request to the moving average."""
        self._seconds += 0.1 * (seconds - self._seconds)


class Ticket:
    """A request's place in the queue, until its first token or its end."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._waits = self._unsubmitted = True
        service.num_queued += 1
        service.num_unsubmitted += 1

    def submitted(self) -> None:
        """Note that the engine knows of the request."""
        if self._unsubmitted:
            self._unsubmitted = False
            self._service.num_unsubmitted -= 1

    def begun(self) -> None:
        """Note that the request has its first token, or has ended."""
        self.submitted()
        if self._waits:
            self._waits = False
            self._service.num_queued -= 1
