"""Where Headway keeps what is worth keeping: converted models, crossover tables, compiled kernels."""

from __future__ import annotations

import logging
import os
import tempfile
from functools import cache
from pathlib import Path

import platformdirs

log = logging.getLogger("headway")


def cache_folder() -> Path:
    """The folder $HEADWAY_CACHE where it is set, else headway in the user's cache folder, as the operating system has it."""
    if os.environ.get("HEADWAY_CACHE"):
        return Path(os.environ["HEADWAY_CACHE"])
    return platformdirs.user_cache_path("headway", appauthor=False)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears under its name in one step, when it is complete, so that no other process reads half of it.

    :raises OSError: it cannot be written; then nothing is left of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(content)
            file.close()
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


@cache
def warn_unwritable(folder: Path, why: str) -> None:
    """Say once that compiled kernels are not kept, and what that costs."""
    log.warning(
        "kernel cache: %s cannot be written (%s): every process compiles its kernels again, a second or so each; HEADWAY_CACHE "
        "names another folder",
        folder,
        why,
    )
