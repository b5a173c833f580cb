"""compute-sanitizer around the processes that run cells: reads and writes outside of a kernel's memory become findings."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.contract.errors import ConfigError

OUT_OF_BOUNDS = "a kernel reads or writes memory that is not its own"
SLOWER = 20
"""Times as long as usual that a cell may take, for memcheck watches each access of each thread."""
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own, so that what lies behind its end is nobody's."""
PLACE = "/usr/local/cuda/bin"
"""Where the tool lies that is on no PATH."""
_MARK = "========= "
_NO_ERROR = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "LEAK SUMMARY", "Warning")
_DETAILS = 3
"""Lines below an error that say where it is: the kernel, the thread, and the address."""


def find_sanitizer(device: str) -> str:
    """Return the path of compute-sanitizer.

    :raises ConfigError: it is not installed, or the device has no kernels to watch.
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
    """Wraps the command of one process, and reads what the tool says of it."""

    path: str
    """The tool."""
    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    _read: int = 0
    """Characters of the log that were looked at."""

    def command(self, command: Sequence[str]) -> list[str]:
        """The command under memcheck; its log begins anew."""
        self._read = 0
        self._log.unlink(missing_ok=True)
        # A library may ask the driver for functions that it does not have, which is no fault of a kernel.
        options = ["--tool", "memcheck", "--report-api-errors", "no", "--print-limit", "20", "--log-file", str(self._log)]
        return [self.path, *options, *command]

    def new_error(self) -> str:
        """The first error that was logged since the last call, in one line; empty where there is none."""
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
    """The first error of a log of compute-sanitizer, with the lines that say where it is; empty where there is none."""
    lines = [line.removeprefix(_MARK) for line in log.splitlines() if line.startswith(_MARK)]
    for number, line in enumerate(lines):
        if line.strip() and not line.startswith((" ", *_NO_ERROR)):
            rest = lines[number + 1 :]
            end = next((at for at, below in enumerate(rest) if not below.startswith(" ")), len(rest))
            return ", ".join(each.strip() for each in (line, *rest[: min(end, _DETAILS)]))
    return ""
