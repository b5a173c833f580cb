"""vLLM's modules under `headway`: made from the table of names when a program imports them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from headway.compat.vllm.names import HOMES, LACKING, LACKING_MODULES, MODULES
from headway.core.contract.errors import HeadwayError

_PACKAGE = "headway"


class LackingError(HeadwayError, ValueError):
    """A name of vLLM's was used that Headway has nothing for."""


def find_module(full_name: str) -> ModuleSpec | None:
    """The spec of a module of vLLM's, `headway.sampling_params` for example; None: vLLM has none of that name.

    :raises ImportError: vLLM has the module and Headway nothing for it; the message says why.
    """
    name = full_name.removeprefix(f"{_PACKAGE}.")
    if name in MODULES:
        spec = ModuleSpec(full_name, _Loader(name), is_package=True)
        spec.submodule_search_locations = []
        return spec
    reason = _reason(name)
    if reason is not None:
        raise ImportError(f"{full_name}: {reason}", name=full_name)
    return None


def lend(module: str, name: str) -> Any:
    """What a name of a module of vLLM's is here; for one that is lacking, a stand-in whose use says why.

    module: without vLLM's own name, empty for vLLM itself.

    :raises AttributeError: the module has no such name.
    """
    if name not in MODULES[module].split():
        place = f"{_PACKAGE}.{module}" if module else _PACKAGE
        reason = LACKING.get(name) or _reason(module)
        raise AttributeError(f"module {place!r} has no attribute {name!r}" + (f": {reason}" if reason else ""))
    if name in HOMES:
        home, _, own = HOMES[name].rpartition(".")
        return getattr(import_module(home), own)
    return _stand_in(name, LACKING[name])


def _reason(module: str) -> str | None:
    """Why a module is lacking: the reason of the nearest one above it that has one."""
    parts = module.split(".")
    above = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((LACKING_MODULES[each] for each in above if each in LACKING_MODULES), None)


def _stand_in(name: str, reason: str) -> type:
    """A class in the place of a name that is lacking: it may be named in annotations, and says why when it is used."""

    def refuse(*_: object, **__: object) -> Any:
        raise LackingError(f"{name}: {reason}")

    kind = type("Lacking", (type,), {"__getattr__": refuse, "__call__": refuse})
    made: type = kind(name, (), {"__module__": _PACKAGE, "__doc__": reason})
    return made


class _Loader(Loader):
    """Fills a module of the table."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        """Let the module lend its names when they are used."""
        names = MODULES[self._name].split()
        module.__doc__ = f"Names of vLLM's module {self._name}."
        module.__getattr__ = _lender(self._name)  # type: ignore[method-assign]
        module.__dict__["__all__"] = names
        module.__dict__["__dir__"] = lambda: sorted(names)


def _lender(module: str) -> Callable[[str], Any]:
    return lambda name: lend(module, name)
