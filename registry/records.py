"""What is known of plugins without importing them: which ones a user wants, what each brought, and why one was left out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from headway.core.contract.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from headway.registry.plugin_sources import PluginSource

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
    linear_kernels: tuple[str, ...] = ()
    experts_kernels: tuple[str, ...] = ()
    all_reduce_kernels: tuple[str, ...] = ()
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
