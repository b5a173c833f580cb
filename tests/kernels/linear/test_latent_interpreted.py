"""What stands around latent attention, fused, against torch's operations in float64."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.step.config import LatentConfig
from headway.kernels.step.fused import Fused
from headway.kernels.step.operations import TorchOperations
from latent_steps import LITE, ODD, latent_steps
from operation_inputs import ropes

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.mark.parametrize(
    ("config", "heads", "rows", "dtype"),
    [
        (ODD, 3, 1, torch.float32),
        (ODD, 3, 18, torch.float16),
        (ODD, 5, 7, torch.bfloat16),
        pytest.param(LITE, 2, 3, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_step_equals_the_plain_one(config: LatentConfig, heads: int, rows: int, dtype: torch.dtype) -> None:
    tables = ropes(config.qk_rope_head_dim)
    fused = latent_steps(Fused(*tables), config, heads, rows, dtype, "cpu")
    plain = latent_steps(TorchOperations(*tables), config, heads, rows, torch.float64, "cpu")
    assert fused.keys() == plain.keys()
    for step, expected in plain.items():
        error = (fused[step] - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], (step, float(error))


def test_no_rows_give_no_rows() -> None:
    for step, result in latent_steps(Fused(*ropes(ODD.qk_rope_head_dim)), ODD, 3, 0, torch.float32, "cpu").items():
        assert result.shape[0] == 0, step
