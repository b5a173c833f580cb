"""Self-test of linear and experts kernels: a few small layers, compared with float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig, ExpertsKernel, ExpertsSpec, ExpertsWeights
from headway.core.contract.linear import LinearKernel, LinearSpec
from headway.core.contract.weights import Weight, WeightFormat
from headway.core.oracle.weight_cases import WEIGHTS, Drawn, WeightCase, experts_case, linear_case, make_weight
from headway.tuning.measure.counted_layer import TRIED

_SIZE = 256
"""Number of inputs and of outputs of each layer: a multiple of the group and block sizes of every format."""
_WRONG = 0.05
"""Error, relative to the norm of the correct answer, above which a kernel is reported."""


def weight_tests(kernel: type[Any], device: torch.device) -> Iterator[str]:
    """Run a linear or experts kernel on one layer for each kind of weight that the kernel supports, and yield each error."""
    with torch.inference_mode():
        for dtype in kernel.capabilities.dtypes:
            for name in WEIGHTS:
                drawn = Drawn(torch.Generator().manual_seed(0))
                layer = _linear if issubclass(kernel, LinearKernel) else _experts
                wrong = ""
                try:
                    for rows, case, made, prepared in layer(kernel, name, dtype, drawn, device):
                        found = torch.zeros_like(case.right, dtype=dtype, device=device) if case.onto is None else case.onto
                        case.call(made, prepared, found)
                        error = float((found.cpu().double() - case.right).norm() / case.right.norm())
                        if not error < _WRONG:  # further rows are still run: they may crash
                            wrong = wrong or f"its answer is off by {error:.1e} with {rows} rows"
                except Exception as error:
                    wrong = f"it raised {type(error).__name__}: {error}"
                if wrong:
                    yield f"self-test with {name} weights, {dtype}: {wrong}"


_Case = tuple[int, WeightCase, Any, Any]
"""(number of rows, case, kernel instance, weights that the instance prepared)."""


def _linear(kernel: type[LinearKernel], name: str, dtype: torch.dtype, drawn: Drawn, device: torch.device) -> Iterator[_Case]:
    weight = make_weight(name, (_SIZE, _SIZE), dtype, drawn)
    spec = LinearSpec(_SIZE, _SIZE, dtype, device, WeightFormat.of(weight))
    if not kernel.supports(spec):
        return
    made = kernel(spec)
    first = linear_case(weight, drawn.rows(1, _SIZE).to(dtype), device)
    prepared = made.prepare(first.weight)
    for rows in TRIED:
        if made.runs(rows):
            yield rows, linear_case(weight, drawn.rows(rows, _SIZE).to(dtype), device), made, prepared


def _experts(kernel: type[ExpertsKernel], name: str, dtype: torch.dtype, drawn: Drawn, device: torch.device) -> Iterator[_Case]:
    config = ExpertsConfig(num_experts=4, top_k=2, intermediate_size=_SIZE)
    up, down = (_stacked(name, (config.num_all, rows, _SIZE), dtype, drawn) for rows in (config.up_size, _SIZE))
    spec = ExpertsSpec(config, _SIZE, dtype, device, WeightFormat.of(up), WeightFormat.of(down))
    if not kernel.supports(spec):
        return
    made, weights, prepared = kernel(spec), ExpertsWeights(up, down), None
    for rows in TRIED:
        if not made.runs(rows):
            continue
        experts = torch.stack([torch.randperm(4, generator=drawn.generator)[:2] for _ in range(rows)]).int()
        scores = torch.rand(rows, 2, generator=drawn.generator)
        given = drawn.rows(rows, _SIZE).to(dtype), experts, scores
        case = experts_case(config, weights, given, drawn.rows(rows, _SIZE).to(dtype), device)
        prepared = made.prepare(case.weight) if prepared is None else prepared
        yield rows, case, made, prepared


def _stacked(name: str, shape: tuple[int, int, int], dtype: torch.dtype, drawn: Drawn) -> Weight:
    weight = make_weight(name, (shape[0] * shape[1], shape[2]), dtype, drawn)
    return weight.view(shape) if isinstance(weight, Tensor) else weight
