"""Runner of cells in child processes, optionally under compute-sanitizer.

If a backend crashes, hangs or exits, the cell that was running gets a finding, and the next cell runs.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.core.contract.errors import ConfigError
from headway.core.system.child import Child, ChildDied, python_command
from headway.core.system.provenance import interpreted
from headway.testing.kit.kit import parse_cell
from headway.testing.kit.report import CellResult, new_result

OUT_OF_BOUNDS = "a kernel reads or writes memory that is not its own"
SLOWER = 20
"""Factor on a cell's time limit under the sanitizer, because memcheck checks each memory access of each thread."""
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Environment variables that make each tensor a separate allocation, so that accesses past the end of a tensor are detected."""
PLACE = "/usr/local/cuda/bin"
"""Folder to search for compute-sanitizer if it is not on the PATH."""
_MARK = "========= "
_NO_ERROR = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "LEAK SUMMARY", "Warning")
_DETAILS = 3
"""Number of log lines after an error that give its location: kernel, thread and address."""


def find_sanitizer(device: str) -> str:
    """Return the path of compute-sanitizer.

    :raises ConfigError: if compute-sanitizer is not installed, or the device is not a GPU.
    """
    if device != "cuda":
        raise ConfigError("--sanitize", "--device cuda, whose kernels it watches", f"--device {device}")
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=PLACE)
    if found is None:
        hint = f"it comes with the CUDA toolkit; put its folder on the PATH, such as {PLACE}"
        raise ConfigError("--sanitize", "compute-sanitizer", f"none on the PATH or in {PLACE}", hint)
    return found


@dataclass
class Sanitizer:
    """compute-sanitizer for one process: changes the command that starts the process, and reads the log."""

    path: str
    """Path of compute-sanitizer."""
    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    _read: int = 0
    """Number of characters of the log that have already been read."""

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` under memcheck, after emptying the log."""
        self._read = 0
        self._log.unlink(missing_ok=True)
        # A library may ask the driver for functions that it does not have; this is not a kernel error.
        options = ["--tool", "memcheck", "--report-api-errors", "no", "--print-limit", "20", "--log-file", str(self._log)]
        return [self.path, *options, *command]

    def new_error(self) -> str:
        """Return the first error logged since the last call, as one line; "" if no error was logged."""
        with suppress(OSError):
            text = self._log.read_text(encoding="utf-8", errors="replace")
            new = text[self._read :]
            self._read = len(text)
            return first_error(new)
        return ""

    @property
    def _log(self) -> Path:
        return Path(self._folder.name) / "memcheck.log"


def first_error(log: str) -> str:
    """Return the first error in a log of compute-sanitizer, with its location; "" if the log contains no error."""
    lines = [line.removeprefix(_MARK) for line in log.splitlines() if line.startswith(_MARK)]
    for number, line in enumerate(lines):
        if line.strip() and not line.startswith((" ", *_NO_ERROR)):
            rest = lines[number + 1 :]
            end = next((at for at, below in enumerate(rest) if not below.startswith(" ")), len(rest))
            return ", ".join(each.strip() for each in (line, *rest[: min(end, _DETAILS)]))
    return ""


TIMEOUT = {"cpu": 60.0, "cuda": 240.0}
"""Time limit per cell in seconds, for each device type. On a GPU, the limit includes the time for compiling the kernel."""
INTERPRETED = 10
"""Factor on the time limit under Triton's interpreter."""
START_TIMEOUT = 180.0
MOST_DEATHS = 6
"""Number of crashes and hangs after which no further cells are run, because each crash or hang requires a new process."""


@dataclass
class Listed:
    """Description of a subject and its cells, received from a child process."""

    subject: str
    owner: str
    plugin: Sequence[str] | None
    """Plugin that provides the subject, in the format of `Subject.plugin`."""
    kind: str
    """Name of the subject's kind of operation."""
    unavailable: str
    cells: list[str]
    digest: str = ""
    """Digest of the subject, as in `CheckReport.digest`."""


