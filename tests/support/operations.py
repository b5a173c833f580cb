"""Random inputs for every step of `Operations`, and what one way of computing them gives: for comparing two ways."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.models.linear import Linear
from headway.models.operations import Heads, Norm, Operations


@dataclass(frozen=True)
class Sizes:
    """Of a model's steps."""

    rows: int
    hidden: int = 48
    inner: int = 80
    vocab: int = 37
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 12
    qk_norm: bool = False
    bias: bool = False


class Inputs:
    """Drawn once in float64, handed out in any type, so that a reference sees the very numbers."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> None:
        self.sizes, self.dtype = sizes, dtype
        self._generator = torch.Generator().manual_seed(seed)
        q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.ids = torch.randint(0, sizes.vocab, (sizes.rows,), generator=self._generator)
        self.positions = torch.randint(0, 5000, (sizes.rows,), generator=self._generator)
        self.table = self._draw(sizes.vocab, sizes.hidden)
        self.x, self.attended, self.residual = (self._draw(sizes.rows, size) for size in (sizes.hidden, q, sizes.hidden))
        self.norm_weight = self._draw(sizes.hidden)
        self.head_norms = [self._draw(sizes.head_dim) for _ in range(2)]
        shapes = {"qkv": (q + 2 * kv, sizes.hidden), "gate_up": (2 * sizes.inner, sizes.hidden), "out": (sizes.hidden, q)}
        self.weights = {name: self._draw(*shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
        self.biases = {name: self._draw(shape[0]) for name, shape in shapes.items()}

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(self.dtype).double()

    def first(self, rows: int) -> Inputs:
        """The first rows alone, of the same model."""
        few = copy.copy(self)
        few.sizes = replace(self.sizes, rows=rows)
        few.ids, few.positions, few.x = self.ids[:rows], self.positions[:rows], self.x[:rows]
        few.attended, few.residual = self.attended[:rows], self.residual[:rows]
        return few

    def results(self, ops: Operations, dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor]]:
        """What each step gives, by its name, in float64 on the CPU."""

        def put(x: Tensor) -> Tensor:
            return x.to(dtype).to(device, copy=True)

        def linear(name: str) -> Linear:
            return Linear(put(self.weights[name]), put(self.biases[name]) if self.sizes.bias else None)

        norm, sizes = Norm(put(self.norm_weight), 1e-5), self.sizes
        head_norms = [Norm(put(weight), 1e-5) for weight in self.head_norms] if sizes.qk_norm else [None, None]
        heads = Heads(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, *head_norms)
        x, rope = ops.embed(self.ids.to(device), self.positions.to(device), put(self.table))
        results = {"embed": x, "norm": ops.norm(put(self.x), norm)}
        results |= dict(zip("qkv", ops.norm_qkv(put(self.x), *ops.absorb(norm, linear("qkv")), heads, rope), strict=True))
        results["norm_gated_product"] = ops.norm_gated_product(put(self.x), *ops.absorb(norm, linear("gate_up")))
        results["add_product"] = ops.add_product(put(self.residual), put(self.attended), linear("out"))
        results["product"] = ops.product(put(self.x), linear("qkv"))
        out = torch.empty_like(results["product"])
        results["product into a place"] = ops.product(put(self.x), linear("qkv"), out)
        assert results["product into a place"].data_ptr() == out.data_ptr()
        assert torch.equal(out, results["product"])
        for name, result in results.items():
            assert name == "embed" or result.dtype == dtype, name
            yield name, result.double().cpu()
