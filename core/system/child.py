"""Child processes that answer in lines of JSON, and socket pairs that carry objects between processes.

A child that crashes, hangs, prints or exits does not affect the parent.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, TextIO

_TAIL = 300  # Maximum characters of a dead process's last line
_DUMP_SECONDS = 0.5  # Seconds for a hanging process to write its stack
_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


class ChildDied(Exception):
    """Error for a child that has ended or has not answered in time. The message describes how, and quotes the child's last line
    on stderr."""

    def __init__(self, how: str, stderr: str = "", timed_out: bool = False) -> None:
        """stderr: the child's stderr output."""
        lines = [line.strip()[-_TAIL:] for line in stderr.splitlines() if line.strip()]
        last = next((line for line in lines if line.startswith("Fatal Python error")), lines[-1] if lines else "")
        super().__init__(f"{how}: {last}" if last else how)
        self.how = how
        self.stderr = stderr
        self.last_line = last
        self.timed_out = timed_out


def how_it_ended(code: int) -> str:
    """Return a description of a `subprocess` exit code, such as "was killed by SIGSEGV" or "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_path() -> str:
    """Return the $PYTHONPATH with which a different Python process finds the same modules as this process."""
    return os.pathsep.join(dict.fromkeys(path for path in sys.path if path))


class Child:
    """A child process in a separate session that answers lines of JSON with lines of JSON. Its stderr is saved for errors."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start the process. :raises OSError: if it cannot be started."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)
        self._rest = b""
        self._held_since: float | None = None
        self._held_seconds = 0.0
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": module_path(), **(environment or {})},
            )
        except OSError:
            self._errors.close()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, request: object, timeout: float) -> dict[str, Any]:
        """Send a request and return its answer. :raises ChildDied: if the process ends, or takes more than `timeout` seconds."""
        self.send(request)
        return self.answer(timeout)

    def hold(self, held: bool) -> None:
        """Stop the process and its descendants where they are, or let them continue. Time limits do not count while they are
        held."""
        if held is (self._held_since is not None):
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGSTOP if held else signal.SIGCONT)
        now = time.monotonic()
        self._held_seconds += 0.0 if self._held_since is None else now - self._held_since
        self._held_since = now if held else None

    def _now(self) -> float:
        """Return a clock in seconds that stands still while the process is held."""
        return (self._held_since or time.monotonic()) - self._held_seconds

    def send(self, request: object) -> None:
        """Write a request. If the process has ended, no error is raised until `answer` is called."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, timeout: float | None) -> dict[str, Any]:
        """Return the next line that is a JSON object. timeout: seconds; None means no limit.

        :raises ChildDied: if the process has ended, or has not answered within `timeout` seconds. The process is then stopped.
        """
        until = math.inf if timeout is None else self._now() + timeout
        while True:
            try:
                line = self._line(until)
            except EOFError:
                how = f"the process {how_it_ended(self.process.wait())}"
                stderr = self.stderr_text()
                self.stop()
                raise ChildDied(how, stderr) from None
            except TimeoutError:
                self._dump_stack()
                stderr = self.stderr_text()
                self.stop()
                raise ChildDied(f"no answer within {timeout:.3g} s", stderr, timed_out=True) from None
            with suppress(ValueError):
                read = message_of(line)
                if isinstance(read, dict):
                    return read

    def stop(self) -> None:
        """Kill the process and all its descendants."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        streams: list[IO[bytes] | None] = [self.process.stdin, self.process.stdout]
        for stream in streams:
            if stream is not None:
                with suppress(BrokenPipeError):  # bytes that were not sent yet
                    stream.close()
        self._errors.close()
        self._rest = b""

    def stderr_text(self) -> str:
        """Return the process's stderr output so far."""
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _dump_stack(self) -> None:
        """Make a process that uses faulthandler write its stack to stderr."""
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(_DUMP_SECONDS)

    def _line(self, until: float) -> bytes:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(None if until == math.inf else max(0.0, until - self._now())):
                    if self._now() >= until:
                        raise TimeoutError
                    continue
                chunk = os.read(self.process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise EOFError
                self._rest += chunk
        line, _, rest = self._rest.partition(b"\n")
        self._rest = rest
        return line


def open_replies() -> TextIO:
    """Return a child's stream of answers, from within the child. Other output to stdout goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def reply(stream: TextIO, message: Mapping[str, Any]) -> None:
    """Send an answer to the parent, from within the child."""
    print(json.dumps(message), file=stream, flush=True)


def message_of(line: str | bytes) -> Any:
    """Return the message in a line from a child process; file names need not be UTF-8. :raises ValueError: for other output."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("a message that is nested too deep") from None


def die_with_parent() -> None:
    """Make Linux kill this process when its parent ends for any reason. On other systems, only the end of the input shows that
    the parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


@contextmanager
def stack_size(num_bytes: int) -> Iterator[None]:
    """Give threads started in this block stacks of this many bytes. The size is process-wide during the block."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)


_BUFFER: Final = 4 * 2**20  # Bytes that the system may buffer, so that sending seldom waits for the reader


class Wire:
    """One end of a socket pair that carries objects between processes that trust each other. Any thread may send, but only one
    thread may receive."""

    def __init__(self, sock: socket.socket) -> None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = sock
        self._file = sock.makefile("rb", buffering=2**20)
        self._guard = threading.Lock()

    def send(self, message: object) -> None:
        """Send an object.

        :raises PicklingError, AttributeError, TypeError: if the object cannot be pickled.

        :raises OSError: if the socket is closed.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._guard:
            self._socket.sendall(data)

    def receive(self) -> Any:
        """Wait for the next object and return it. :raises EOFError, OSError: if the other end is closed."""
        try:
            return pickle.load(self._file)
        except pickle.UnpicklingError as error:  # the sender was killed in the middle of a message
            raise EOFError(str(error)) from error

    def close(self) -> None:
        """Close this end. A thread that waits in `receive` gets an EOFError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
