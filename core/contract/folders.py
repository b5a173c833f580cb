"""Where Headway keeps what is worth keeping: converted models, crossover tables, compiled kernels."""

from __future__ import annotations

import logging
import os
import shutil
from functools import cache
from pathlib import Path

import platformdirs

log = logging.getLogger("headway")

_LITTLE = 64 * 2**20
"""Bytes that the kernels of one model may take."""


def cache_folder() -> Path:
    """The folder $HEADWAY_CACHE where it is set, else headway in the user's cache folder, as the operating system has it."""
    if os.environ.get("HEADWAY_CACHE"):
        return Path(os.environ["HEADWAY_CACHE"])
    return platformdirs.user_cache_path("headway", appauthor=False)


def kernel_folders() -> tuple[Path, Path]:
    """Where compiled kernels are kept: our CUDA C++; and what Triton compiles, in $TRITON_CACHE_DIR where it is set."""
    chosen = os.environ.get("TRITON_CACHE_DIR")
    return cache_folder() / "kernels", Path(chosen) if chosen else cache_folder() / "triton"


def obstacle(folder: Path) -> str:
    """Why nothing can be kept in a folder, which need not exist yet; empty if nothing speaks against it."""
    parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not parent.is_dir():
        return f"{parent} is no folder"
    if not os.access(parent, os.W_OK | os.X_OK):
        return "cannot be written"
    free = shutil.disk_usage(parent).free
    return f"{free / 2**20:.0f} MiB free" if free < _LITTLE else ""


@cache
def warn_unwritable(folder: Path, why: str) -> None:
    """Say once that compiled kernels are not kept, and what that costs."""
    log.warning(
        "kernel cache: %s cannot be written (%s): every process compiles its kernels again, a second or so each; HEADWAY_CACHE "
        "names another folder",
        folder,
        why,
    )
