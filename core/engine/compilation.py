"""Which kernels are compiled while an engine serves: each one is a pause that nobody asked for."""

from __future__ import annotations

import sys
from typing import Any
from weakref import ref


class CompilationWatch:
    """Collects the names of Triton kernels that are compiled from now on, by this process, for whomever.

    It hangs itself into Triton's own hook, behind whoever is there already, and only where Triton has been loaded: the engine
    imports no kernel library. Libraries that compile by themselves are not seen.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        runtime = getattr(sys.modules.get("triton.knobs"), "runtime", None)
        if runtime is None:  # not loaded, or a Triton before 3.4
            return
        watch, before = ref(self), runtime.jit_post_compile_hook

        def hook(**compiled: Any) -> Any:
            watching = watch()
            if watching is not None and not compiled.get("already_compiled"):
                watching._names.append(_name(compiled))
            return before(**compiled) if before is not None else None

        runtime.jit_post_compile_hook = hook

    def take(self) -> tuple[str, ...]:
        """The names since the last call."""
        if not self._names:
            return ()
        names, self._names = tuple(self._names), []
        return names


def _name(compiled: dict[str, Any]) -> str:
    return str(getattr(compiled.get("fn"), "name", None) or compiled.get("repr", "a kernel"))
