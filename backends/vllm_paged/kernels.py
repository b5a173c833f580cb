"""The compiled kernels: one cubin for each source, set of constants and architecture, kept on disk."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from headway.backends.vllm_paged.compiler import Compiler, find_compiler
from headway.backends.vllm_paged.launch import Kernel
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.folders import cache_folder

log = logging.getLogger("headway")

SOURCES = Path(__file__).parent / "csrc"
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}
"""Names of element types in the sources."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation: a source file and the constants it is compiled for."""

    source: str
    constants: tuple[tuple[str, str | int], ...] = ()

    @classmethod
    def of(cls, source: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, block_size: int, **others: int) -> Variant:
        """With the constants that the kernels on a cache share."""
        shape: dict[str, str | int] = {
            "TYPE": TYPES[dtype],
            "KV_TYPE": TYPES[kv_dtype],
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
        }
        return cls(source, tuple({**shape, **others}.items()))

    def compile(self, arch: str, compiler: Compiler) -> bytes:
        """The cubin. arch: such as sm_90. :raises BackendError: it does not compile."""
        return compiler.compile(SOURCES / self.source, SOURCES, dict(self.constants), arch)

    def __str__(self) -> str:
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.constants)])


def architecture(device: torch.device) -> str:
    """Such as sm_90."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def compiled_path(variant: Variant, arch: str, compiler: Compiler) -> Path:
    """The file of one compilation; its name holds a hash of all it was made from."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((str(variant), arch, compiler.name, compiler.version)).encode())
    return cache_folder() / "kernels" / f"{Path(variant.source).stem}-{arch}-{digest.hexdigest()[:24]}.cubin"


def build(variant: Variant, arch: str, compiler: Compiler) -> Path:
    """The cubin on disk, compiled if it is not there.

    It appears under its name in one step, when it is complete: processes that compile the same one at the same time waste half a
    second, and none reads a half of it. :raises BackendError: it does not compile.
    """
    path = compiled_path(variant, arch, compiler)
    if path.exists():
        return path
    began = time.perf_counter()
    cubin = variant.compile(arch, compiler)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as file:
        file.write(cubin)
    Path(file.name).replace(path)
    seconds = time.perf_counter() - began
    log.warning(
        "vllm_paged: compiled %s for %s with %s in %.1f s, kept in %s", variant, arch, compiler.name, seconds, path.parent
    )
    return path


@cache
def load(variant: Variant, function: str, device: torch.device) -> Kernel:
    """One function of a variant, ready to launch on a device; compiled first if need be.

    :raises UnsupportedError: no compiler. BackendError: it does not compile or load.
    """
    compiler, support = find_compiler()
    if compiler is None:
        raise UnsupportedError("attention backend vllm_paged", support.reasons)
    path = build(variant, architecture(device), compiler)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes torch's context, if nobody has
        return Kernel(path.read_bytes(), function, device)
