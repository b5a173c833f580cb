"""`headway build`: compile a backend's kernels before they are needed."""

from __future__ import annotations

import os
import re
from itertools import product
from typing import Annotated

import typer

_BACKEND = "vllm_paged"


def build(
    backend: Annotated[str, typer.Argument(help=f"The backend to compile; {_BACKEND} is the only one that is.")],
    head_dim: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 64 and 128.")] = None,
    block_size: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 16.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Repeatable. Default: bfloat16 and float16.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Of the cache: auto (as --dtype) or fp8_e4m3.")] = "auto",
    arch: Annotated[str | None, typer.Option(help="Such as sm_90. Default: that of the GPU here.")] = None,
) -> None:
    """Compile kernels for layers of these shapes ahead of time.

    Each takes half a second. Without this command the first use of a kernel compiles it.
    """
    import torch

    from headway.backends.vllm_paged.backend import VllmPagedAttention
    from headway.backends.vllm_paged.decode import CSRC, cache_variant, variant_of
    from headway.core.contract.errors import ConfigError, UnsupportedError
    from headway.core.contract.spec import DTYPES, KV_DTYPES
    from headway.kernels.runtime.nvrtc.compiler import Variant, architecture, find_compiler
    from headway.kernels.runtime.nvrtc.store import build_all

    if backend != _BACKEND:
        raise ConfigError("backend", f"one with kernels to compile ahead of time: {_BACKEND}", repr(backend))
    names = dtype or ["bfloat16", "float16"]
    for name in names:
        if name not in DTYPES:
            raise ConfigError("--dtype", f"one of {', '.join(DTYPES)}", repr(name))
    narrow = {known: each for known, each in KV_DTYPES.items() if each in VllmPagedAttention.capabilities.kv_dtypes}
    if kv_dtype != "auto" and kv_dtype not in narrow:
        raise ConfigError("--kv-dtype", f"auto or one of {', '.join(narrow)}", repr(kv_dtype))
    if arch is not None and not re.fullmatch(r"sm_[1-9][0-9]{1,2}[af]?", arch):
        raise ConfigError("--arch", "an architecture such as sm_90", repr(arch))
    compiler, support = find_compiler()
    if compiler is None:
        raise UnsupportedError(f"headway build {backend}", support.reasons)
    if arch is None and not torch.cuda.is_available():
        raise ConfigError("--arch", "an architecture such as sm_90, as there is no GPU here to ask", "none")
    target = arch or architecture(torch.device("cuda", torch.cuda.current_device()))
    variants = [Variant(CSRC, "blocks.cu")]
    for name, size, block in product(names, head_dim or [64, 128], block_size or [16]):
        cache_dtype = narrow.get(kv_dtype, DTYPES[name])
        variants.append(variant_of(DTYPES[name], cache_dtype, size, block, target))
        variants.append(cache_variant(DTYPES[name], cache_dtype, size, block))
    print(f"{backend}: {len(variants)} kernels for {target} with {compiler.name} ({compiler.version})")
    for number, (variant, built) in enumerate(build_all(variants, target, compiler, os.cpu_count() or 1), 1):
        print(f"[{number}/{len(variants)}] {variant}: {built.seconds:.1f} s", flush=True)
    print(f"kept in {built.path.parent}" if built.path else "kept nowhere: the folder cannot be written")
