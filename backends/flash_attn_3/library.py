"""The library that will be used: found, tried in a process of its own, then loaded into this one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from headway.backends.flash_attn_3.binding import Operators, registered
from headway.backends.probe import has_gpu
from headway.core.contract.errors import BackendError
from headway.core.contract.support import YES, Support
from headway.core.system.child import Child, ChildDied, python_command
from headway.core.system.files import write_whole
from headway.core.system.folders import cache_folder

VARIABLE = "HEADWAY_FA3_LIBRARY"
"""Environment variable with the path of a compiled library; where it is set no other place is looked at."""


@dataclass(frozen=True, slots=True)
class Home:
    """A package that ships FlashAttention 3."""

    name: str
    package: str
    """Top-level module."""
    pattern: str
    """Pattern of the compiled library's file, inside the package's folder."""


HOMES = (
    Home("flash-attn-3", "flash_attn_3", "_C*.so"),
    Home("vllm", "vllm", "vllm_flash_attn/_vllm_fa3_C*.so"),
    Home("sgl-kernel", "sgl_kernel", "**/flash_ops*.so"),
)
"""Packages that bring the library, in the order in which they are tried. torch is not among them:
its `activate_flash_attention_impl("FA3")` imports the first."""


@dataclass(frozen=True, slots=True)
class LibraryCandidate:
    """A compiled library that may be FlashAttention 3."""

    home: str
    """Who brought it, for texts: a package or the environment variable."""
    path: Path


def candidates() -> Iterator[LibraryCandidate]:
    """The libraries that are there, the preferred first."""
    named = os.environ.get(VARIABLE)
    if named:
        yield LibraryCandidate(VARIABLE, Path(named).expanduser())
        return
    for home in HOMES:
        for folder in _folders(home.package):
            for path in sorted(folder.glob(home.pattern)):
                yield LibraryCandidate(home.name, path)


def _folders(package: str) -> list[Path]:
    try:
        found = find_spec(package)
    except (ImportError, ValueError):  # a module in sys.modules without a spec
        return []
    return [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []


log = logging.getLogger("headway")
CHILD = "headway.backends.flash_attn_3.child"
GENERATION = 9
"""Major compute capability of the GPUs that it was written for."""
SECONDS = 120
"""For the trial, most of it for the import of torch and 150 MB of kernels from a cold disk."""
HINT = f"install {', '.join(home.name for home in HOMES)}, or set {VARIABLE} to a compiled library"


@dataclass(frozen=True)
class Library:
    """A library that loads here and computes right."""

    home: str
    """Who brought it."""
    path: Path
    operators: Operators


@cache
def find_library() -> tuple[Library | None, Support]:
    """The first library that works, loaded into this process; (None, why not), with a reason for each that was found."""
    here = has_gpu()
    if here:
        major, minor = torch.cuda.get_device_capability()
        if major != GENERATION:
            here = Support.no("compute capability", f"{GENERATION}.x (Hopper)", f"{major}.{minor}")
    if not here:
        return None, here
    refused = YES
    for candidate in candidates():
        found = verdict(candidate)
        if "error" in found:
            refused &= Support.no(
                f"FlashAttention 3 of {candidate.home}", "to work here", f"{found['error']} ({candidate.path})", HINT
            )
            continue
        try:
            return load(candidate, found["namespace"]), YES
        except (OSError, BackendError) as error:  # worked in the child: this process holds another build of the same name
            refused &= Support.no(f"FlashAttention 3 of {candidate.home}", "to load", f"{error} ({candidate.path})", HINT)
    return None, refused if not refused else Support.no("FlashAttention 3", "a library that holds it", "none", HINT)


def load(candidate: LibraryCandidate, namespace: str) -> Library:
    """Load a library that the child has tried. One that somebody else has loaded already is used as it is.

    :raises OSError or BackendError: it does not load into this process, or not with the operators it should have.
    """
    if namespace not in registered():
        torch.ops.load_library(str(candidate.path))  # type: ignore[no-untyped-call]
    return Library(candidate.home, candidate.path, Operators.of(namespace))


def verdict(candidate: LibraryCandidate) -> dict[str, str]:
    """What the child says of a library: {"namespace": ...} or {"error": ...}. A good answer is kept on disk."""
    try:
        stat = candidate.path.stat()
    except OSError as error:
        return {"error": error.strerror or str(error)}
    gpu = "{}.{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "none"
    place = f"{candidate.path.resolve()} "
    key = f"{place}{stat.st_mtime_ns} {stat.st_size} torch {torch.__version__} GPU {gpu}"
    known = _read()
    if key in known:
        return {"namespace": known[key]}
    found = ask(python_command(CHILD, str(candidate.path)))
    if "namespace" in found:
        _write({**{other: name for other, name in known.items() if not other.startswith(place)}, key: found["namespace"]})
    return found


def ask(command: Sequence[str]) -> dict[str, str]:
    """Run the child; its death is an answer too."""
    try:
        with Child(command) as child:
            return {str(name): str(text) for name, text in child.answer(SECONDS).items()}
    except ChildDied as died:
        if died.timed_out:
            return {"error": f"did not answer within {SECONDS} s"}
        how, last = died.how.removeprefix("the process "), died.last_line[:200] or "no message"
        return {"error": f"crashes the process that loads it ({how}: {last}); it was built for another torch?"}
    except OSError as error:
        return {"error": f"cannot be tried: {error}"}


def _answers() -> Path:
    return cache_folder() / "flash_attn_3.json"


def _read() -> dict[str, str]:
    try:
        known = json.loads(_answers().read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(known: dict[str, str]) -> None:
    path = _answers()
    try:
        write_whole(path, json.dumps(known).encode())
    except OSError as error:
        log.warning(
            "flash_attn_3: its library is tried anew at every start, some seconds: %s cannot be written (%s)", path, error
        )
