"""The MLP of a few rows in one launch, on a GPU: beside float64, in graphs that are replayed, and among launches of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from headway.backends.probe import UNTRIED
from headway.models.config import Activation
from headway.models.linear import Linear
from headway.models.operations import ACTIVATE, Embedding, Heads, Norm, Rope
from operation_inputs import ropes

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 6e-3, FP16: 1.5e-3}
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    monkeypatch.setenv(UNTRIED, "1")
    with torch.inference_mode():
        yield


def fused() -> Any:
    from headway.models.fused.operations import Fused

    return Fused(*(table.to(CUDA) for table in ropes(128)))


class Layer:
    """Random weights of what a decoder's layer computes around attention."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        dtype: torch.dtype = BF16,
        gated: bool = True,
        norm: torch.dtype | None = BF16,
        bias: bool = False,
    ) -> None:
        """norm: the type of its weight."""

        def linear(rows: int, columns: int) -> Linear:
            weight = (torch.randn(rows, columns, device=CUDA) * columns**-0.5).to(dtype)
            return Linear(weight, torch.randn(rows, device=CUDA).to(dtype) if bias else None)

        self.gated = gated
        self.norm = None if norm is None else Norm((1 + 0.1 * torch.randn(hidden, device=CUDA)).to(norm), 1e-6)
        self.up, self.down = linear(2 * inner if gated else inner, hidden), linear(hidden, inner)
        self.qkv, self.out = linear(hidden + 2 * 128, hidden), linear(hidden, hidden)

    def added(self, x: Tensor, activation: Activation) -> Tensor:
        """In float64."""

        def product(x: Tensor, linear: Linear) -> Tensor:
            assert isinstance(linear.weight, Tensor)
            return x @ linear.weight.double().t() + (0 if linear.bias is None else linear.bias.double())

        normed = x if self.norm is None else rms_norm(x, x.shape[1:], self.norm.weight.double(), self.norm.eps)
        first, second = product(normed, self.up).chunk(2, 1) if self.gated else (product(normed, self.up), 1.0)
        return x + product(ACTIVATE[activation](first) * second, self.down)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (896, 4864), (576, 1536), (192, 320), (1024, 4096), (1536, 2560)])
def test_an_mlp_is_right(hidden: int, inner: int, rows: int, dtype: torch.dtype) -> None:
    from headway.models.fused.mlp_rows import MlpRows

    ops, mlps = fused(), MlpRows(CUDA)
    for gated, norm, bias, activation in (
        (True, dtype, False, "silu"),
        (True, torch.float32, True, "gelu_tanh"),
        (False, None, True, "gelu"),
    ):
        layer, x = Layer(hidden, inner, dtype, gated, norm, bias), torch.randn(rows, hidden, device=CUDA).to(dtype)
        assert mlps.takes(x, layer.up, layer.down, gated), "else this tries two launches"
        expected = layer.added(x.double(), activation)
        assert error(ops.add_mlp(x.clone(), layer.norm, layer.up, layer.down, activation, gated), expected) < TOLERANCE[dtype]


def captured(step: Callable[[], Tensor], x: Tensor, first: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a step, which reads x, and what it writes. first: rows of x for a step before it."""
    x.copy_(first)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    return graph, y


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_graph_that_is_replayed_with_other_rows(rows: int) -> None:
    """Eight layers one right after the other, 1,000 times: 8,000 times all blocks of threads meet."""
    ops, layers = fused(), [Layer(1024, 3072) for _ in range(8)]
    given, x = torch.randn(500, rows, 1024, device=CUDA).to(BF16), torch.empty(rows, 1024, dtype=BF16, device=CUDA)

    def step() -> Tensor:
        y = x.clone()
        for layer in layers:
            ops.add_mlp(y, layer.norm, layer.up, layer.down, "silu", gated=True)
        return y

    graph, y = captured(step, x, given[0])
    found, again = torch.empty_like(given), torch.empty_like(given)
    for results, numbers in ((found, range(500)), (again, reversed(range(500)))):
        for number in numbers:
            x.copy_(given[number])
            graph.replay()
            results[number].copy_(y)
    expected = given.flatten(0, 1).double()
    for layer in layers:
        expected = layer.added(expected, "silu")
    errors = (found.flatten(0, 1).double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < 2e-2
    assert torch.equal(found, again), "what is read before it is stored would depend on the time, and on the replay before"
    for number in (0, 250, 499):
        x.copy_(given[number])
        assert torch.equal(step(), found[number])


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_steps_of_a_decoder_beside_two_launches(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """norm_qkv, add_product, add_mlp, layer by layer in a graph: kernels that start early before and after it."""
    layers, heads = [Layer(1024, 3072) for _ in range(12)], Heads(8, 1, 128)
    given = torch.randn(100, rows, 1024, device=CUDA).to(BF16)
    x = torch.empty(rows, 1024, dtype=BF16, device=CUDA)
    table = Embedding(torch.zeros(4, 1024, dtype=BF16, device=CUDA))

    def results() -> Tensor:
        ops = fused()
        ids = torch.zeros(rows, dtype=torch.int64, device=CUDA)

        def step() -> Tensor:
            rope: Rope
            _, (rope,) = ops.embed(ids, ids, table)
            y = x.clone()
            for layer in layers:
                q, _, _ = ops.norm_qkv(y, layer.norm, layer.qkv, heads, rope)
                ops.add_product(y, q.flatten(1).contiguous(), layer.out)
                ops.add_mlp(y, layer.norm, layer.up, layer.down, "silu", gated=True)
            return y

        graph, y = captured(step, x, given[0])
        found = torch.empty_like(given)
        for number in range(len(given)):
            x.copy_(given[number])
            graph.replay()
            found[number].copy_(y)
        return found.flatten(0, 1)

    found = results()
    monkeypatch.delenv(UNTRIED)
    expected = results().double()
    errors = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.max()) < 3e-2


def test_numbers_of_rows_in_turn_give_the_bits_of_each_alone() -> None:
    ops, layer = fused(), Layer(1024, 3072)
    x = torch.randn(8, 1024, device=CUDA).to(BF16)
    whole = ops.add_mlp(x.clone(), layer.norm, layer.up, layer.down, "silu", gated=True)
    for turn in range(50):
        rows = turn % 8 + 1
        assert torch.equal(ops.add_mlp(x[:rows].clone(), layer.norm, layer.up, layer.down, "silu", gated=True), whole[:rows])
