"""Which kernels are compiled while an engine serves: each one is a pause that nobody asked for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

from headway.core.contract.compiled import listen

log = logging.getLogger("headway")


class CompilationWatch:
    """Collects the names of kernels that are compiled from now on, by this process, for whomever.

    Our own CUDA C++ tells of itself (`core/contract/compiled.py`). For Triton it hangs itself into Triton's hook, behind whoever
    is there already, and only where Triton has been loaded: the engine imports no kernel library. Libraries that compile by
    themselves are not seen.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        """tell: is called with each name, too."""
        self._tell = tell
        self._names: list[str] = []
        listen(self._add)
        runtime = getattr(sys.modules.get("triton.knobs"), "runtime", None)
        if runtime is None:  # not loaded, or a Triton before 3.4
            return
        watch, before = ref(self), runtime.jit_post_compile_hook

        def hook(**compiled: Any) -> Any:
            watching = watch()
            if watching is not None and not compiled.get("already_compiled"):
                watching._add(_name(compiled))
            return before(**compiled) if before is not None else None

        runtime.jit_post_compile_hook = hook

    def take(self) -> tuple[str, ...]:
        """The names since the last call."""
        if not self._names:
            return ()
        names, self._names = tuple(self._names), []
        return names

    def take_late(self) -> tuple[str, ...]:
        """As `take`, after a step that should have found everything compiled; the log names what it had to wait for."""
        names = self.take()
        for name in names:
            log.warning("compiled after the engine was ready: %s; a step waited for it", name)
        return names

    def _add(self, name: str) -> None:
        self._names.append(name)
        if self._tell is not None:
            self._tell(name)


def _name(compiled: dict[str, Any]) -> str:
    return str(getattr(compiled.get("fn"), "name", None) or compiled.get("repr", "a kernel"))
