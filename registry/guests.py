"""Plugins of third parties are tried in another process before they are let into this one; what came of it is remembered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from headway.core.contract.backend import API_VERSION
from headway.core.contract.errors import ConfigError
from headway.core.contract.folders import cache_folder
from headway.core.system.child import Child, Died, python
from headway.core.system.files import write_whole
from headway.registry.discovery import FoundPlugin

TRIAL = "headway.tuning.trial"
"""The module that tries plugins: it knows more than the registry, and runs in another process."""
TRUST = "HEADWAY_TRUST_PLUGINS"
"""Environment variable: 1 lets plugins in untried."""
TIMEOUT = "HEADWAY_PLUGIN_TIMEOUT"
"""Environment variable: seconds in place of SECONDS."""
SECONDS = {"cpu": 5.0, "cuda": 60.0}
"""That a plugin may take from its import to the end of its self-test. On a GPU its kernels may have to be compiled first."""
SIDE_BY_SIDE = 8
"""Plugins that are tried at the same time."""
_START = 120.0
"""Seconds for the other process to import torch from a cold disk."""
_VERSION = 1
"""Of what is remembered, and of what a plugin is tried for."""
log = logging.getLogger("headway")


@dataclass(frozen=True)
class Verdict:
    """What a trial came to."""

    fault: str = ""
    """What the plugin did that would have stopped, held up or misled this process; empty: nothing."""
    remarks: list[str] = field(default_factory=list)
    """Exceptions that it raised, each of which costs the part of it that raised."""
    details: str = ""
    """Tracebacks, and what it printed."""
    seconds: float = 0.0
    date: str = ""

    @classmethod
    def read(cls, path: Path) -> Verdict | None:
        """What is remembered; None if that is nothing."""
        try:
            return cls.of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Verdict:
        """From plain data.

        :raises TypeError: something else.
        """
        if any(not isinstance(data[each.name], type(getattr(cls(), each.name))) for each in fields(cls)):
            raise TypeError("no verdict")
        return cls(**{each.name: data[each.name] for each in fields(cls)})


def verdicts(plugins: Sequence[FoundPlugin], retry: bool = False) -> list[Verdict]:
    """Of each plugin what its trial came to: remembered where nothing has changed since, else tried now, all at once.

    retry: try them whatever is remembered.
    """
    if not plugins or os.environ.get(TRUST) == "1":
        return [Verdict() for _ in plugins]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    paths = [_path(plugin, device) for plugin in plugins]
    found = {number: known for number, path in enumerate(paths) if not retry and (known := Verdict.read(path)) is not None}
    untried = [number for number in range(len(plugins)) if number not in found]
    if untried:
        named = ", ".join(plugins[number].name for number in untried)
        log.warning("trying in a process of its own, once: plugin%s %s", "s" * (len(untried) > 1), named)
        tried = _tried([plugins[number] for number in untried], device)
        for number, verdict in zip(untried, tried, strict=True):
            found[number] = verdict
            if not (
                verdict.fault and plugins[number].target
            ):  # the fault of a file ends the program: its user mends it, or the machine
                _remember(paths[number], plugins[number], verdict)
    return [found[number] for number in range(len(plugins))]


def timeout(device: str) -> float:
    """Seconds that a plugin may take.

    :raises ConfigError: $HEADWAY_PLUGIN_TIMEOUT is no number above 0.
    """
    text = os.environ.get(TIMEOUT, "").strip()
    with suppress(ValueError):
        seconds = float(text) if text else SECONDS[device]
        if 0 < seconds < float("inf"):
            return seconds
    raise ConfigError(TIMEOUT, "seconds above 0", repr(text))


def _tried(plugins: Sequence[FoundPlugin], device: str) -> list[Verdict]:
    """All in one process, which has a process made for each; those whose fault ends that one as well, one by one."""
    found = _ask(plugins, device)
    for number, plugin in enumerate(plugins):
        if number not in found:
            found[number] = _ask([plugin], device, blame=True)[0]
    return [found[number] for number in range(len(plugins))]


def _ask(plugins: Iterable[FoundPlugin], device: str, blame: bool = False) -> dict[int, Verdict]:
    """Verdicts by number, as far as they came; blame: the last one without is at fault where the process ends."""
    listed, seconds = list(plugins), timeout(device)
    request = {
        "plugins": [{"name": plugin.name, "owner": plugin.owner, "file": plugin.target} for plugin in listed],
        "seconds": seconds,
        "device": device,
        "side_by_side": SIDE_BY_SIDE,
    }
    found: dict[int, Verdict] = {}
    try:
        with Child(python(TRIAL), {"OMP_NUM_THREADS": "1", "HEADWAY_AUTOTUNE_BUDGET": "0"}) as child:
            answer = child.ask(request, _START)
            while "plugin" in answer:
                found[int(answer["plugin"])] = Verdict.of(answer["verdict"])
                if len(found) == len(listed):
                    break
                answer = child.answer(2 * seconds + _START)
    except (Died, OSError, TypeError, KeyError, ValueError) as error:
        if blame:
            found = {0: Verdict(f"ends the process that tries it: {error}", date=_today())}
    return found


def _path(plugin: FoundPlugin, device: str) -> Path:
    gpu = torch.cuda.get_device_name() if device == "cuda" else ""
    facts = (plugin.digest(), platform.python_version(), torch.__version__, gpu, API_VERSION, _VERSION)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    return cache_folder() / "plugins" / f"{key}.json"


def _remember(path: Path, plugin: FoundPlugin, verdict: Verdict) -> None:
    try:
        write_whole(path, json.dumps({"plugin": plugin.name, "owner": plugin.owner, **asdict(verdict)}, indent=1).encode())
    except OSError as error:
        log.warning("plugin %s is tried at every start, some seconds: %s cannot be written (%s)", plugin.name, path, error)


def _today() -> str:
    return time.strftime("%Y-%m-%d %H:%M")
