"""Where a build of FlashAttention 3 may lie on this machine. Nothing is imported: a package is found by its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "HEADWAY_FA3_LIBRARY"
"""Environment variable with the path of a compiled library; where it is set no other place is looked at."""


@dataclass(frozen=True, slots=True)
class Home:
    """A package that ships FlashAttention 3."""

    name: str
    package: str
    """Top-level module."""
    pattern: str
    """Of the compiled library, inside the package's folder."""


HOMES = (
    Home("flash-attn-3", "flash_attn_3", "_C*.so"),
    Home("vllm", "vllm", "vllm_flash_attn/_vllm_fa3_C*.so"),
    Home("sgl-kernel", "sgl_kernel", "**/flash_ops*.so"),
)
"""In the order in which they are tried. torch is not among them: its `activate_flash_attention_impl("FA3")` imports the first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A compiled library that may be FlashAttention 3."""

    home: str
    """Who brought it, for texts: a package or the environment variable."""
    path: Path


def candidates() -> Iterator[Candidate]:
    """The libraries that are there, the preferred first."""
    named = os.environ.get(VARIABLE)
    if named:
        yield Candidate(VARIABLE, Path(named).expanduser())
        return
    for home in HOMES:
        for folder in _folders(home.package):
            for path in sorted(folder.glob(home.pattern)):
                yield Candidate(home.name, path)


def _folders(package: str) -> list[Path]:
    try:
        found = find_spec(package)
    except (ImportError, ValueError):  # a module in sys.modules without a spec
        return []
    return [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
