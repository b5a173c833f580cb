"""Which of the installed plugins a user wants: `--plugins` and $HEADWAY_PLUGINS."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from headway.core.contract.errors import ConfigError
from headway.registry.discovery import FoundPlugin

VARIABLE = "HEADWAY_PLUGINS"
_NEED = "all, none, allow=A,B or block=A,B, with names of plugins or of their distributions"


@dataclass(frozen=True, slots=True)
class PluginPolicy:
    """Names of entry points or of distributions; by default every plugin is wanted."""

    names: frozenset[str] = frozenset()
    allow: bool = False
    """Whether those names alone are wanted, and not all others."""

    @classmethod
    def parse(cls, text: str, option: str = "plugins") -> PluginPolicy:
        """From all, none, allow=A,B or block=A,B.

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
        """What $HEADWAY_PLUGINS says.

        :raises ConfigError: nothing that can be understood.
        """
        return cls.parse(os.environ.get(VARIABLE, ""), VARIABLE)

    def takes(self, plugin: FoundPlugin) -> bool:
        """Whether a plugin is wanted."""
        return bool(self._of(plugin) & self.names) is self.allow

    def unknown(self, plugins: Iterable[FoundPlugin]) -> list[str]:
        """Names that nothing installed has."""
        return sorted(self.names - {name for plugin in plugins for name in self._of(plugin)})

    @staticmethod
    def _of(plugin: FoundPlugin) -> frozenset[str]:
        return frozenset({_normal(plugin.name), _normal(plugin.owner.rpartition(" ")[0])})


def _normal(name: str) -> str:
    """Names of distributions do not tell - from _ and ., nor upper from lower case (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
