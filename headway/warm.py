"""Making ready: what an engine's start compiles or loads, and what of it is kept for the next one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.contract.folders import kernel_folders
from headway.core.engine.compilation import CompilationWatch


@dataclass(frozen=True, slots=True)
class Warmed:
    """What a start came to."""

    seconds: float
    """From the call to an engine that is ready, random weights included."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Variants of each kernel that were compiled, or loaded from what was compiled before, by name."""
    compiled: int = 0
    """Those of them that were not kept yet, and are now."""
    folders: dict[Path, int] = field(default_factory=dict)
    """Bytes in each folder of kernels."""


def warm(start: Callable[[], object], tell: Callable[[int], None] = lambda count: None) -> Warmed:
    """Start an engine and note what it compiles or loads.

    start: makes the engine. tell: is called with the number of kernels so far.
    """
    with suppress(ImportError):
        import headway.backends.triton  # noqa: F401 -- the watch looks for Triton where it is loaded
    folders = kernel_folders()
    before, kernels = _cubins(folders), Counter[str]()

    def note(name: str) -> None:
        kernels[name.split(" of ")[0]] += 1
        tell(kernels.total())

    watch = CompilationWatch(note)
    began = time.perf_counter()
    start()
    seconds = time.perf_counter() - began
    del watch
    return Warmed(seconds, kernels, len(_cubins(folders) - before), {folder: _bytes(folder) for folder in folders})


def _cubins(folders: Iterable[Path]) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*.cubin")}


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
