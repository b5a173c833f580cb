"""Operators that libraries register with torch, called by argument name: their lists move from one release to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.contract.errors import BackendError


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
