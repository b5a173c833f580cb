"""`python -m headway.tuning.isolated.child`: a process that may be lost, which tries plugins or measures one table.

It reads one request and answers in lines of JSON. A plugin runs in a fork of this process: one that kills its parent kills this
process, and one that hangs is stopped and named. This process never touches a GPU before it forks.
"""

from __future__ import annotations

import base64
import faulthandler
import os
import pickle
import resource
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import psutil
import torch

from headway.core.contract.errors import HeadwayError
from headway.core.system.child import die_with_parent, how_it_ended, message_of, open_replies, reply
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.registry import create_registry
from headway.registry.hookspecs import PROJECT
from headway.registry.isolation import Verdict
from headway.registry.plugin_sources import PluginFile, PluginSource, installed_plugins
from headway.tuning.isolated import trial_steps
from headway.tuning.isolated.measured_kinds import KINDS

_DUMP_SECONDS = 0.5
"""Seconds for a process that hangs to write where."""
_END_SECONDS = 1.0
"""Seconds for what a plugin has started to end with it."""
_POLL_SECONDS = 0.02
_MOST_OUTPUT = 20_000
"""Characters that are kept of what a plugin prints."""
_MOST_MEMORY = 16 * 2**30
"""Bytes of address space, where there is no GPU: its driver takes more than any limit that would help."""


@dataclass
class _Said:
    """What the process of a plugin has written into its pipe."""

    pipe: int
    stage: str = "its process"
    verdict: Verdict | None = None
    rest: bytes = b""

    def read(self) -> None:
        """Take all that is there."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while self.verdict is None and selector.select(_POLL_SECONDS):
                if not (chunk := os.read(self.pipe, 1 << 16)):
                    time.sleep(_POLL_SECONDS)  # the pipe is closed, by an end that the caller sees
                    return
                *lines, self.rest = (self.rest + chunk).split(b"\n")
                for line in lines:
                    with suppress(ValueError, AttributeError, TypeError):  # of a plugin that writes into a pipe not its own
                        message = message_of(line)
                        self.stage = str(message.get("stage", self.stage))
                        if "verdict" in message:
                            self.verdict = Verdict.of({**asdict(Verdict()), **message["verdict"]})


def judge(plugin: PluginSource, device: str, seconds: float, private: int | None = None) -> Verdict:
    """Try a plugin in a fork of this process; whatever the plugin does, it is ended within a little more than `seconds`.

    private: a file descriptor that the plugin must not have open.
    """
    started = time.monotonic()
    read, write = os.pipe()
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            try:
                if private is not None:
                    os.close(private)
                _run(plugin, device, write, errors.fileno())
            finally:
                os._exit(0)
        os.close(write)
        verdict = _follow(pid, _Said(read), started + seconds, seconds)
        os.close(read)
        errors.seek(0)
        printed = errors.read().decode(errors="replace")[-_MOST_OUTPUT:].strip()
    details = "\n".join(text for text in (verdict.details, printed) if text)
    took = round(time.monotonic() - started, 2)
    return replace(verdict, details=details, seconds=took, date=time.strftime("%Y-%m-%d %H:%M"))


def _run(plugin: PluginSource, device: str, pipe: int, errors: int) -> None:
    """Try a plugin in this process, which is the plugin's own."""
    die_with_parent()
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(errors, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    trial_steps.run(plugin, device, pipe)


def _follow(pid: int, said: _Said, until: float, seconds: float) -> Verdict:
    """Wait for the verdict of a plugin's process or for its end, and end it with all that it has started."""
    status = None
    while said.verdict is None and status is None and time.monotonic() < until:
        ended, found = os.waitpid(pid, os.WNOHANG)
        status = found if ended else None
        said.read()
    verdict = said.verdict
    if verdict is None and status is None:
        os.kill(pid, signal.SIGABRT)  # it writes its stack, as faulthandler does
        time.sleep(_DUMP_SECONDS)
        verdict = Verdict(f"hangs in {said.stage}: no answer within {seconds:.3g} s")
    elif verdict is None:
        assert status is not None
        verdict = Verdict(f"ends the process in {said.stage}: it {how_it_ended(os.waitstatus_to_exitcode(status))}")
    elif not verdict.fault and _outlives(pid):
        verdict = replace(verdict, fault="leaves a process running that it has started")
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return verdict


def _outlives(pid: int) -> bool:
    """Whether a process that a plugin has started goes on when the plugin's own has ended."""
    until = time.monotonic() + _END_SECONDS
    while time.monotonic() < until:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        try:
            os.killpg(pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        time.sleep(_POLL_SECONDS)
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def _try(request: Mapping[str, Any], replies: TextIO) -> None:
    if request["file"]:
        plugin: PluginSource = replace(PluginFile.of(request["file"], request["name"]), owner=request["owner"])
    else:
        named = (request["name"], request["owner"])
        plugin = next(each for each in installed_plugins(PROJECT) if (each.name, each.owner) == named)
    reply(replies, asdict(judge(plugin, request["device"], request["seconds"], replies.fileno())))


def _measure(request: Mapping[str, Any], replies: TextIO) -> None:
    faulthandler.enable(2)
    torch.set_num_threads(int(request["threads"]))
    options = pickle.loads(base64.b64decode(request["options"]))
    options = replace(options, compile_ahead=compile_ahead(options.spec.device))
    try:
        registry = create_registry(request["plugins"], block=request["block"])  # what takes part has had its trial
        KINDS[request["kind"]].run(options, registry, tell=lambda at, point: reply(replies, {"at": at, "point": point}))
    except (HeadwayError, OSError) as error:
        reply(replies, {"error": str(error)})
    else:
        reply(replies, {"done": True})


def main() -> None:
    """Answer one request, {"try": [...]} or {"measure": ...}."""
    die_with_parent()
    replies = open_replies()
    request = message_of(sys.stdin.readline())
    if "measure" in request:
        _measure(request["measure"], replies)
    else:
        for each in request["try"]:
            _try(each, replies)


if __name__ == "__main__":
    main()
