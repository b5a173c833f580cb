"""Child processes that answer in lines of JSON: what crashes, hangs, prints or exits in one costs that process alone."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, TextIO

_TAIL = 300
"""Characters of a dead process's last line."""
_DUMP_SECONDS = 0.5
"""For a process that hangs to write where."""
_DEATH_SIGNAL = 1
"""prctl's PR_SET_PDEATHSIG."""


class Died(Exception):
    """The child is gone, or said nothing for too long; the text says how it ended, and its last words."""

    def __init__(self, how: str, said: str = "", silent: bool = False) -> None:
        """said: to its error stream."""
        lines = [line.strip()[-_TAIL:] for line in said.splitlines() if line.strip()]
        last = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
        super().__init__(f"{how}: {last}" if last else how)
        self.how, self.said, self.last, self.silent = how, said, last, silent


def how_it_ended(code: int) -> str:
    """An exit code of `subprocess` in words: "was killed by SIGSEGV", "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this Python's."""
    return [sys.executable, "-P", "-m", module, *arguments]


def found_modules() -> str:
    """$PYTHONPATH for a Python that is to find the modules that this one finds."""
    return os.pathsep.join(dict.fromkeys(path for path in sys.path if path))


class Child:
    """One process in a session of its own. It finds the modules that this process finds.

    Requests and answers are one line of JSON each; what the process prints to its error stream is kept for its last words.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """:raises OSError: the process cannot be started."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)
        self._rest = b""
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": found_modules(), **(environment or {})},
            )
        except OSError:
            self._errors.close()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, request: object, timeout: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        :raises Died: none comes within `timeout` seconds, or ever.
        """
        self.send(request)
        return self.answer(timeout)

    def send(self, request: object) -> None:
        """Write a request; a process that is gone shows when its answer is waited for."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, timeout: float | None) -> dict[str, Any]:
        """The next line that is a JSON object. timeout: in seconds; None: wait as long as it lives.

        :raises Died: the process ended, or said nothing for `timeout` seconds; it is stopped then.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            try:
                line = self._line(until)
            except EOFError:
                how = f"the process {how_it_ended(self.process.wait())}"
                said = self.said()
                self.stop()
                raise Died(how, said) from None
            except TimeoutError:
                self._let_it_say_where()
                said = self.said()
                self.stop()
                raise Died(f"no answer within {timeout:.3g} s", said, silent=True) from None
            with contextlib.suppress(ValueError):
                read = json.loads(line)
                if isinstance(read, dict):
                    return read

    def stop(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        streams: list[IO[bytes] | None] = [self.process.stdin, self.process.stdout]
        for stream in streams:
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # of what was still to be sent
                    stream.close()
        self._errors.close()
        self._rest = b""

    def said(self) -> str:
        """All that the process has printed to its error stream."""
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _let_it_say_where(self) -> None:
        """A process with faulthandler writes its stack to its error stream."""
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(_DUMP_SECONDS)

    def _line(self, until: float) -> bytes:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(None if until == math.inf else max(0.0, until - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(self.process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise EOFError
                self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def answers() -> TextIO:
    """For the child: where its answers go. From now on whatever anybody prints goes to the error stream instead."""
    found = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return found


def say(stream: TextIO, message: Mapping[str, Any]) -> None:
    """For the child: one answer."""
    print(json.dumps(message), file=stream, flush=True)


def die_with_parent() -> None:
    """For the child: end when the process that started it ends, however that happens (Linux; elsewhere its input ends)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
