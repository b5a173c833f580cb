"""What a result was made on, as far as it is installed: versions of distributions, and the name of the CPU."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Distribution -> version, of those that are installed. Read from package metadata: none is imported for it."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def interpreted() -> bool:
    """Whether Triton's kernels run under its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
