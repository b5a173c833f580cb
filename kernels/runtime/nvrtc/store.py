"""The compiled kernels: one cubin for each source, set of constants and architecture, kept on disk."""

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
from headway.core.system.files import kernel_folders, warn_unwritable, write_whole
from headway.kernels.runtime.nvrtc.compiler import Compiler, Variant, architecture, find_compiler
from headway.kernels.runtime.nvrtc.launch import CompiledKernel

log = logging.getLogger("headway")

_DIGEST_BYTES = 32
"""SHA-256 of the cubin, which stands behind it in its file. What reads ELF files does not look behind the end."""


@dataclass(frozen=True, slots=True)
class Built:
    """The machine code of one variant."""

    cubin: bytes
    path: Path | None
    """Where it is kept; None if the folder cannot be written, so that the next process compiles again."""
    seconds: float
    """What compiling took; 0 if it was there."""


def compiled_path(variant: Variant, arch: str, compiler: Compiler) -> Path:
    """The file of one compilation; its name holds a hash of all it was made from."""
    digest = hashlib.sha256()
    for path in sorted(variant.folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((str(variant), arch, compiler.name, compiler.version)).encode())
    name = f"{variant.owner}-{Path(variant.source).stem}-{arch}-{digest.hexdigest()[:24]}.cubin"
    return kernel_folders()[0] / name


def build(variant: Variant, arch: str, compiler: Compiler) -> Built:
    """The cubin from the disk, or compiled and then kept there.

    It appears under its name in one step, when it is complete: processes that compile the same one at the same time waste half a
    second, and none reads a half of it. A file that is damaged is compiled again. A folder that cannot be written (read-only,
    full) costs every process the compilation, which the log says once. :raises BackendError: it does not compile.
    """
    path = compiled_path(variant, arch, compiler)
    cubin = _read(path)
    if cubin is not None:
        return Built(cubin, path, 0.0)
    began = time.perf_counter()
    cubin = variant.compile(arch, compiler)
    seconds = time.perf_counter() - began
    kept = _write(path, cubin)
    log.info("%s: compiled %s for %s with %s in %.1f s", variant.owner, variant, arch, compiler.name, seconds)
    return Built(cubin, path if kept else None, seconds)


def build_all(variants: Sequence[Variant], arch: str, compiler: Compiler, workers: int) -> Iterator[tuple[Variant, Built]]:
    """As `build`, many at a time; hands each out as it is done. workers: threads, for NVRTC works outside Python's lock.

    :raises BackendError: one does not compile.
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
    """One function of a variant, ready to launch on a device; compiled first if need be, ahead of its first launch in `AHEAD`.

    arch: in place of the device's, such as sm_90a for what Hopper alone can do.

    :raises UnsupportedError: no compiler. BackendError: it does not compile or load.
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
    """What a file keeps; None if there is none, or if it is not what was written."""
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
    """Keep a cubin; False, with a warning the first time, where that cannot be."""
    try:
        write_whole(path, cubin + hashlib.sha256(cubin).digest())
    except OSError as error:
        warn_unwritable(path.parent, error.strerror or str(error))
        return False
    return True
