"""What is known of plugins without importing them: which a user wants, what each brought, and the verdict on each."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from headway.core.contract.backend import API_VERSION
from headway.core.contract.errors import ConfigError, PluginError
from headway.core.system.files import cache_folder, read_text, write_whole
from headway.core.system.json_text import parse_json
from headway.core.system.provenance import compiler_versions
from headway.registry.plugin_sources import PluginSource

if TYPE_CHECKING:
    from headway.registry.plugin_sources import PluginSource

log = logging.getLogger("headway")

TRUST = "HEADWAY_TRUST_PLUGINS"
"""Environment variable: 1 lets plugins in untried."""
TIMEOUT = "HEADWAY_PLUGIN_TIMEOUT"
"""Environment variable: seconds that a plugin may take in its trial."""
_VERSION = 3
"""Version of what is remembered, and of what a plugin is tried for."""


@dataclass(frozen=True)
class Verdict:
    """What the trial of a plugin came to."""

    fault: str = ""
    """What the plugin did that would have stopped, held up or misled this process; empty: nothing."""
    remarks: list[str] = field(default_factory=list)
    """Exceptions that the plugin raised, each of which costs the part of it that raised."""
    details: str = ""
    """Tracebacks, and what the plugin printed."""
    seconds: float = 0.0
    date: str = ""

    @classmethod
    def read(cls, path: Path) -> Verdict | None:
        """Read a remembered verdict; None where there is none that can be read."""
        try:
            return cls.of(parse_json(read_text(path), path.name, dict))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Verdict:
        """Make a verdict from plain data.

        :raises TypeError: a field has another type.
        :raises KeyError: a field is missing.
        """
        if any(not isinstance(data[each.name], type(getattr(cls(), each.name))) for each in fields(cls)):
            raise TypeError("no verdict")
        return cls(**{each.name: data[each.name] for each in fields(cls)})


Trial = Callable[[Sequence[PluginSource]], list[Verdict]]
"""Tries plugins in other processes, and returns a verdict on each."""


def verdicts(plugins: Sequence[PluginSource], trial: Trial | None, retry: bool = False) -> list[Verdict]:
    """Return a verdict on each plugin: the remembered one where nothing has changed since, else that of a trial now.

    trial: None: what nobody has tried is let in. retry: try them whatever is remembered.
    """
    if not plugins or os.environ.get(TRUST) == "1":
        return [Verdict() for _ in plugins]
    paths = [_path(plugin) for plugin in plugins]
    found = {} if retry and trial else {path: known for path in paths if (known := Verdict.read(path)) is not None}
    untried = {path: plugin for path, plugin in zip(paths, plugins, strict=True) if path not in found}
    if untried and trial:
        named = ", ".join(plugin.name for plugin in untried.values())
        log.warning("trying in a process of its own, once: plugin%s %s", "s" * (len(untried) > 1), named)
        for (path, plugin), verdict in zip(untried.items(), trial(list(untried.values())), strict=True):
            found[path] = verdict
            if not (verdict.fault and plugin.target):  # the fault of a file ends the program: its user mends the file
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
        log.warning("plugin %s is tried at every start, some seconds: %s cannot be written (%s)", plugin.name, path, error)


BUILTIN_OWNER: Final = "built-in"
"""Owner of the backends that come with Headway."""
VARIABLE = "HEADWAY_PLUGINS"
"""Environment variable with a `PluginPolicy`."""
_NEED = "all, none, allow=A,B or block=A,B, with names of plugins or of their distributions"


@dataclass(frozen=True, slots=True)
class Brought:
    """What a plugin handed in, by name."""

    hooks: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    proposers: tuple[str, ...] = ()
    logits_processors: tuple[str, ...] = ()
    state_backends: tuple[str, ...] = ()
    state_layouts: tuple[str, ...] = ()
    chat_parsers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of an installed plugin, or of a file that the user named."""

    name: str
    owner: str
    """Name and version of its distribution; a file's name and a hash of its text."""
    file: str
    """Where its module or package lies; empty where it was not found."""
    state: Literal["loaded", "left out", "blocked"]
    """blocked: the user does not want it (`--plugins`, $HEADWAY_PLUGINS)."""
    reason: str = ""
    """Why the plugin was left out."""
    brought: Brought = field(default_factory=Brought)
    remarks: tuple[str, ...] = ()
    """What the plugin raised in its trial, each of which costs the part of it that raised."""
    details: str = ""
    """Tracebacks, and what the plugin printed."""
    tried: str = ""
    """Date of the trial; empty where there was none."""
    target: str = ""
    """FILE.py or FILE.py:CLASS, of a file; empty for what is installed."""


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that is left out, with the reason."""

    name: str
    owner: str
    error: BaseException
    details: str = ""
    """Traceback, and what the plugin printed, of an error in another process."""

    @property
    def reason(self) -> str:
        """The error in one line."""
        if isinstance(self.error, PluginError):  # which names the plugin already
            return str(self.error).removeprefix(f"plugin {self.name!r} of {self.owner}: ")
        return f"{type(self.error).__name__}: {self.error}"

    def __str__(self) -> str:
        return f"{self.name} (from {self.owner}): {self.reason}"


@dataclass(frozen=True, slots=True)
class PluginPolicy:
    """Names of plugins or of distributions that a user wants or does not want; by default every plugin is wanted."""

    names: frozenset[str] = frozenset()
    allow: bool = False
    """Whether those names alone are wanted, and not all others."""

    @classmethod
    def parse(cls, text: str, option: str = "plugins") -> PluginPolicy:
        """Read all, none, allow=A,B or block=A,B.

        :raises ConfigError: something else.
        """
        verb, equals, listed = text.strip().partition("=")
        names = frozenset(_normal(name) for name in listed.split(",") if name.strip())
        if not equals and verb in ("all", ""):
            return cls()
        if not equals and verb == "none":
            return cls(allow=True)
        if verb not in ("allow", "block") or not names:
            raise ConfigError(option, _NEED, repr(text))
        return cls(names, allow=verb == "allow")

    @classmethod
    def of_environment(cls) -> PluginPolicy:
        """Read $HEADWAY_PLUGINS.

        :raises ConfigError: the variable holds no policy.
        """
        return cls.parse(os.environ.get(VARIABLE, ""), VARIABLE)

    def takes(self, plugin: PluginSource) -> bool:
        """Whether a plugin is wanted."""
        return bool(_names(plugin) & self.names) is self.allow

    def unknown(self, plugins: Iterable[PluginSource]) -> list[str]:
        """Return the policy's names that nothing installed has."""
        return sorted(self.names - {name for plugin in plugins for name in _names(plugin)})


def _names(plugin: PluginSource) -> frozenset[str]:
    return frozenset({_normal(plugin.name), _normal(plugin.owner.rpartition(" ")[0])})


def _normal(name: str) -> str:
    """Normalise a distribution's name, in which -, _ and . are equal, and upper and lower case are (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
