"""Errors that a user or a plugin can cause. Each message says what was requested, what is needed, what was found and what to
do."""

from __future__ import annotations

import difflib
import functools
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from headway.core.contract.support import Reason


class HeadwayError(Exception):
    """Base of all errors that the caller can fix. The command line prints them without a traceback and exits with code 2."""

    on_command_line = ""
    """Original message, with command-line flags, if `name_arguments` has put Python arguments into the message of `str`.
    Otherwise empty."""

    def name_arguments(self, names: Collection[str]) -> None:
        """Replace the command-line flags of the arguments in `names` with Python arguments in the message."""
        if self.args and isinstance(self.args[0], str):
            self.on_command_line = str(self)
            self.args = with_arguments(self.args[0], names), *self.args[1:]

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling between processes, since constructors take arguments other than the message."""
        return _again, (type(self), self.args), self.__dict__


_FLAG = re.compile(r"--([a-z][a-z0-9-]*)(?: (?!or\b|and\b|--)([^\s;()]*[^\s;(),.])(?= --|[,;)]|\.?$))?")
_COMMAND = re.compile(r"\bheadway [a-z]")


def with_arguments(text: str, names: Collection[str]) -> str:
    """Return a text with command-line flags replaced by Python arguments: `--kv-layout nhd` becomes `kv_layout="nhd"`.

    names: Python arguments that can replace flags. Other flags are unchanged, as are lines that contain a shell command.
    """

    def line_with_arguments(line: str) -> str:
        parts, last = list[str](), 0
        for flag in _FLAG.finditer(line):
            name, value = flag[1].replace("-", "_"), flag[2]
            if name not in names:
                continue
            between = line[last : flag.start()]
            parts.append(", " if between == " " and last else between)
            plain = value is not None and re.fullmatch(r"\d+(\.\d+)?", value)
            parts.append(name if value is None else f"{name}={value}" if plain else f'{name}="{value}"')
            last = flag.end()
        return "".join([*parts, line[last:]])

    return "\n".join(line if _COMMAND.search(line) else line_with_arguments(line) for line in text.split("\n"))


def _again(kind: type[HeadwayError], args: tuple[object, ...]) -> HeadwayError:
    return kind.__new__(kind, *args)


class ConfigError(HeadwayError, ValueError):
    """An option or argument with an invalid value."""

    def __init__(self, what: str, need: str, got: object, hint: str = "") -> None:
        self.reason = Reason(what, need, str(got), hint)
        super().__init__(str(self.reason))


class PromptError(ConfigError):
    """A prompt that cannot run: empty, too long, or with token ids outside the vocabulary."""


class ModelError(HeadwayError):
    """A model that cannot be found, read or run."""


class PluginError(HeadwayError):
    """A plugin that violates the contract: a duplicate name, a wrong api_version, a hook with a wrong signature."""


class UnknownBackendError(HeadwayError):
    """A backend name that is not registered."""

    def __init__(
        self, name: str, known: Mapping[str, str], failures: Sequence[str] = (), word: str = "attention backend"
    ) -> None:
        near = difflib.get_close_matches(name, known, n=1)
        nearest = f" Nearest: {near[0]}." if near else ""
        lines = [f"{word}: asked for {name!r}, which nobody registered.{nearest} Registered here:"]
        if word.endswith("kernel"):  # dozens, which share a few states
            shared = {state: [each for each in known if known[each] == state] for state in known.values()}
            lines += [f"  {state}: {', '.join(names)}" for state, names in shared.items()]
        else:
            lines += [f"  {known_name:<12} {state}" for known_name, state in known.items()]
        lines += [f"  plugin that failed to load: {failure}" for failure in failures]
        super().__init__("\n".join(lines))


class UnsupportedError(HeadwayError):
    """A backend, layout or block size that was requested by name but does not support a layer or step. Never replaced by
    another."""

    def __init__(self, asked: str, reasons: Sequence[Reason], fix: str = "") -> None:
        self.asked = asked
        self.reasons = tuple(reasons)
        self.fix = fix
        lines = [f"{asked} cannot be used here:"]
        lines += [f"  {reason}" for reason in self.reasons]
        if fix:
            lines.append(f"  nearest fix: {fix}")
        super().__init__("\n".join(lines))


class BackendError(HeadwayError):
    """An exception that a backend raised during a step."""


T = TypeVar("T")


@contextmanager
def making(who: str) -> Iterator[None]:
    """Convert exceptions of a plugin's constructor, `SystemExit` included, to errors that name the plugin.

    who: kind and name of the plugin's object. `HeadwayError` and the user's `KeyboardInterrupt` are passed on.

    :raises PluginError: if the constructor raises.
    """
    try:
        yield
    except HeadwayError:
        raise
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
        if interrupted or isinstance(error, GeneratorExit):
            raise
        said = " ".join(str(error).split())
        raise PluginError(f"{who} cannot be made: {type(error).__name__}{': ' * bool(said)}{said}") from error


def made_by(who: str, make: Callable[[], T], *methods: str) -> T:
    """Return the result of a plugin's constructor.

    who: kind and name of the plugin's object.
    methods: methods that the result must have; "__call__" requires a function.

    :raises PluginError: if the constructor raises, or its result lacks a method.
    """
    with making(who):
        made = make()
    for method in methods:
        if not callable(getattr(made, method, None)):
            raise PluginError(f"{who} cannot be made: what it makes needs {method}(), got a {type(made).__name__} without")
    return made


def known_cause(text: str) -> str:
    """Return an explanation of a library's error message, or "" if there is none."""
    if "active drivers" in text:
        return "a Triton kernel without a GPU: TRITON_INTERPRET=1 in the environment runs it on a CPU, slowly"
    return ""


C = TypeVar("C", bound=type)


def refuse_unknown(
    owner: str, given: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str], page: str = "docs/options.md"
) -> None:
    """Check that the keywords in `given` are all known.

    owner: class or function that takes the keywords.
    elsewhere: names in other libraries -> Headway's name or advice.
    page: page that lists the owner's keywords.

    :raises ConfigError: if a keyword does not exist; the message says what to write instead.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            advice = elsewhere.get(name) or (f"did you mean {near[0]}?" if near else f"{page} lists them")
            raise ConfigError(name, f"an option of {owner}", repr(name), advice)


def refuses_unknown_fields(
    elsewhere: Mapping[str, str], page: str, translate: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
) -> Callable[[C], C]:
    """Return a decorator that makes a dataclass refuse unknown keywords as `refuse_unknown` does.

    translate: function that maps keywords, some of them unknown, to the dataclass's keywords. None means no translation.
    """

    def decorate(cls: C) -> C:
        initialise = cls.__init__  # type: ignore[misc]
        names = [field.name for field in fields(cls)]
        known = frozenset(names)

        @functools.wraps(initialise)
        def __init__(self: object, *args: Any, **options: Any) -> None:
            if not options.keys() <= known:
                options = dict(translate(options)) if translate is not None else options
                refuse_unknown(cls.__name__, options, names, elsewhere, page)
            initialise(self, *args, **options)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate
