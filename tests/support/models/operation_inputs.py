"""Random inputs for every step of `Operations`, and the results of an implementation, to compare two of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headway.core.contract.weights import QuantizedWeight
from headway.core.oracle.weight_cases import on_device
from headway.kernels.linear.linear import Linear
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Embedding, Gate, Heads, Norm, Operations

NUM_POSITIONS = 5000


def ropes(head_dim: int, *thetas: float, factor: float = 1.3) -> tuple[Tensor, Tensor]:
    """Frequencies and factors of rotary embeddings, each float32 [len(thetas), head_dim / 2]."""
    inv_freq = torch.stack([theta ** -(torch.arange(0, head_dim, 2) / head_dim) for theta in thetas or (1e4,)])
    return inv_freq, torch.full_like(inv_freq, factor)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's steps."""

    rows: int
    hidden: int = 48
    inner: int = 80
    vocab: int = 37
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 12
    qk_norm: bool = False
    v_norm: bool = False
    whole_norm: bool = False
    """True if qk_norm is over all heads of q, and of k, together."""
    bias: bool = False
    layer_norm: bool = False
    learned_positions: bool = False
    rotated: bool = True
    gate_heads: int = 0
    """Number of gate heads in the merged projection, after the heads of v."""
    activation: Activation = "silu"


class Inputs:
    """Drawn once in float64, handed out in any type, so that a reference sees the very numbers."""

    def __init__(
        self, sizes: Sizes, dtype: torch.dtype, seed: int = 0, quantize: Callable[[Tensor], QuantizedWeight] | None = None
    ) -> None:
        """quantize: returns the quantized weight of a linear layer; the reference uses the same weight, dequantized."""
        self.sizes, self.dtype = sizes, dtype
        self._generator = torch.Generator().manual_seed(seed)
        q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.ids = torch.randint(0, sizes.vocab, (sizes.rows,), generator=self._generator)
        self.positions = torch.randint(0, NUM_POSITIONS, (sizes.rows,), generator=self._generator)
        self.table = self._draw(sizes.vocab, sizes.hidden)
        self.x, self.attended, self.residual = (self._draw(sizes.rows, size) for size in (sizes.hidden, q, sizes.hidden))
        self.by, self.gate_norm = self._draw(sizes.rows, q + sizes.head_dim), self._draw(q)
        self.norm_weight = self._draw(sizes.hidden)
        self.head_norms = [self._draw(size if sizes.whole_norm else sizes.head_dim) for size in (q, kv)]
        shapes = {
            "qkv": (q + 2 * kv + sizes.gate_heads * sizes.head_dim, sizes.hidden),
            "gate_up": (2 * sizes.inner, sizes.hidden),
            "out": (sizes.hidden, q),
        }
        self.weights = {name: self._draw(*shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
        self.biases = {name: self._draw(shape[0]) for name, shape in shapes.items()}
        self.forms = {} if quantize is None else {name: quantize(weight) for name, weight in self.weights.items()}
        self.norm_bias = self._draw(sizes.hidden)
        self.places = self._draw(NUM_POSITIONS, sizes.hidden) if sizes.learned_positions else None

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(self.dtype).double()

    def first(self, rows: int) -> Inputs:
        """Only the first rows, of the same model."""
        few = copy.copy(self)
        few.sizes = replace(self.sizes, rows=rows)
        few.ids, few.positions, few.x = self.ids[:rows], self.positions[:rows], self.x[:rows]
        few.attended, few.residual, few.by = self.attended[:rows], self.residual[:rows], self.by[:rows]
        return few

    def _gates(self, put: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Gate]]:
        """Gates of hybrid models: attention's, and recurrent layers' with a norm per head, group or row."""
        dim, whole = self.sizes.head_dim, Norm(put(self.gate_norm), 1e-5)
        yield "of attention", Gate("sigmoid")
        yield "none", Gate("none")
        yield "after the norm of a head", Gate("silu", Norm(put(self.gate_norm[:dim]), 1e-5), dim)
        yield "before the norm of a group", Gate("silu", whole, dim, gate_first=True)
        yield "after the norm of a row", Gate("sigmoid", whole, len(self.gate_norm))

    def results(self, ops: Operations, dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor]]:
        """Return the result of each step by its name, in float64 on the CPU."""

        def put(x: Tensor) -> Tensor:
            return x.to(dtype).to(device, copy=True)

        def linear(name: str) -> Linear:
            bias, form = put(self.biases[name]) if self.sizes.bias else None, self.forms.get(name)
            if form is None or dtype == torch.float64:
                return Linear(put(self.weights[name] if form is None else form.dequantized(torch.float64)), bias)
            return Linear(on_device(form, torch.device(device)), bias, dtype=dtype, kept=True)

        sizes = self.sizes
        norm = Norm(put(self.norm_weight), 1e-5, put(self.norm_bias) if sizes.layer_norm else None)
        head_norms = [Norm(put(weight), 1e-5) for weight in self.head_norms] if sizes.qk_norm else [None, None]
        v_norm = Norm(put(torch.ones(sizes.head_dim)), 1e-5) if sizes.v_norm else None
        heads = Heads(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, *head_norms, v_norm)
        embed = Embedding(put(self.table), 0.75, None if self.places is None else put(self.places))
        x, ropes = ops.embed(self.ids.to(device), self.positions.to(device), embed)
        results = {"embed": x, "norm": ops.norm(put(self.x), norm)}
        results["add_norm"] = ops.add_norm(put(self.residual), put(self.x), norm)
        for number, rope in enumerate(ropes if sizes.rotated else [None]):
            absorbed = ops.absorb(norm, linear("qkv")) if rope and not sizes.whole_norm else (norm, linear("qkv"))
            found = ops.norm_qkv(put(self.x), *absorbed, heads, rope)
            results |= {f"{name}, rope {number}": part for name, part in zip("qkv", found, strict=True)}
        gated = ops.absorb(norm, linear("gate_up"))
        results["norm_gated_product"] = ops.norm_gated_product(put(self.x), *gated, sizes.activation)
        results["gated_product"] = ops.norm_gated_product(put(self.x), None, linear("gate_up"), sizes.activation)
        results["norm_product"] = ops.norm_product(put(self.x), norm, linear("gate_up"), sizes.activation)
        for name, gate in self._gates(put):
            results[f"gate, {name}"] = ops.gate(put(self.attended), put(self.by)[:, sizes.head_dim :], gate)
        results["softcap"] = ops.softcap(put(self.x), 1.5)
        results["add_product"] = ops.add_product(put(self.residual), put(self.attended), linear("out"))
        results["product"] = ops.product(put(self.x), linear("qkv"))
        out = torch.empty_like(results["product"])
        results["product into a place"] = ops.product(put(self.x), linear("qkv"), out)
        assert results["product into a place"].data_ptr() == out.data_ptr()
        assert torch.equal(out, results["product"])
        for name, result in results.items():
            assert name == "embed" or result.dtype == dtype, name
            yield name, result.double().cpu()
