"""`python -m headway.tuning.trial`: tries plugins, each in a process of its own that is forked from this one.

This process imports torch once and nothing of a plugin's, and never touches a GPU, so that its forks may. It reads one request
and answers with a line for each plugin, as soon as its trial is over.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

import psutil

from headway.core.system.child import answers, die_with_parent, how_it_ended, say
from headway.registry.discovery import FoundPlugin, entry_points
from headway.registry.given import GivenFile
from headway.registry.guests import Verdict
from headway.registry.hookspecs import PROJECT
from headway.tuning import trial_steps

_DUMP_SECONDS = 0.5
"""For a process that hangs to write where."""
_END_SECONDS = 1.0
"""For what a plugin has started to end with it."""
_MOST_OUTPUT = 20_000
"""Characters that are kept of what a plugin prints."""
_MOST_MEMORY = 16 * 2**30
"""Bytes of address space, where there is no GPU: its driver takes more than any limit that would help."""


@dataclass
class Trial:
    """One plugin's process, and the one between it and this one."""

    number: int
    guard: int
    """The process between, which a plugin that kills its parent kills."""
    pipe: int
    errors: IO[bytes]
    started: float = field(default_factory=time.monotonic)
    pid: int = 0
    stage: str = "its process"
    said: bytes = b""
    ended: Verdict | None = None

    def read(self) -> bool:
        """Take what was said; whether the trial is over."""
        chunk = os.read(self.pipe, 1 << 16)
        *lines, self.said = (self.said + chunk).split(b"\n")
        for line in lines:
            with suppress(ValueError, AttributeError, TypeError):  # of a plugin that writes into a pipe that is not its own
                message = json.loads(line)
                self.pid = int(message.get("pid", self.pid))
                self.stage = str(message.get("stage", self.stage))
                if "verdict" in message:
                    self.ended = self.ended or Verdict.of({**asdict(Verdict()), **message["verdict"]})
                if "ended" in message:
                    how = how_it_ended(message["ended"])
                    self.ended = self.ended or Verdict(f"ends the process in {self.stage}: it {how}")
        if not chunk:
            self.ended = self.ended or Verdict(f"ends the process that tries it, in {self.stage}")
        return self.ended is not None

    def judge(self, seconds: float) -> Verdict:
        """The verdict of a trial that is over, or has taken too long; then its process says where it is, before it is ended."""
        if self.ended is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid or self.guard, signal.SIGABRT)
            time.sleep(_DUMP_SECONDS)
        if self.ended is not None and not self.ended.fault and self._is_outlived():
            self.ended = replace(self.ended, fault="leaves a process running that it has started")
        for end, pid in ((os.killpg, self.pid), (os.kill, self.guard)):
            with suppress(ProcessLookupError, PermissionError):
                if pid:
                    end(pid, signal.SIGKILL)
        os.waitpid(self.guard, 0)
        os.close(self.pipe)
        return self._judged(self.ended or Verdict(f"hangs in {self.stage}: no answer within {seconds:.3g} s"))

    def _is_outlived(self) -> bool:
        """Whether a process that the plugin has started goes on when its own has ended."""
        until = time.monotonic() + _END_SECONDS
        while time.monotonic() < until:
            try:
                os.killpg(self.pid, 0)
            except (ProcessLookupError, PermissionError):
                return False
            time.sleep(0.01)
        for process in psutil.process_iter(["status"]):
            with suppress(ProcessLookupError):
                if os.getpgid(process.pid) == self.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    return True
        return False

    def _judged(self, verdict: Verdict) -> Verdict:
        self.errors.seek(0)
        printed = self.errors.read().decode(errors="replace")[-_MOST_OUTPUT:].strip()
        self.errors.close()
        return Verdict(
            verdict.fault,
            verdict.remarks,
            "\n".join(text for text in (verdict.details, printed) if text),
            round(time.monotonic() - self.started, 2),
            time.strftime("%Y-%m-%d %H:%M"),
        )


def try_all(plugins: list[FoundPlugin], request: Mapping[str, Any], told: int) -> Iterator[tuple[int, Verdict]]:
    """Verdicts as they come, with the plugin's number. told: the file that a plugin must not have open."""
    seconds, left = float(request["seconds"]), list(enumerate(plugins))
    running: dict[int, Trial] = {}
    with selectors.DefaultSelector() as selector:
        while left or running:
            while left and len(running) < int(request["side_by_side"]):
                trial = _begin(*left.pop(0), str(request["device"]), told)
                running[trial.pipe] = trial
                selector.register(trial.pipe, selectors.EVENT_READ)
            soonest = min(trial.started for trial in running.values()) + seconds
            ready = {key.fd for key, _ in selector.select(max(0.0, soonest - time.monotonic()))}
            for pipe, trial in list(running.items()):
                if (pipe in ready and trial.read()) or time.monotonic() > trial.started + seconds:
                    selector.unregister(pipe)
                    del running[pipe]
                    yield trial.number, trial.judge(seconds)


def _begin(number: int, plugin: FoundPlugin, device: str, told: int) -> Trial:
    read, write = os.pipe()
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the trial is judged)
    guard = os.fork()
    if guard == 0:
        try:
            for handle in (read, told):
                os.close(handle)
            _guard(plugin, device, write, errors.fileno())
        finally:
            os._exit(0)
    os.close(write)
    return Trial(number, guard, read, errors)


def _guard(plugin: FoundPlugin, device: str, pipe: int, errors: int) -> None:
    """Run a plugin in a process of its own, and say how that ended."""
    die_with_parent()
    pid = os.fork()
    if pid:
        os.write(pipe, json.dumps({"pid": pid}).encode() + b"\n")
        _, status = os.waitpid(pid, 0)
        os.write(pipe, json.dumps({"ended": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
        return
    die_with_parent()
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(errors, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    trial_steps.run(plugin, device, pipe)


def main() -> None:
    """Answer one request."""
    die_with_parent()
    told = answers()
    request = json.loads(sys.stdin.readline())
    installed = {(plugin.name, plugin.owner): plugin for plugin in entry_points(PROJECT)}
    plugins = [
        FoundPlugin(wanted["name"], wanted["owner"], GivenFile.of(wanted["file"]))
        if wanted["file"]
        else installed[wanted["name"], wanted["owner"]]
        for wanted in request["plugins"]
    ]
    for number, verdict in try_all(plugins, request, told.fileno()):
        say(told, {"plugin": number, "verdict": asdict(verdict)})


if __name__ == "__main__":
    main()
