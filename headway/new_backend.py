"""A complete package around a backend that runs: what `headway new-backend` writes."""

from __future__ import annotations

import keyword
from pathlib import Path

from headway.core.contract.backend import API_VERSION
from headway.core.contract.errors import ConfigError
from headway.registry import Registry
from headway.registry.validate import RESERVED

TEMPLATE = Path(__file__).parent / "template"
"""In copier's form."""


def distribution_of(name: str) -> str:
    """The package's name, which its folder has too."""
    return f"headway-{name.replace('_', '-')}"


def new_backend(name: str, folder: Path, registry: Registry) -> list[Path]:
    """Write the package of a backend into a new folder; returns the files, relative to it.

    :raises ConfigError: a name that cannot be or is taken, a folder that exists or cannot be made, or copier is missing.
    """
    ok = name.isidentifier() and name.isascii() and name == name.lower() and not keyword.iskeyword(name)
    if not ok or name in RESERVED:
        raise ConfigError("NAME", "a Python identifier in lower case, such as my_kernel", repr(name))
    if name in registry.backends:
        raise ConfigError("NAME", "a name that no backend has", f"{name!r} of {registry.backends[name].owner}")
    if folder.exists():
        raise ConfigError("--into", "a folder that does not exist yet", str(folder))
    try:
        from copier import run_copy
    except ImportError as error:
        raise ConfigError("headway new-backend", "the package copier", str(error), 'pip install "headway[kit]"') from error
    answers = {"name": name, "distribution": distribution_of(name), "api_version": API_VERSION}
    try:
        run_copy(str(TEMPLATE), folder, answers, defaults=True, quiet=True)
    except OSError as error:
        raise ConfigError("--into", "a folder that can be written", str(folder), str(error)) from error
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