@dataclass
class CellProcess:
    """Child process with the subject loaded, started at the first request and restarted after it dies."""

    target: str
    device: str
    threads: int
    timeout: float
    plugins: Sequence[str] = ()
    model: str = ""
    """Model whose layers are tested; "" means the kit's own layers."""
    guesses: bool = True
    """True if failures include a likely cause. Finding the cause may take longer than running the cell."""
    sanitizer: Sanitizer | None = None
    """Sanitizer that checks the memory accesses of the process's kernels. None means no sanitizer."""
    rule: str = ""
    """Attention rule of all layers; "" means none."""
    deaths: int = 0
    """Number of times that a cell ended the process or made the GPU unusable for the process."""
    _process: Child | None = None

    def brought(self) -> list[str]:
        """Return the targets of all kernels that the plugins register.

        :raises ConfigError: if a plugin does not load.
        """
        try:
            targets: list[str] = self._begin({"brought": True})["targets"]
            return targets
        finally:
            self.stop()

    def list(self, **request: Any) -> Listed:
        """Return the description of the subject with its cells. request: arguments of `list_cells`.

        :raises ConfigError: if the subject does not exist or does not load.
        """
        answer = self._begin(request)
        if self.sanitizer is not None and (error := self.sanitizer.new_error()):
            raise ConfigError("--sanitize", "a machine whose GPU compute-sanitizer can watch", error)
        return Listed(**answer)

    def _begin(self, request: dict[str, Any]) -> dict[str, Any]:
        what = self.target or ", ".join(self.plugins)
        try:
            answer = self._ask(request, START_TIMEOUT)
        except ChildDied as died:
            raise ConfigError("backend", f"{what} that loads", str(died)) from None
        if "error" in answer:
            if answer.get("raised"):
                raise ConfigError("backend", f"{what} that loads", answer["error"])
            raise Refused(answer["error"])
        return answer

    def run(self, cell: str) -> CellResult:
        """Return the result of one cell. Under a sanitizer, the first reported error is the finding, even if the cell passes.

        :raises ChildDied: if the subject ended the process.
        """
        try:
            result = self._run(cell)
        except ChildDied:
            if found := self._insane(cell):
                return found
            raise
        return self._insane(cell) or result

    def _insane(self, cell: str) -> CellResult | None:
        error = "" if self.sanitizer is None else self.sanitizer.new_error()
        return _failed(cell, f"compute-sanitizer: {error}", OUT_OF_BOUNDS) if error else None

    def _run(self, cell: str) -> CellResult:
        answer: dict[str, Any] = {}
        if self._process is None:  # importing a library may take longer than the limit of a cell
            answer = self._ask({"load": True}, START_TIMEOUT)
        if "error" not in answer:
            answer = self._ask({"cell": cell, "guesses": self.guesses}, self.timeout)
        if "error" in answer:
            return _failed(cell, answer["error"], "the subject does not load in this process")
        if answer["lost_gpu"]:  # every later call in this process would fail
            self.deaths += 1
            self.stop()
        return CellResult.model_validate(answer["result"])

    def stop(self) -> None:
        """End the process and all processes that it started."""
        if self._process is not None:
            self._process.stop()
        self._process = None

    def _ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        if self._process is None:
            arguments = self.target, self.device, str(self.threads), self.model, self.rule
            command = python_command("headway.testing.kit.child", *arguments, *self.plugins)
            limits = {"HEADWAY_AUTOTUNE_BUDGET": "0", "OMP_NUM_THREADS": str(self.threads)}
            if self.sanitizer is not None:
                command, limits = self.sanitizer.command(command), limits | ENVIRONMENT
            self._process = Child(command, limits)
        try:
            return self._process.ask(request, timeout)
        except ChildDied:
            self.deaths += 1
            self._process = None
            raise


def cell_timeout(device: str, sanitized: bool = False) -> float:
    """Return the default time limit of a cell on a device, in seconds."""
    return TIMEOUT[device] * (INTERPRETED if interpreted() else 1) * (SLOWER if sanitized else 1)


class Refused(ConfigError):
    """Error about the subject that a child process reports, with its text unchanged."""

    def __init__(self, text: str) -> None:
        super().__init__("backend", "", "")
        self._text = text

    def __str__(self) -> str:
        return self._text


@dataclass
class CellRun:
    """Run of cells that are distributed over a few child processes."""

    children: Sequence[CellProcess]
    tell: Callable[[CellResult], None] = lambda result: None
    stop_at_failure: bool = False
    """True if the first failure ends the run, like Ctrl-C."""
    results: dict[str, CellResult] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _fault: BaseException | None = None

    def all(self, cells: Sequence[str]) -> list[CellResult]:
        """Return the results in the order of the cells. An exception in a thread is raised here, because a cell without a result
        must not count as passed.

        Ctrl-C ends the run and returns the results so far.
        """
        left = list(reversed(cells))  # cells are taken from its end
        left.sort(key=lambda cell: "far" not in cell.split(":"))  # cells with large caches last
        threads = [threading.Thread(target=self._guarded, args=(child, left)) for child in self.children]
        for thread in threads:
            thread.start()
        results, interrupted = self.results, False
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            left.clear()
            with self._lock:
                results = dict(self.results)  # without the cells whose processes are now stopped
                interrupted = True
        except BaseException:
            left.clear()
            raise
        finally:
            for child in self.children:
                child.stop()
        if self._fault is not None and not interrupted:  # a thread whose process was stopped may raise anything
            raise self._fault
        return [results[cell] for cell in cells if cell in results]

    def _guarded(self, child: CellProcess, left: list[str]) -> None:
        try:
            self._work(child, left)
        except BaseException as error:
            self._fault = error
            left.clear()

    def _work(self, child: CellProcess, left: list[str]) -> None:
        while True:
            with self._lock:
                if not left:
                    return
                cell = left.pop()
            deaths = sum(each.deaths for each in self.children)
            if deaths >= MOST_DEATHS:
                result = _failed(cell, f"not run: {deaths} cells before it took their process with them", "", "skipped")
            else:
                try:
                    result = child.run(cell)
                except ChildDied as died:
                    if died.timed_out:
                        result = _failed(cell, died.how, "hangs, or takes longer: --timeout SECONDS gives it more time")
                    else:
                        result = _failed(cell, str(died), "takes the process with it: a crash or an exit")
            with self._lock:
                if self.stop_at_failure and any(each.status == "failed" for each in self.results.values()):
                    return  # another process had started this cell: only one failure is shown
                self.results[cell] = result
                self.tell(result)
                if self.stop_at_failure and result.status == "failed":
                    left.clear()


def _failed(cell: str, reason: str, guess: str, status: str = "failed") -> CellResult:
    return new_result(parse_cell(cell), status, reason, guess)
