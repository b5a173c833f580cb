"""Plugins that are installed or lie in a file: whose they are, and what they consist of. Nothing of them is imported here."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions
from itertools import islice
from pathlib import Path

from headway.core.contract.errors import PluginError
from headway.registry.given import GivenFile

_MOST_FILES = 2000
"""Files of a package that are looked at, to see whether it has changed."""


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that is left out, and why."""

    name: str
    owner: str
    error: BaseException
    details: str = ""
    """Traceback, and what the plugin printed, of an error in another process."""

    def __str__(self) -> str:
        if isinstance(self.error, PluginError):  # which names the plugin already
            return f"{self.name} (from {self.owner}): {str(self.error).removeprefix(f'plugin {self.name!r} of {self.owner}: ')}"
        return f"{self.name} (from {self.owner}): {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True)
class FoundPlugin:
    """An entry point and the distribution that declares it, or a file that the user names; nothing is imported before `load`."""

    name: str
    owner: str
    """Name and version of the distribution; a file's name and a hash of its text."""
    point: EntryPoint | GivenFile | Exception
    """What to load; or why the distribution's entry points cannot be read."""

    def load(self) -> object:
        """Import the plugin; raises whatever it raises."""
        if isinstance(self.point, Exception):
            raise self.point
        return self.point.load()

    @property
    def target(self) -> str:
        """FILE.py or FILE.py:CLASS, of a file; empty for an entry point."""
        return self.point.target if isinstance(self.point, GivenFile) else ""

    @property
    def file(self) -> Path | None:
        """Where the plugin's top-level module or package lies; None where nothing of that name is found."""
        if isinstance(self.point, GivenFile):
            return self.point.path.resolve()
        with suppress(Exception):  # of an entry point that names no module, or a finder of somebody's own
            assert isinstance(self.point, EntryPoint)
            top = importlib.util.find_spec(self.point.module.partition(".")[0])  # what lies below would be imported to find it
            assert top is not None
            if top.submodule_search_locations:
                return Path(next(iter(top.submodule_search_locations)))
            return Path(top.origin) if top.origin else None
        return None

    def digest(self) -> str:
        """Differs as soon as the plugin's version, its entry point or any of its files does."""
        file = self.file
        files = [] if file is None else [file] if file.is_file() else islice(sorted(file.rglob("*")), _MOST_FILES)
        facts: list[object] = [self.name, self.owner, str(self.point)]
        for path in files:
            if "__pycache__" not in path.parts:
                with suppress(OSError):
                    stat = path.stat()
                    facts.append((str(path), stat.st_mtime_ns, stat.st_size) if path.is_file() else str(path))
        return hashlib.sha256(repr(facts).encode("utf-8", "replace")).hexdigest()


def entry_points(group: str, blocked: frozenset[str] = frozenset()) -> Iterator[FoundPlugin]:
    """Every entry point of a group with its distribution's name and version; a distribution found twice counts once."""
    seen = set()
    for distribution in distributions():
        # Of hundreds of distributions few have the group, and a name and version cost the most to read.
        owner = str(getattr(distribution, "_path", "a distribution"))
        try:
            if f"[{group}]" not in (distribution.read_text("entry_points.txt") or ""):
                continue
            owner = f"{distribution.name} {distribution.version}"
            points = list(distribution.entry_points)
        except Exception as error:  # whatever somebody has written there
            yield FoundPlugin("entry_points.txt", owner, error)
            continue
        for point in points:
            if point.group == group and point.name not in blocked and (owner, point.name) not in seen:
                seen.add((owner, point.name))
                yield FoundPlugin(point.name, owner, point)
