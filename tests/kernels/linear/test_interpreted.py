"""The fused operations against torch's in float64 under Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headway.kernels.linear import cpu_kernels, linear, tile_kernels
from headway.kernels.linear.choice import builtin_kernels, spec_of
from headway.kernels.linear.forms import Operand
from headway.kernels.linear.linear import Linear
from headway.kernels.runtime.triton_launch import FixedLauncher
from headway.kernels.step.config import LatentConfig
from headway.kernels.step.fused import Fused
from headway.kernels.step.operations import Norm
from headway.kernels.step.torch_operations import TorchOperations
from headway.registry import create_registry
from headway.testing.broken.kernels import ReferenceLinear
from latent_layers import LITE, ODD, latent_steps
from operation_inputs import Inputs, Sizes, ropes

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
MODELS = {
    "llama": {},
    "llama, head_dim 16": {"head_dim": 16},
    "qwen2": {"bias": True, "num_heads": 14, "num_kv_heads": 2, "head_dim": 64},
    "qwen3": {"qk_norm": True, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "hidden": 64},
    "tiles": {"hidden": 128, "inner": 128, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "qk_norm": True},
    "tiles, split": {"hidden": 64, "inner": 128, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "bias": True},
    "tiles, gated and split": {"hidden": 128, "inner": 64, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "bias": True},
    "gemma": {"hidden": 64, "inner": 128, "head_dim": 32, "qk_norm": True, "activation": "gelu_tanh"},
    "gemma4": {"hidden": 64, "head_dim": 32, "num_kv_heads": 2, "qk_norm": True, "v_norm": True, "gate_heads": 2},
    "gemma4, shared": {"hidden": 64, "head_dim": 16, "num_kv_heads": 0, "qk_norm": True},
    "values normed, not rotated": {"v_norm": True, "rotated": False},
    "gpt2": {"bias": True, "layer_norm": True, "learned_positions": True, "rotated": False, "activation": "gelu"},
    "gpt2, tiles": {
        "hidden": 64,
        "inner": 64,
        "num_heads": 4,
        "head_dim": 16,
        "layer_norm": True,
        "rotated": False,
        "activation": "relu",
    },
    "qwen3_next": {"qk_norm": True, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "hidden": 64, "gate_heads": 4},
    "nemotron_h": {"rotated": False, "activation": "relu2"},
    "olmo2": {"qk_norm": True, "whole_norm": True, "num_kv_heads": 3, "head_dim": 16},
    "normed, not rotated": {"qk_norm": True, "rotated": False},
    "wide": {"hidden": 2100, "inner": 1030, "num_heads": 9, "num_kv_heads": 3, "head_dim": 80, "qk_norm": True},
}
THETAS = {"gemma": (1e4, 1e6)}
"""Several rotary embeddings in one model."""

CASES = [(name, rows, dtype) for name in ("llama", "qwen2", "qwen3") for rows in (1, 2, 9, 17) for dtype in TOLERANCE]
TILED = ("tiles", "tiles, split", "tiles, gated and split")
CASES += [(name, rows, dtype) for name in TILED for rows in (17, 70) for dtype in (torch.float16, torch.bfloat16)]
FAMILIES = (
    "gemma",
    "gemma4",
    "gemma4, shared",
    "values normed, not rotated",
    "gpt2",
    "gpt2, tiles",
    "nemotron_h",
    "olmo2",
    "normed, not rotated",
    "qwen3_next",
)
CASES += [(name, rows, dtype) for name in FAMILIES for rows in (1, 9, 17) for dtype in (torch.float32, torch.bfloat16)]
CASES += [("llama, head_dim 16", 5, torch.bfloat16), ("wide", 1, torch.float16), ("wide", 3, torch.bfloat16)]
EVERYDAY = [
    ("llama", 1, torch.float32),
    ("qwen3", 1, torch.bfloat16),
    ("tiles, gated and split", 17, torch.bfloat16),
    ("llama, head_dim 16", 5, torch.bfloat16),
    ("gpt2, tiles", 17, torch.bfloat16),
    ("qwen3_next", 1, torch.bfloat16),
    ("gemma4", 9, torch.float32),
]


@pytest.fixture(autouse=True)
def weights_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave weights as they are, also those that a CPU would arrange for its own products."""
    monkeypatch.setattr(cpu_kernels, "SMALL", math.inf)
    own = builtin_kernels(torch.device("cpu"))
    monkeypatch.setattr(linear, "usual_kernels", lambda: own)


