"""The kernels compile for every kind of layer."""

from __future__ import annotations

import pytest
import torch

from headway.backends.vllm_paged.decode import CSRC, cache_variant, variant_of
from headway.core.contract.errors import BackendError
from headway.kernels.runtime.nvrtc.compiler import Compiler, Variant

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EVERYDAY = [(BF16, BF16, 128, 16), (torch.float16, FP8, 80, 64)]
RARE = [
    (torch.float32, torch.float32, 256, 8),
    (torch.float32, torch.float32, 80, 64),
    (BF16, BF16, 64, 8),
    (BF16, BF16, 112, 256),
    (BF16, BF16, 192, 128),
    (torch.float16, torch.float16, 96, 32),
    (torch.float16, torch.float16, 256, 16),
    (BF16, FP8, 128, 16),
]
SHAPES = [*EVERYDAY, *(pytest.param(shape, marks=pytest.mark.slow) for shape in RARE)]


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(str(part).removeprefix("torch.") for part in shape))
def test_every_kind_compiles(compiler: Compiler, shape: tuple[torch.dtype, torch.dtype, int, int], arch: str) -> None:
    arch = "sm_89" if (arch, shape[1]) == ("sm_80", FP8) else arch  # the first that converts e4m3
    for variant in (variant_of(*shape, arch), cache_variant(*shape)):
        assert variant.compile(arch, compiler).startswith(b"\x7fELF")


def test_what_moves_blocks_compiles(compiler: Compiler) -> None:
    assert Variant(CSRC, "blocks.cu").compile("sm_80", compiler).startswith(b"\x7fELF")


def test_what_does_not_compile_says_why(compiler: Compiler) -> None:
    constants = dict(Variant.of(CSRC, "cache.cu", BF16, BF16, 128, 16).constants)
    broken = Variant(CSRC, "cache.cu", tuple({**constants, "TYPE": "NOT_A_TYPE"}.items()))
    with pytest.raises(BackendError, match=r"NVRTC \d+\.\d+ does not compile cache\.cu:(.|\n)*NOT_A_TYPE"):
        broken.compile("sm_90", compiler)
