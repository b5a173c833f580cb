"""Records about plugins, readable without importing the plugins: the user's policy, the items that each plugin registered, and
the reasons why plugins were excluded."""

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
"""Owner of Headway's own backends."""
VARIABLE = "HEADWAY_PLUGINS"
"""Environment variable whose value is a `PluginPolicy`."""
_NEED = "all, none, allow=A,B or block=A,B, with names of plugins or of their distributions"


@dataclass(frozen=True, slots=True)
class Brought:
    """Names of the items that a plugin registered, by kind of item."""

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
    attention_rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """State of an installed plugin, or of a plugin file that the user named."""

    name: str
    owner: str
    """Name and version of the plugin's distribution, or name and hash of its file."""
    file: str
    """Path of the plugin's module or package; "" if the path was not found."""
    state: Literal["loaded", "left out", "blocked"]
    """State of the plugin. blocked means excluded by the user (`--plugins`, $HEADWAY_PLUGINS)."""
    reason: str = ""
    """Reason why the plugin was excluded."""
    brought: Brought = field(default_factory=Brought)
    remarks: tuple[str, ...] = ()
    """Exceptions in the plugin's trial. Each part that raised an exception is not registered; all other parts are."""
    details: str = ""
    """Tracebacks and output of the plugin."""
    tried: str = ""
    """Date of the trial; "" if there was none."""
    target: str = ""
    """The plugin as FILE.py or FILE.py:CLASS if it is a file; "" for an installed plugin."""


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that was excluded, with the reason."""

    name: str
    owner: str
    error: BaseException
    details: str = ""
    """Traceback and output of the plugin, if the error occurred in another process."""

    @property
    def reason(self) -> str:
        """The error in one line."""
        if isinstance(self.error, PluginError):  # it already names the plugin
            return str(self.error).removeprefix(f"plugin {self.name!r} of {self.owner}: ")
        return f"{type(self.error).__name__}: {self.error}"

    def __str__(self) -> str:
        return f"{self.name} (from {self.owner}): {self.reason}"


@dataclass(frozen=True, slots=True)
class PluginPolicy:
    """Names of plugins or distributions that a user allows or blocks. By default every plugin is allowed."""

    names: frozenset[str] = frozenset()
    allow: bool = False
    """True if only the plugins in `names` are allowed; False if only the plugins in `names` are blocked."""

    @classmethod
    def parse(cls, text: str, option: str = "plugins") -> PluginPolicy:
        """Parse a policy: all, none, allow=A,B or block=A,B.

        :raises ConfigError: if the text is not one of these formats.
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
        """Return the policy in $HEADWAY_PLUGINS.

        :raises ConfigError: if the variable is not a policy.
        """
        return cls.parse(os.environ.get(VARIABLE, ""), VARIABLE)

    def takes(self, plugin: PluginSource) -> bool:
        """Return whether a plugin is allowed."""
        return bool(_names(plugin) & self.names) is self.allow

    def unknown(self, plugins: Iterable[PluginSource]) -> list[str]:
        """Return the policy's names that match no installed plugin."""
        return sorted(self.names - {name for plugin in plugins for name in _names(plugin)})


def _names(plugin: PluginSource) -> frozenset[str]:
    return frozenset({_normal(plugin.name), _normal(plugin.owner.rpartition(" ")[0])})


def _normal(name: str) -> str:
    """Return a distribution's name normalized as in PEP 503: in lower case, with runs of -, _ and . replaced by one -."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
