"""The process that generates through one backend: its events, and what it said last."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from headway.bench.crossover.worker import MARK

_COMPILING = 60.0
"""Seconds beyond the limit for the short pass before the timed ones: some libraries compile for each new shape then."""


class Worker:
    """A child process, its events, and what it said last."""

    def __init__(self, request: Mapping[str, Any], module: str = "headway.bench.crossover.worker") -> None:
        """request: what the module reads from stdin; module: what the process runs."""
        self._request = request
        self._module = module
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by __exit__)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Worker:
        command = [sys.executable, "-P", "-m", self._module]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._said, encoding="utf-8", errors="replace")
        threading.Thread(target=self._read, daemon=True).start()
        assert self._process.stdin is not None
        try:
            json.dump(self._request, self._process.stdin)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: its last words say why
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._said.close()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line[len(MARK) :])
        self._lines.put(None)

    def events(self, cell_limit: float) -> Iterator[dict[str, Any]]:
        """What the process says, until it ends; "late" when a generation took longer than `cell_limit` seconds."""
        limit: float | None = None
        while True:
            try:
                line = self._lines.get(timeout=limit)
            except queue.Empty:
                yield {"event": "late"}
                return
            if line is None:
                return
            event: dict[str, Any] = json.loads(line)
            limit = {"begin": cell_limit + _COMPILING, "pass": cell_limit}.get(event["event"])
            yield event

    @property
    def last_words(self) -> str:
        """How the process ended, and the end of what it printed."""
        assert self._process is not None
        code = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the process {how}" + (f": {lines[-1][:300]}" if lines else "")
