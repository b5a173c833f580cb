"""Compiled libraries of other packages: found without an import and tried in a process of their own; their operators by name."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from headway.core.contract.errors import BackendError
from headway.core.contract.support import YES, Support
from headway.core.system.child import Child, ChildDied, python_command
from headway.core.system.files import cache_folder, read_text, write_whole
from headway.core.system.json_text import parse_json

log = logging.getLogger("headway")
T = TypeVar("T")


@dataclass(frozen=True)
class BoundOperator:
    """One operator and the place of each of its arguments."""

    call: Any
    """The overload: takes its arguments by position."""
    place: dict[str, int]
    """Name -> position, under the caller's names."""
    at_rest: tuple[Any, ...]
    """A value for each position: the declared default, or the one that switches the argument off."""

    @classmethod
    def of(
        cls,
        overload: Any,
        needed: Collection[str] = (),
        given: Collection[str] = (),
        at_rest: Mapping[str, Any] | None = None,
        other_names: Mapping[str, str] | None = None,
    ) -> BoundOperator:
        """Read the operator's schema.

        needed: arguments that it must have. given: arguments that it is always given where it has them. at_rest: values that
        leave out what an argument is for, where it declares no default; an optional one is left out by None. other_names: what a
        release calls an argument -> what the caller calls it.

        :raises BackendError: an argument that is needed is missing, or one that must be given is not known.
        """
        place, values, unknown = {}, [], []
        rest, given = at_rest or {}, {*needed, *given}
        for position, argument in enumerate(overload._schema.arguments):
            name = (other_names or {}).get(argument.name, argument.name)
            place[name] = position
            if argument.has_default_value():
                values.append(argument.default_value)
            else:
                values.append(rest.get(name))
                if name not in rest and name not in given and argument.type.kind() != "OptionalType":
                    unknown.append(argument.name)
        missing = sorted(set(needed) - set(place))
        if missing:
            raise BackendError(f"{overload.name()} has no argument {', '.join(missing)}")
        if unknown:
            raise BackendError(f"{overload.name()} wants {', '.join(unknown)}, which Headway does not know")
        return cls(overload, place, tuple(values))

    def arguments(self, **given: Any) -> list[Any]:
        """The list of all arguments, those not given at rest.

        :raises KeyError: the operator has no such argument.
        """
        values = list(self.at_rest)
        for name, value in given.items():
            values[self.place[name]] = value
        return values

    def __call__(self, **given: Any) -> Any:
        """Call it; arguments not given are at rest."""
        return self.call(*self.arguments(**given))


SECONDS = 120
"""For the trial, most of it for the import of torch and 150 MB of kernels from a cold disk."""


@dataclass(frozen=True, slots=True)
class Home:
    """A package that ships a library."""

    name: str
    package: str
    """Top-level module."""
    pattern: str
    """Pattern of the compiled library's file, inside the package's folder."""


@dataclass(frozen=True, slots=True)
class LibraryCandidate:
    """A compiled library that may be the one that is looked for."""

    home: str
    """Who brought it, for texts: a package or the environment variable."""
    path: Path


@dataclass(frozen=True, slots=True)
class LibrarySearch:
    """Where one library is looked for, and what tries it."""

    name: str
    """For texts, and the file of verdicts in the cache folder."""
    variable: str
    """Environment variable with the path of a compiled library; where it is set no other place is looked at."""
    homes: tuple[Home, ...]
    """Packages that bring the library, in the order in which they are tried."""
    child: str
    """Module of the process that loads a library to try it."""

    @property
    def hint(self) -> str:
        """What to do where none was found."""
        return f"install {', '.join(home.name for home in self.homes)}, or set {self.variable} to a compiled library"

    def candidates(self) -> Iterator[LibraryCandidate]:
        """The libraries that are there, the preferred first."""
        named = os.environ.get(self.variable)
        if named:
            yield LibraryCandidate(self.variable, Path(named).expanduser())
            return
        for home in self.homes:
            for folder in _folders(home.package):
                for path in sorted(folder.glob(home.pattern)):
                    yield LibraryCandidate(home.name, path)

    def verdict(self, candidate: LibraryCandidate) -> dict[str, str]:
        """What the child says of a library: {"namespace": ...} or {"error": ...}. A good answer is kept on disk."""
        try:
            stat = candidate.path.stat()
        except OSError as error:
            return {"error": error.strerror or str(error)}
        gpu = "{}.{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "none"
        place = f"{candidate.path.resolve()} "
        key = f"{place}{stat.st_mtime_ns} {stat.st_size} torch {torch.__version__} GPU {gpu}"
        known = self._read()
        if key in known:
            return {"namespace": known[key]}
        found = ask(python_command(self.child, str(candidate.path)))
        if "namespace" in found:
            others = {other: name for other, name in known.items() if not other.startswith(place)}
            self._write({**others, key: found["namespace"]})
        return found

    def first(self, what: str, need: str, load: Callable[[LibraryCandidate, str], T]) -> tuple[T | None, Support]:
        """Return what `load` makes of the first library that works; (None, why not), with a reason for each that was found.

        what, need: the library and what is looked for, for texts. load: called with the namespace that the child has told; it
        may raise OSError or BackendError where this process holds another build of the same name.
        """
        refused = YES
        for candidate in self.candidates():
            found, it = self.verdict(candidate), f"{what} of {candidate.home}"
            if "error" in found:
                refused &= Support.no(it, "to work here", f"{found['error']} ({candidate.path})", self.hint)
                continue
            try:
                return load(candidate, found["namespace"]), YES
            except (OSError, BackendError) as error:
                refused &= Support.no(it, "to load", f"{error} ({candidate.path})", self.hint)
        return None, refused if not refused else Support.no(what, need, "none", self.hint)

    @property
    def _answers(self) -> Path:
        return cache_folder() / f"{self.name}.json"

    def _read(self) -> dict[str, str]:
        try:
            known = parse_json(read_text(self._answers), self._answers.name)
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _write(self, known: dict[str, str]) -> None:
        path = self._answers
        try:
            write_whole(path, json.dumps(known).encode())
        except OSError as error:
            why = f"{path} cannot be written ({error})"
            log.warning("%s: its library is tried anew at every start, some seconds: %s", self.name, why)


def _folders(package: str) -> list[Path]:
    try:
        found = find_spec(package)
    except (ImportError, ValueError):  # a module in sys.modules without a spec
        return []
    return [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []


def ask(command: Sequence[str]) -> dict[str, str]:
    """Run the child; its death is an answer too."""
    try:
        with Child(command) as child:
            return {str(name): str(text) for name, text in child.answer(SECONDS).items()}
    except ChildDied as died:
        if died.timed_out:
            return {"error": f"did not answer within {SECONDS} s"}
        how, last = died.how.removeprefix("the process "), died.last_line[:200] or "no message"
        return {"error": f"crashes the process that loads it ({how}: {last}); it was built for another torch?"}
    except OSError as error:
        return {"error": f"cannot be tried: {error}"}