@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    [pytest.param(*case, marks=[] if case in EVERYDAY else pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_every_step_equals_the_plain_one(name: str, rows: int, dtype: torch.dtype) -> None:
    sizes = Sizes(rows, **MODELS[name])
    inputs, tables = Inputs(sizes, dtype), ropes(sizes.head_dim, *THETAS.get(name, (1e4,)))
    fused = dict(inputs.results(Fused(*tables), dtype, "cpu"))
    plain = dict(inputs.results(TorchOperations(*tables), torch.float64, "cpu"))
    assert fused.keys() == plain.keys()
    for step, expected in plain.items():
        error = (fused[step] - expected).norm() / (expected.norm() if len(expected.flatten()) else 1.0)
        assert fused[step].shape == expected.shape
        assert error < TOLERANCE[dtype], (step, float(error))


@pytest.mark.parametrize("name", ["qwen2", "qwen3_next", "gpt2", "nemotron_h"])
def test_a_third_partys_kernel_computes_the_parts_that_it_claims(name: str) -> None:
    """Norms, biases, gates and residuals are handed to it; LayerNorm, RoPE and other activations than SiLU are not."""
    sizes = Sizes(3, **MODELS[name])
    inputs, tables = Inputs(sizes, torch.float32), ropes(sizes.head_dim)
    registry = create_registry([ReferenceLinear], load_entry_points=False)
    kernels = registry.linear_kernels(torch.device("cpu"), ReferenceLinear.name)
    fused = dict(inputs.results(Fused(*tables, kernels), torch.float32, "cpu"))
    for step, expected in inputs.results(TorchOperations(*tables), torch.float64, "cpu"):
        assert (fused[step] - expected).norm() / expected.norm() < TOLERANCE[torch.float32], step


def test_a_norm_goes_into_the_product_after_it_where_it_may() -> None:
    fused = Fused(*ropes(16))
    norm, linear = Norm(torch.full((64,), 3.0, dtype=torch.bfloat16), 1e-6), Linear(torch.ones(8, 64, dtype=torch.bfloat16))
    absorbed, product = fused.absorb(norm, linear)
    assert absorbed == Norm(absorbed.weight, 1e-6, absorbed=True)
    assert (absorbed.weight == 1).all()
    assert (product.weight == 3).all()
    assert (linear.weight == 1).all(), "what was handed in is left alone"
    with_bias = Linear(linear.weight, torch.ones(8))
    half = Norm(norm.weight.half(), 1e-6), Linear(linear.weight.half())
    long = Norm(torch.ones(4096, dtype=torch.bfloat16), 1e-6), Linear(torch.ones(8, 4096, dtype=torch.bfloat16))
    for left_alone in ((norm, with_bias), half, long):
        assert fused.absorb(*left_alone) == left_alone


@pytest.mark.parametrize("name", TILED)
def test_the_tiled_kernel_serves_these(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grids = []
    launch = FixedLauncher.__call__

    def seen(self: FixedLauncher, grid: tuple[int, int, int], **arguments: Any) -> None:
        if self.kernel.__name__ == "tiled_product":
            grids.append(grid)
        launch(self, grid, **arguments)

    monkeypatch.setattr(FixedLauncher, "__call__", seen)
    list(Inputs(Sizes(17, **MODELS[name]), torch.bfloat16).results(Fused(*ropes(16)), torch.bfloat16, "cpu"))
    assert grids
    assert max(splits for _, splits, _ in grids) == (2 if "split" in name else 1)


def assert_right(tiles: Any, rows: int, out: int, columns: int) -> None:
    """Plain, gated and added, with biases."""
    seed, x = torch.seed(), torch.randn(rows, columns).bfloat16()
    weight, bias = torch.randn(2 * out, columns).bfloat16() * 0.1, torch.randn(2 * out).bfloat16()
    read, both = Operand.of(weight, bias), x.double() @ weight.double().T + bias.double()
    residual = torch.randn(rows, 2 * out).bfloat16()
    expected = both, torch.nn.functional.silu(both[:, :out]) * both[:, out:], residual.double() + both
    compute = tiles(spec_of(weight, torch.bfloat16, torch.device("cpu"))).compute
    found = compute(x, read), compute(x, read, gated=True, activation="silu"), compute(x, read, add_to=residual)
    for got, right in zip(found, expected, strict=True):
        assert (got.double() - right).norm() < 6e-3 * right.norm(), f"seed {seed}"


@pytest.mark.parametrize(("rows", "splits"), [(9, 3), (16, 1)])
def test_tiles_whose_rows_are_the_weights(rows: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sizes that are none of its own otherwise."""
    monkeypatch.setattr(tile_kernels, "MAX_WEIGHT", 64 * 192 * 3 // splits)
    out = 64 if splits == 3 else 192
    tiles = tile_kernels.Tiles(spec_of(torch.empty(2 * out, 192).bfloat16(), torch.bfloat16, torch.device("cpu")))
    assert tiles.runs(rows)
    assert not tiles.runs(17)
    assert_right(tile_kernels.Tiles, rows, out, 192)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize(("out", "columns"), [(64, 192), (70, 200)])
@pytest.mark.parametrize("rows", [1, 20, 150])
def test_products_with_any_number_of_rows(
    rows: int, out: int, columns: int, segments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of widths that tiles do not divide, and with one program for all segments of K."""
    monkeypatch.setattr(tile_kernels, "BUSY", 0.25 if segments == 1 else 100)
    monkeypatch.setattr(tile_kernels, "BLOCK_ROWS", 64)
    monkeypatch.setattr(tile_kernels, "SEGMENT", 64)
    tile_kernels.invariant_tiling.cache_clear()
    assert tile_kernels.invariant_tiling(rows, 2 * out, columns, False, 4, 100_000).segments == (
        segments if columns == 192 else 1
    )
    assert_right(tile_kernels.InvariantTiles, rows, out, columns)
    tile_kernels.invariant_tiling.cache_clear()


@pytest.mark.slow
def test_a_row_does_not_know_the_others() -> None:
    """Of two numbers of rows that are cut alike, in every bit."""
    inputs = Inputs(Sizes(70, **MODELS["tiles"]), torch.bfloat16)
    ops = Fused(*ropes(16))
    whole = dict(inputs.results(ops, torch.bfloat16, "cpu"))
    for step, part in inputs.first(66).results(ops, torch.bfloat16, "cpu"):
        assert torch.equal(part, whole[step][:66]), step


def test_no_rows_give_no_rows() -> None:
    for _, result in Inputs(Sizes(0), torch.float32).results(Fused(*ropes(12)), torch.float32, "cpu"):
        assert result.shape[0] == 0


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
def test_every_step_around_latents_equals_the_plain_one(config: LatentConfig, heads: int, rows: int, dtype: torch.dtype) -> None:
    tables = ropes(config.qk_rope_head_dim)
    fused = latent_steps(Fused(*tables), config, heads, rows, dtype, "cpu")
    plain = latent_steps(TorchOperations(*tables), config, heads, rows, torch.float64, "cpu")
    assert fused.keys() == plain.keys()
    for step, expected in plain.items():
        error = (fused[step] - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype], (step, float(error))


def test_no_rows_around_latents_give_no_rows() -> None:
    for step, result in latent_steps(Fused(*ropes(ODD.qk_rope_head_dim)), ODD, 3, 0, torch.float32, "cpu").items():
        assert result.shape[0] == 0, step
