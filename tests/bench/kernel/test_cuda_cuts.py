"""The study of cuts names each once, the rule's first, and says what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")

import torch

from headway.bench.studies.cuda_cuts import RULES, product_cuts
from headway.models.fused.quantized import weight_bytes
from quantized_weights import FORMS


@pytest.mark.parametrize("kernel", RULES)
def test_every_cut_is_named_once_and_the_rules_come_first(kernel: str) -> None:
    weight = weight_bytes(FORMS["fp8 rows"](torch.randn(64, 512)))
    assert weight is not None
    names = list(product_cuts(kernel))
    rules = list(RULES[kernel])
    assert names[: len(rules)] == rules
    cuts = [rule(weight, 16, 4096, False, 132) for name, rule in product_cuts(kernel).items() if name not in rules]
    assert len(set(cuts)) == len(cuts) > 10
    assert all(bool(cut.splits) == (kernel != "few_rows") for cut in cuts)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["products"], "cuda_cuts: needs a CUDA GPU, got none"),
        (["tiles"], "WHAT: needs products or experts, got tiles"),
        (["products", "--kernel", "marlin"], "--kernel: needs few_rows, shared_rows, w8a8, got marlin"),
    ],
)
def test_what_it_needs_is_said_in_a_line(arguments: list[str], said: str) -> None:
    if torch.cuda.is_available() and "GPU" in said:
        pytest.skip("there is a GPU")
    command = [sys.executable, "-P", "-m", "headway.bench.studies.cuda_cuts", *arguments, "--shape", "64x64", "--form", "int4"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == f"headway: error: {said}\n"
