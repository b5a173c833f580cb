"""What an AsyncLLM says of its engine."""

from __future__ import annotations

from headway.core.contract.errors import ConfigError
from headway.core.engine.engine import Engine
from headway.driver import EngineDriver
from headway.engine_host import EngineDeadError, EngineHost
from headway.engine_thread import EngineThread
from headway.streams import Mailboxes


class EngineState:
    """The part of AsyncLLM that only looks."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self.model, self.facts = host.model, host.facts
        self._mailboxes = Mailboxes()

    @property
    def driver(self) -> EngineDriver:
        """Of an engine that runs in a thread of this process.

        :raises ConfigError: it runs in another.
        """
        if not isinstance(self._host, EngineThread):
            raise ConfigError("AsyncLLM", "own_process=False for its driver and engine", "an engine in another process")
        return self._host.driver

    @property
    def engine(self) -> Engine:
        """Likewise."""
        return self.driver.engine

    @property
    def is_running(self) -> bool:
        """Whether the engine serves requests."""
        return self._host.error is None

    @property
    def is_stopped(self) -> bool:
        """Whether it does not, because of a fault or a shutdown."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether a fault has ended the engine."""
        return self._host.error is not None and self._host.error.__cause__ is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What has ended the engine; None while it runs."""
        return self._host.error

    async def check_health(self) -> None:
        """:raises EngineDeadError: the engine has ended."""
        if self._host.error is not None:
            raise self._host.error

    @property
    def num_unfinished_requests(self) -> int:
        """Requests of this AsyncLLM whose stream has not ended."""
        return self._mailboxes.num_streams

    @property
    def num_waiting(self) -> int:
        """Sequences (completions of requests) in the engine that have not begun, or wait to go on."""
        return self._host.num_sequences[1]

    @property
    def num_running(self) -> int:
        """Sequences in the engine that are served in its steps."""
        return self._host.num_sequences[0]
