"""The process of an engine: loads the model, runs the engine in a thread, and does what its parent asks. See engine_process."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import traceback
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Event, Thread
from typing import Any

from headway.core.engine.deltas import OutputDelta
from headway.core.system.faults import never_refuse_a_character, open_what_is_closed
from headway.engine_host import EngineDeadError
from headway.engine_messages import Answered, Asked, Dead, Failed, Ready, Start, Stepped
from headway.engine_thread import EngineThread
from headway.logs import log_to_stderr
from headway.threads import SWITCH_INTERVAL
from headway.wire import Wire


class Worker:
    """Serves the parent until it leaves."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._host: EngineThread | None = None
        self._left = Event()
        """The parent has closed its end of the wire, or has ended."""

    def run(self) -> None:
        """Load, and serve."""
        try:
            start: Start = self._wire.receive()
        except (EOFError, OSError):  # the parent has found an option that cannot work
            return
        log_to_stderr(start.log_level)
        Thread(target=self._read, daemon=True).start()  # notices a parent that leaves while the model is being loaded
        try:
            host = self._load(start)
        except BaseException as error:
            error.add_note(f"in the engine's process:\n{traceback.format_exc()}")
            self._send(Failed.by(None, error))
            self._left.wait()
            return
        self._left.wait()
        host.stop()

    def _load(self, start: Start) -> EngineThread:
        host = EngineThread(start.make())
        host.listen(self._stepped, self._died)
        model = host.model
        self._host = host
        self._send(Ready(model.name, model.folder, model.tokenizer is not None, host.facts))
        return host

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                asked: Asked = self._wire.receive()
                self._do(asked)
        self._left.set()
        if self._host is None:
            os._exit(1)  # nobody waits for the model any more

    def _do(self, asked: Asked) -> None:
        assert self._host is not None, "the parent asks for nothing before the model is loaded"
        try:
            task = pickle.loads(asked.task)
            future: Future[Any] = (self._host.aside if asked.aside else self._host.call)(task)
        except Exception as error:
            self._send(Failed.by(asked.number, error))
        else:
            future.add_done_callback(partial(self._answer, asked.number))

    def _answer(self, number: int, future: Future[Any]) -> None:
        assert self._host is not None
        error = future.exception()
        try:
            data = b"" if error is not None else pickle.dumps(future.result())
        except Exception as unsendable:  # whatever the result's own code raises: somebody waits for an answer
            error = unsendable
        if error is not None:
            self._send(Failed.by(number, error))
        else:
            self._send(Answered(number, data, self._host.num_sequences))

    def _stepped(self, deltas: list[OutputDelta]) -> tuple[tuple[str, int | None], ...]:
        assert self._host is not None
        if deltas:
            self._send(Stepped.of(deltas, self._host.num_sequences))
        return ()

    def _died(self, error: EngineDeadError) -> None:
        self._send(Dead(str(error), repr(error.__cause__)))

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the parent has left, which `_read` finds, too
            self._wire.send(message)


def main() -> None:
    """The process: its argument is the descriptor of the wire."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a service manager tells the parent, too, which ends this process
    open_what_is_closed()
    never_refuse_a_character(sys.stdout, sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL)
    Worker(Wire(socket.socket(fileno=int(sys.argv[1])))).run()


if __name__ == "__main__":
    main()
