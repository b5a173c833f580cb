"""Entry points, one by one: a broken plugin is a record, not a crash."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions

from headway.core.contract.errors import PluginError


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that did not load, and what it raised."""

    name: str
    owner: str
    error: Exception | SystemExit

    def __str__(self) -> str:
        if isinstance(self.error, PluginError):  # which names the plugin already
            return f"{self.name} (from {self.owner}): {str(self.error).removeprefix(f'plugin {self.name!r} of {self.owner}: ')}"
        return f"{self.name} (from {self.owner}): {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True)
class FoundPlugin:
    """An entry point and the distribution that declares it; nothing is imported before `load`."""

    name: str
    owner: str
    point: EntryPoint | Exception
    """What to load; or why the distribution's entry points cannot be read."""

    def load(self) -> object:
        """Import the plugin; raises whatever it raises."""
        if isinstance(self.point, Exception):
            raise self.point
        return self.point.load()


def entry_points(group: str, blocked: frozenset[str] = frozenset()) -> Iterator[FoundPlugin]:
    """Every entry point of a group with its distribution's name and version; a distribution found twice counts once."""
    seen = set()
    for distribution in distributions():
        # Of hundreds of distributions few have the group, and a name and version cost the most to read.
        if f"[{group}]" not in (distribution.read_text("entry_points.txt") or ""):
            continue
        owner = f"{distribution.name} {distribution.version}"
        try:
            points = list(distribution.entry_points)
        except Exception as error:  # whatever somebody has written there
            yield FoundPlugin("entry_points.txt", owner, error)
            continue
        for point in points:
            if point.group == group and point.name not in blocked and (owner, point.name) not in seen:
                seen.add((owner, point.name))
                yield FoundPlugin(point.name, owner, point)
