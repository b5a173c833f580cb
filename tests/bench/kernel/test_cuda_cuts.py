"""The study of cuts names each once, knows the ways of an engine, and says what it needs."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from headway.bench.studies.cuda_cuts import KERNELS, cuda_cuts, cuts
from headway.core.contract.errors import ConfigError
from headway.kernels.linear.cuda_products import CudaProducts
from headway.kernels.linear.quantized_choice import FEW
from headway.kernels.linear.quantized_ways import QuantizedWays


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_cut_is_named_once_and_is_one_of_the_kernels(kernel: str) -> None:
    found = cuts(kernel)
    assert len(set(found.values())) == len(found) > 10
    assert all(bool(cut.splits) == (kernel != FEW) for cut in found.values())
    assert isinstance(QuantizedWays(torch.device("cpu")).ways[kernel].kernel, CudaProducts)


@pytest.mark.parametrize(
    ("what", "options", "said"),
    [
        ("products", {}, "cuda_cuts: needs a CUDA GPU, got none"),
        ("tiles", {}, "WHAT: needs one of products, experts, got tiles"),
        ("products", {"kernel": "marlin"}, "--kernel: needs one of few_rows, shared_rows, w8a8, got marlin"),
        ("products", {"shape": "64"}, "--shape: needs out_features x in_features, such as 4096x14336, got '64'"),
        ("experts", {"lots": "8,9"}, "--lots: needs of 8, 16, 32, 64, got 9"),
    ],
)
def test_what_it_needs_is_said(what: str, options: dict[str, str], said: str) -> None:
    if torch.cuda.is_available() and "GPU" in said:
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        cuda_cuts(what, **{"shape": "64x64", "form": "int4", **options})
