"""A watch on kernels that are compiled while an engine serves: each of them makes a step wait."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

from headway.core.contract.compiled import listen

log = logging.getLogger("headway")


class CompilationWatch:
    """Collects the names of kernels that are compiled from now on by this process.

    Our own CUDA C++ announces its compilations (`core/contract/compiled.py`). Triton's are seen through its hook, which passes
    them on to a hook that was there before, and only where Triton has been loaded: the engine imports no kernel library.
    Libraries that compile by themselves are not seen.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        """tell: called with each name, too."""
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
        names = tuple(self._names)
        self._names = []
        return names

    def take_late(self) -> tuple[str, ...]:
        """The names since the last call, after a step that should have found everything compiled; the log names them, too."""
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
