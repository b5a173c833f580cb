"""Where Headway keeps what is worth keeping: converted models, crossover tables, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """The folder $HEADWAY_CACHE where it is set, else headway in the user's cache folder, as the operating system has it."""
    if os.environ.get("HEADWAY_CACHE"):
        return Path(os.environ["HEADWAY_CACHE"])
    return platformdirs.user_cache_path("headway", appauthor=False)
