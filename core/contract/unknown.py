"""Keywords that do not exist, answered with the nearest that do: a typing mistake, or a name that another library uses."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from headway.core.contract.errors import ConfigError

C = TypeVar("C", bound=type)


def refuse_unknown(
    owner: str, given: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str], page: str = "docs/options.md"
) -> None:
    """Check the names of keywords.

    owner: whose keywords they are. elsewhere: names that other libraries use -> what to write here. page: lists those of owner.

    :raises ConfigError: the first that does not exist, with what to write in its place.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            advice = elsewhere.get(name) or (f"did you mean {near[0]}?" if near else f"{page} lists them")
            raise ConfigError(name, f"an option of {owner}", repr(name), advice)


def knows_its_fields(elsewhere: Mapping[str, str], page: str) -> Callable[[C], C]:
    """Let a dataclass refuse unknown keywords as `refuse_unknown` does, where Python's own error names nothing to do."""

    def decorate(cls: C) -> C:
        initialise = cls.__init__  # type: ignore[misc]
        names = [field.name for field in fields(cls)]
        known = frozenset(names)

        @functools.wraps(initialise)
        def __init__(self: object, *args: Any, **options: Any) -> None:
            if not options.keys() <= known:
                refuse_unknown(cls.__name__, options, names, elsewhere, page)
            initialise(self, *args, **options)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate
