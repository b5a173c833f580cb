"""Runs cells in child processes: a backend that crashes, hangs or exits is a finding with its cell, and the next cell is run."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.core.contract.errors import ConfigError
from headway.testing.cells import Cell
from headway.testing.report import CellResult

TIMEOUT = {"cpu": 60.0, "cuda": 240.0}
"""Seconds that one cell may take; on a GPU a kernel may have to be compiled first."""
START_TIMEOUT = 180.0
MOST_DEATHS = 6
"""After so many crashes and hangs in one run the rest is not run: each costs a new process."""
_TAIL = 300


class Died(Exception):
    """The child is gone, or said nothing for too long."""


@dataclass
class Listed:
    """What a child says of its subject."""

    subject: str
    owner: str
    unavailable: str
    cells: list[str]


@dataclass
class Child:
    """One process with the subject loaded, started at the first request and again after it died."""

    target: str
    device: str
    threads: int
    timeout: float
    plugins: Sequence[str] = ()
    _process: subprocess.Popen[bytes] | None = None
    _errors: Any = None
    _rest: bytes = b""

    def list(self, **request: Any) -> Listed:
        """The cells of the subject.

        :raises ConfigError: there is no such subject, or it does not load.
        """
        try:
            answer = self._ask(request, START_TIMEOUT)
        except Died as died:
            raise ConfigError("backend", f"{self.target} that loads", str(died)) from None
        if "error" in answer:
            if answer.get("raised"):
                raise ConfigError("backend", f"{self.target} that loads", answer["error"])
            raise Refused(answer["error"])
        return Listed(**answer)

    def run(self, cell: str) -> CellResult:
        """One cell's result.

        :raises Died: the subject took the process with it.
        """
        answer: dict[str, Any] = {}
        if self._process is None:  # importing a library may take longer than any cell should
            answer = self._ask({"load": True}, START_TIMEOUT)
        if "error" not in answer:
            answer = self._ask({"cell": cell}, self.timeout)
        if "error" in answer:
            return _failed(cell, answer["error"], "the subject does not load in this process")
        return CellResult.model_validate(answer["result"])

    def stop(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._errors):
                if stream is not None:
                    stream.close()
        self._process, self._rest = None, b""

    def _start(self) -> subprocess.Popen[bytes]:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the process
        command = [sys.executable, "-P", "-m", "headway.testing.child", self.target, self.device, str(self.threads)]
        command += self.plugins
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, "HEADWAY_AUTOTUNE_BUDGET": "0", "OMP_NUM_THREADS": str(self.threads)},
        )
        return self._process

    def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = self._line(process, time.monotonic() + timeout)
        except (BrokenPipeError, EOFError):
            code = process.wait()
            said = self._tail()
            self.stop()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            raise Died(f"the process {how}{said}") from None
        except TimeoutError:
            self.stop()
            raise Died(f"no answer within {timeout:.0f} s") from None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _line(self, process: subprocess.Popen[bytes], until: float) -> bytes:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise EOFError
                self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _tail(self) -> str:
        """The last words of a process that died."""
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        last = " ".join(lines[-1:])[-_TAIL:]
        return f": {last}" if last else ""


class Refused(ConfigError):
    """The subject's own error, which says it all."""

    def __init__(self, text: str) -> None:
        super().__init__("backend", "", "")
        self._text = text

    def __str__(self) -> str:
        return self._text


@dataclass
class Run:
    """Cells dealt to a few children."""

    children: Sequence[Child]
    tell: Callable[[CellResult], None] = lambda result: None
    results: dict[str, CellResult] = field(default_factory=dict)
    deaths: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def all(self, cells: Sequence[str]) -> list[CellResult]:
        """The results in the order of the cells."""
        left = list(reversed(cells))
        threads = [threading.Thread(target=self._work, args=(child, left)) for child in self.children]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            left.clear()
            raise
        finally:
            for child in self.children:
                child.stop()
        return [self.results[cell] for cell in cells if cell in self.results]

    def _work(self, child: Child, left: list[str]) -> None:
        while True:
            with self._lock:
                if not left:
                    return
                cell = left.pop()
            if self.deaths >= MOST_DEATHS:
                result = _failed(cell, f"not run: {self.deaths} cells before it took their process with them", "", "skipped")
            else:
                try:
                    result = child.run(cell)
                except Died as died:
                    self.deaths += 1
                    hang = "no answer" in str(died)
                    result = _failed(cell, str(died), "hangs" if hang else "takes the process with it: a crash or an exit")
            with self._lock:
                self.results[cell] = result
                self.tell(result)


def _failed(cell: str, reason: str, guess: str, status: str = "failed") -> CellResult:
    parsed = Cell.parse(cell)
    return CellResult(cell=cell, check=parsed.check, status=status, reason=reason, guess=guess, **parsed.axes)  # type: ignore[arg-type]
