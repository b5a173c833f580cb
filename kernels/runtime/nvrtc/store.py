"""Disk cache of compiled kernels: one cubin for each combination of source, constants and architecture."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from headway.core.contract.errors import UnsupportedError
from headway.core.contract.kernel import AHEAD, announce_compilation
from headway.core.system.files import kernel_folders, one_process, warn_unwritable, write_whole
from headway.kernels.runtime.nvrtc.compiler import Compiler, Variant, architecture, find_compiler
from headway.kernels.runtime.nvrtc.launch import CompiledKernel

log = logging.getLogger("headway")

_DIGEST_BYTES = 32
"""Size in bytes of the SHA-256 digest that follows the cubin in its file. ELF readers ignore bytes after the end."""


@dataclass(frozen=True, slots=True)
class Built:
    """Machine code of one variant."""

    cubin: bytes
    path: Path | None
    """Path of the cached file. None if the folder is not writable, so the next process compiles again."""
    seconds: float
    """Compilation time in seconds. 0 means that the cubin was cached."""


def compiled_path(variant: Variant, arch: str, compiler: Compiler) -> Path:
    """Return the path of a cubin. The file's name contains a hash of everything that the cubin was compiled from."""
    digest = hashlib.sha256()
    for path in sorted(variant.folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((str(variant), arch, compiler.name, compiler.version)).encode())
    name = f"{variant.owner}-{Path(variant.source).stem}-{arch}-{digest.hexdigest()[:24]}.cubin"
    return kernel_folders()[0] / name


def build(variant: Variant, arch: str, compiler: Compiler) -> Built:
    """Return a variant's cubin from the disk cache, or compile and cache it.

    The file is written atomically. If several processes need the same variant, one compiles it and the others wait for the file.
    A damaged file is replaced by a new compilation. If the folder is read-only or full, every process compiles the variant and
    warns once.
    :raises BackendError: if the source does not compile.
    """
    path = compiled_path(variant, arch, compiler)
    cubin = _read(path)
    if cubin is not None:
        return Built(cubin, path, 0.0)
    damaged = path.exists()
    with one_process(path):
        cubin = None if damaged else _read(path)
        if cubin is not None:
            return Built(cubin, path, 0.0)
        began = time.perf_counter()
        cubin = variant.compile(arch, compiler)
        seconds = time.perf_counter() - began
        cached = _write(path, cubin)
    log.info("%s: compiled %s for %s with %s in %.1f s", variant.owner, variant, arch, compiler.name, seconds)
    return Built(cubin, path if cached else None, seconds)


def build_all(variants: Sequence[Variant], arch: str, compiler: Compiler, workers: int) -> Iterator[tuple[Variant, Built]]:
    """Build variants in parallel, and yield each when it is done. workers: number of threads; NVRTC releases the GIL.

    :raises BackendError: if a source does not compile.
    """
    with ThreadPoolExecutor(workers, "nvrtc") as pool:
        futures = {pool.submit(build, variant, arch, compiler): variant for variant in variants}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


@cache
def load(variant: Variant, function: str, device: torch.device, arch: str | None = None) -> CompiledKernel:
    """Return a function of a variant, ready to launch on a device. The variant is compiled if needed, asynchronously if kernels
    are being compiled ahead (`AHEAD`).

    arch: overrides the device's architecture, for example sm_90a for instructions that only Hopper has.
    :raises UnsupportedError: if no compiler is found.
    :raises BackendError: if the source does not compile or the machine code does not load.
    """
    compiler, support = find_compiler()
    if compiler is None:
        raise UnsupportedError(f"attention backend {variant.owner}", support.reasons)

    def cubin() -> bytes:
        built = build(variant, arch or architecture(device), compiler)
        announce_compilation(f"{variant.owner}: {function} of {variant}")
        return built.cubin

    pool = AHEAD.get()
    kernel = CompiledKernel(cubin if pool is None else pool.submit(cubin).result, function, device)
    if pool is None:
        kernel.load()
    return kernel


def _read(path: Path) -> bytes | None:
    """Return the cubin in a file, or None if the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    cubin, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(cubin).digest() == digest:
        return cubin
    log.warning("kernel cache: %s is damaged and is compiled again", path)
    return None


def _write(path: Path, cubin: bytes) -> bool:
    """Write a cubin to the cache. Return False, and warn once, if writing fails."""
    try:
        write_whole(path, cubin + hashlib.sha256(cubin).digest())
    except OSError as error:
        warn_unwritable(path.parent, error.strerror or str(error))
        return False
    return True
