"""Search for the tensors that an object references, by walking its fields. The result contains the path of each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_OWN = "headway."  # Modules whose objects are searched, besides torch's modules and Python's own containers


def held_tensors(*roots: object) -> dict[str, Tensor]:
    """Return path (such as `0.layers.3.norm.weight`) -> tensor, for tensors reachable from objects of Headway or torch. A tensor
    with several paths is returned once, with the first path found.

    Objects whose class sets `borrows` refer to tensors of other objects, and are not searched.
    """
    found: dict[str, Tensor] = {}
    seen: dict[int, object] = {}  # holds what properties return, so that no id is reused meanwhile
    waiting: list[tuple[str, object]] = [(str(number), root) for number, root in enumerate(roots)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            found[path] = value
            continue
        below = [(f"{path}.{name}", each) for name, each in _parts(value)]
        waiting += reversed(below)
    return found


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the names and values in an object; yield nothing if the object is not searched."""
    if getattr(type(value), "borrows", False):
        return
    if isinstance(value, dict):
        yield from ((str(name), each) for name, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(number), each) for number, each in enumerate(value))
    elif isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, FunctionType):
        yield from ((str(number), cell.cell_contents) for number, cell in enumerate(value.__closure__ or ()) if _is_filled(cell))
    elif isinstance(value, nn.Module) or (type(value).__module__.startswith(_OWN) and not isinstance(value, type)):
        yield from vars(value).items() if hasattr(value, "__dict__") else ()
        slots = (name for kind in type(value).__mro__ for name in _slots(kind))
        yield from ((name, getattr(value, name)) for name in slots if hasattr(value, name))


def _slots(kind: type) -> tuple[str, ...]:
    named = kind.__dict__.get("__slots__", ())
    return tuple(name for name in ((named,) if isinstance(named, str) else named) if not name.startswith("__"))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that its function has not bound yet
        return False
