"""Folders in which Headway keeps converted models, crossover tables and compiled kernels."""

from __future__ import annotations

import logging
import os
import shutil
from functools import cache
from pathlib import Path

import platformdirs

log = logging.getLogger("headway")

_LITTLE = 64 * 2**20
"""Free bytes below which a folder counts as full: the kernels of one model may take as many."""


def cache_folder() -> Path:
    """Return $HEADWAY_CACHE where it is set, else `headway` in the user's cache folder on this operating system."""
    if os.environ.get("HEADWAY_CACHE"):
        return Path(os.environ["HEADWAY_CACHE"])
    return platformdirs.user_cache_path("headway", appauthor=False)


def kernel_folders() -> tuple[Path, Path]:
    """Return the folders of compiled kernels: of CUDA C++, and of Triton, which is $TRITON_CACHE_DIR where that is set."""
    chosen = os.environ.get("TRITON_CACHE_DIR")
    return cache_folder() / "kernels", Path(chosen) if chosen else cache_folder() / "triton"


def obstacle(folder: Path) -> str:
    """Return why no file can be kept in a folder, which need not exist yet; empty where one can."""
    parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not parent.is_dir():
        return f"{parent} is not a folder"
    if not os.access(parent, os.W_OK | os.X_OK):
        return "cannot be written"
    free = shutil.disk_usage(parent).free
    return f"{free / 2**20:.0f} MiB free" if free < _LITTLE else ""


@cache
def warn_unwritable(folder: Path, why: str) -> None:
    """Warn once that compiled kernels are not kept, and what that costs."""
    log.warning(
        "kernel cache: %s cannot be written (%s): every process compiles its kernels again, a second or so each; HEADWAY_CACHE "
        "names another folder",
        folder,
        why,
    )
