"""What one compilation is made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headway.backends.nvrtc.compiler import Compiler

TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}
"""Names of element types in the sources."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation: a source file and the constants it is compiled for."""

    folder: Path
    """Where the source lies and what it includes is looked for: the folder `csrc` of a backend."""
    source: str
    """Name of a file in the folder."""
    constants: tuple[tuple[str, str | int], ...] = ()
    """Macros and their values."""

    @classmethod
    def of(
        cls, folder: Path, source: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, block_size: int, **others: int
    ) -> Variant:
        """With the constants that the kernels on a cache share."""
        shape: dict[str, str | int] = {
            "TYPE": TYPES[dtype],
            "KV_TYPE": TYPES[kv_dtype],
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
        }
        return cls(folder, source, tuple({**shape, **others}.items()))

    @property
    def owner(self) -> str:
        """The backend that the source belongs to."""
        return self.folder.parent.name

    def compile(self, arch: str, compiler: Compiler) -> bytes:
        """The cubin. arch: such as sm_90 or sm_90a. :raises BackendError: it does not compile."""
        return compiler.compile(self.folder / self.source, self.folder, dict(self.constants), arch)

    def __str__(self) -> str:
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.constants)])


def architecture(device: torch.device, *, specific: bool = False) -> str:
    """Such as sm_90; with `specific` sm_90a, whose instructions (wgmma on Hopper) no later generation need have."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) + ("a" if specific else "")
