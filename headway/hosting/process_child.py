"""Child process of an engine (parent: `process_host`): loads the model, steps the engine in a thread, and runs tasks."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
import traceback
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Event, Thread
from typing import Any

from headway.core.engine.data.step import OutputDelta
from headway.core.system.child import Wire
from headway.core.system.logs import log_to_stderr
from headway.core.system.system_errors import escape_unencodable, open_closed_streams
from headway.hosting.host import EngineDeadError, EngineThread
from headway.hosting.process_messages import EngineFault, EngineReady, Failed, RunTask, StartEngine, StepOutputs, TaskResult
from headway.machine.process import SWITCH_INTERVAL

_SIGN_INTERVAL = 1.0  # Seconds between reports of steps without outputs, which show that the engine runs


class EngineChild:
    """Server for the parent's tasks. Runs until the parent closes the wire or ends."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._host: EngineThread | None = None
        self._next_sign = 0.0  # When the next step is reported even if it has no outputs
        self._left = Event()  # Set when the parent has closed its end of the wire, or has ended

    def run(self) -> None:
        """Load the model, and serve the parent's requests."""
        try:
            start: StartEngine = self._wire.receive()
        except (EOFError, OSError):  # the parent has refused an option
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

    def _load(self, start: StartEngine) -> EngineThread:
        host = EngineThread(start.make())
        host.add_client(self._stepped, self._died)
        model = host.driver.assembly.model
        self._host = host
        self._send(EngineReady(model.name, model.folder, model.tokenizer_folder, host.facts))
        return host

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._run(self._wire.receive())
        self._left.set()
        if self._host is None:
            os._exit(1)  # the parent no longer waits for the model

    def _run(self, request: RunTask) -> None:
        assert self._host is not None, "the parent sends no task before the model is loaded"
        try:
            task = pickle.loads(request.task)
            future: Future[Any] = (self._host.run_concurrently if request.concurrently else self._host.run_between_steps)(task)
        except Exception as error:
            self._send(Failed.by(request.number, error))
        else:
            future.add_done_callback(partial(self._answer, request.number))

    def _answer(self, number: int, future: Future[Any]) -> None:
        assert self._host is not None
        error = future.exception()
        try:
            data = b"" if error is not None else pickle.dumps(future.result())
        except Exception as unsendable:  # any exception of the result's code: the parent waits for an answer
            error = unsendable
        if error is not None:
            self._send(Failed.by(number, error))
        else:
            self._send(TaskResult(number, data, self._host.num_sequences))

    def _stepped(self, deltas: list[OutputDelta]) -> tuple[tuple[str, int | None], ...]:
        assert self._host is not None
        now = time.monotonic()
        if deltas or now >= self._next_sign:  # many steps of a long prompt give no token
            self._next_sign = now + _SIGN_INTERVAL
            self._send(StepOutputs([tuple(each) for each in deltas], self._host.num_sequences))
        return ()

    def _died(self, error: EngineDeadError) -> None:
        self._send(EngineFault(str(error), repr(error.__cause__)))

    def _send(self, message: object) -> None:
        with suppress(OSError):  # the parent has left; `_read` notices that too
            self._wire.send(message)


def main() -> None:
    """Run the child process. Its command-line argument is the file descriptor of the wire."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a service manager signals the parent, too, which ends this process
    open_closed_streams()
    escape_unencodable(sys.stdout, sys.stderr)
    sys.setswitchinterval(SWITCH_INTERVAL)
    EngineChild(Wire(socket.socket(fileno=int(sys.argv[1])))).run()


if __name__ == "__main__":
    main()
