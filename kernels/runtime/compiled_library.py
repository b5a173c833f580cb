"""Compiled third-party libraries: search without importing, a trial in a child process, and operators whose arguments are bound
by name."""

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
    """An operator of torch and the position of each of its arguments."""

    call: Any
    """Operator overload. Arguments are passed by position."""
    place: dict[str, int]
    """Name by which the caller passes an argument -> position of the argument."""
    at_rest: tuple[Any, ...]
    """Value for each position if the argument is not given: the declared default, or a value that disables the argument."""

    @classmethod
    def of(
        cls,
        overload: Any,
        needed: Collection[str] = (),
        given: Collection[str] = (),
        at_rest: Mapping[str, Any] | None = None,
        other_names: Mapping[str, str] | None = None,
    ) -> BoundOperator:
        """Bind an operator by its schema.

        needed: names of arguments that the operator must have. given: names of arguments that the caller always passes if the
        operator has them. at_rest: values that disable arguments without a declared default. Optional arguments are disabled by
        None. other_names: map from a release's argument name to the caller's name.
        :raises BackendError: if a needed argument is missing, or the operator requires an argument that Headway does not know.
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
        """Return all arguments in order, with defaults for those that are not given.

        :raises KeyError: if the operator does not have a given argument.
        """
        values = list(self.at_rest)
        for name, value in given.items():
            values[self.place[name]] = value
        return values

    def __call__(self, **given: Any) -> Any:
        """Call the operator, with defaults for the arguments that are not given."""
        return self.call(*self.arguments(**given))


SECONDS = 120
"""Timeout of the trial, in seconds. On a cold disk, most of the time is for importing torch and reading 150 MB of kernels."""


@dataclass(frozen=True, slots=True)
class Home:
    """A package that may contain a library."""

    name: str
    package: str
    """Name of the top-level module."""
    pattern: str
    """Glob pattern of the compiled library's file, relative to the package's folder."""


@dataclass(frozen=True, slots=True)
class LibraryCandidate:
    """A compiled library found by `LibrarySearch`."""

    home: str
    """Name of the package or environment variable that provided the library, for messages."""
    path: Path


@dataclass(frozen=True, slots=True)
class LibrarySearch:
    """Search for one compiled library: the packages that may contain the library, and the trial of each library found."""

    name: str
    """Name of the library, for messages and for the file of cached verdicts."""
    variable: str
    """Environment variable with the path of a compiled library. If it is set, the packages are not searched."""
    homes: tuple[Home, ...]
    """Packages that may contain the library, in order of preference."""
    child: str
    """Name of the module that the child process runs to load and try a library."""

    @property
    def hint(self) -> str:
        """Hint for the user if no library was found."""
        return f"install {', '.join(home.name for home in self.homes)}, or set {self.variable} to a compiled library"

    def candidates(self) -> Iterator[LibraryCandidate]:
        """Yield the libraries that exist, in the order of preference."""
        named = os.environ.get(self.variable)
        if named:
            yield LibraryCandidate(self.variable, Path(named).expanduser())
            return
        for home in self.homes:
            for folder in _folders(home.package):
                for path in sorted(folder.glob(home.pattern)):
                    yield LibraryCandidate(home.name, path)

    def verdict(self, candidate: LibraryCandidate) -> dict[str, str]:
        """Return the child process's verdict on a library: {"namespace": ...} or {"error": ...}. A success is cached on disk."""
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
        """Return the result of `load` for the first library that works, or (None, the reason why each library failed).

        what, need: names of the library and of the requirement, for messages. load: called with a candidate and the namespace
        that the child process reported. `load` may raise OSError or BackendError if this process has loaded another build with
        the same name.
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
            log.warning("%s: the library is tested at every start, which takes seconds: %s", self.name, why)


def _folders(package: str) -> list[Path]:
    try:
        found = find_spec(package)
    except (ImportError, ValueError):  # a module in sys.modules has no spec
        return []
    return [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []


def ask(command: Sequence[str]) -> dict[str, str]:
    """Run the child process and return its verdict, which is {"error": ...} if the child crashes or does not answer in time."""
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
