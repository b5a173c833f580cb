"""Verdicts on third-party plugins: each version of a plugin is tried once per machine, in a separate process.

The caller passes the trial as a function (`Trial`), because a trial needs self-tests and processes that the registry must not
depend on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from headway.core.contract.backend import API_VERSION
from headway.core.system.files import cache_folder, read_text, write_whole
from headway.core.system.json_text import parse_json
from headway.core.system.provenance import compiler_versions
from headway.registry.plugin_sources import PluginSource

TRUST = "HEADWAY_TRUST_PLUGINS"
"""Environment variable: 1 loads plugins without a trial."""
TIMEOUT = "HEADWAY_PLUGIN_TIMEOUT"
"""Environment variable: maximum duration of a plugin's trial, in seconds."""
_VERSION = 3
"""Version of stored verdicts and of the trial."""
log = logging.getLogger("headway")


@dataclass(frozen=True)
class Verdict:
    """Result of a plugin's trial."""

    fault: str = ""
    """Description of a plugin's action that would have stopped, delayed or misled this process; "" if there was none."""
    remarks: list[str] = field(default_factory=list)
    """Exceptions that the plugin raised. Each part that raised an exception is not registered; all other parts are."""
    details: str = ""
    """Tracebacks and output of the plugin."""
    seconds: float = 0.0
    date: str = ""

    @classmethod
    def read(cls, path: Path) -> Verdict | None:
        """Return the verdict stored at a path, or None if no readable verdict exists."""
        try:
            return cls.of(parse_json(read_text(path), path.name, dict))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Verdict:
        """Return a verdict from plain data.

        :raises TypeError: if a field has the wrong type.
        :raises KeyError: if a field is missing.
        """
        if any(not isinstance(data[each.name], type(getattr(cls(), each.name))) for each in fields(cls)):
            raise TypeError("no verdict")
        return cls(**{each.name: data[each.name] for each in fields(cls)})


class Refusal(Verdict):
    """Verdict on a plugin that lacks a required passport and was not tried. `fault` is the reason."""


Trial = Callable[[Sequence[PluginSource]], list[Verdict]]
"""Function that tries plugins in other processes and returns a verdict on each."""


class PassportCheck(Protocol):
    """Check of plugins against their passports at a start."""

    def refusal(self, plugin: PluginSource) -> str:
        """Return the reason why a plugin must not be used, or "". Called before any code of the plugin runs."""

    def without(self, plugin: PluginSource, kernels: Sequence[tuple[str, str]], verdict: Verdict) -> list[tuple[str, str]]:
        """Return the kernels, as kind and name, that lack a required passport, and report differences between the passport and
        the verdict. kernels: kind and name of each kernel that the plugin registered."""


def verdicts(plugins: Sequence[PluginSource], trial: Trial | None, retry: bool = False) -> list[Verdict]:
    """Return a verdict on each plugin: the stored verdict if the plugin and its environment are unchanged, else the result of a
    new trial.

    trial: None accepts plugins without a stored verdict. retry: True to repeat trials whose verdict is stored.
    """
    if not plugins or os.environ.get(TRUST) == "1":
        return [Verdict() for _ in plugins]
    paths = [_path(plugin) for plugin in plugins]
    found = {} if retry and trial else {path: known for path in paths if (known := Verdict.read(path)) is not None}
    untried = {path: plugin for path, plugin in zip(paths, plugins, strict=True) if path not in found}
    if untried and trial:
        named = ", ".join(plugin.name for plugin in untried.values())
        log.warning("plugins: trying %s once in a separate process", named)
        for (path, plugin), verdict in zip(untried.items(), trial(list(untried.values())), strict=True):
            found[path] = verdict
            if not (verdict.fault and plugin.target):  # the user named the file or folder, and fixes it or its time: not stored
                _remember(path, plugin, verdict)
    return [found.get(path, Verdict()) for path in paths]


def _path(plugin: PluginSource) -> Path:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    compilers = sorted(compiler_versions(torch.cuda.get_device_capability()).items()) if gpu else []
    facts = (plugin.digest(), platform.python_version(), torch.__version__, gpu, compilers, API_VERSION, _VERSION)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    return cache_folder() / "plugins" / f"{key}.json"


def _remember(path: Path, plugin: PluginSource, verdict: Verdict) -> None:
    try:
        write_whole(path, json.dumps({"plugin": plugin.name, "owner": plugin.owner, **asdict(verdict)}, indent=1).encode())
    except OSError as error:
        log.warning("plugin %s: tried at every start, which takes seconds: %s cannot be written (%s)", plugin.name, path, error)
