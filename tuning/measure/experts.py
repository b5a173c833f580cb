"""Measured times of the methods for MoE layers (grouped GEMM, GEMV), for each number of tokens."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsKernel
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.spec import DTYPE_NAMES
from headway.kernels.experts.bound import AUTO, BoundExperts, ExpertsKind, KernelRaisedError
from headway.kernels.experts.builtin import TOKEN_COUNTS, TOKENS
from headway.kernels.experts.plain import TorchExperts
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.step.operations import Norm
from headway.registry import Registry
from headway.tuning.measure.contender import captured
from headway.tuning.measure.counted_layer import INTERLEAVED, TRIED, CountedLayer, max_error
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.find_table import find_table
from headway.tuning.measure.points import counted_points
from headway.tuning.measure.timing import on_device
from headway.tuning.table.convert import failures
from headway.tuning.table.old_formats import HIDDEN
from headway.tuning.table.schema import DeviceIdentity, ExpertsRecord

_GRAPHED, _LAYERS = 256, 4
"""Maximum number of tokens for timing in a CUDA graph, and number of layers in the graph; each layer has its own tokens.

Timing a single layer gives a different ranking: a method with five launches, most of them hidden by neighbouring layers, took 252
us in a single layer and 180 us per layer in a step.
"""
_FEW = 16
"""Maximum number of tokens with which a method is checked before it is timed."""
_TOLERANCE = 5e-2
"""Maximum error, relative to the answer's norm: several times the rounding error of bfloat16."""
log = logging.getLogger("headway")


def choose_experts(
    kinds: Iterable[ExpertsKind], budget: float, ahead: CompileAhead | None = None, registry: Registry | None = None
) -> None:
    """Select methods for each kind of MoE layer by measured times: times stored for this device, or new measurements.

    Third-party kernels are checked at every start. A kernel with wrong answers is excluded, and the error is recorded.

    budget: seconds that may be spent on measuring. If 0, nothing is measured. Without a stored table a heuristic then chooses,
    and the log says so. ahead: context manager in which kernels are compiled in parallel; None compiles each kernel at its first
    launch. registry: registry of third-party kernels.

    :raises BackendError: if the kernel that the user requested gives wrong answers.
    """
    for kind in kinds:
        if kind.third_party or kind.chooses:
            layer = expert_layer(kind, identify_device(kind.device), ahead, registry)
        for kernel in kind.third_party:
            if why := layer.fault(kernel):
                kind.leave_out(kernel.name, why)
        if kind.chooses and not kind.fixed:
            layer = dataclasses.replace(layer, kernels=list(kind.kernels))  # without the excluded kernels
            layer.obey(budget if kind.requested == AUTO else 0.0)
        log.info("experts: %s", kind.describe())
        taken = kind.prepare()
        if taken:
            log.info("experts: scales repacked for the kernel take %.1f MB more", taken / 1e6)


@dataclass(frozen=True)
class ExpertLayer(CountedLayer):
    """A kind of MoE layer, measured at several numbers of tokens on the weights of one layer.

    A random router distributes random tokens over all experts.
    """

    kind: ExpertsKind
    ahead: CompileAhead | None
    _tokens: dict[int, list[Tensor]] = field(default_factory=dict)
    _faults: dict[str, str] = field(default_factory=dict)

    @cached_property
    def sample(self) -> BoundExperts:
        """The layer that is timed.

        :raises ValueError: if no layer of this kind was loaded.
        """
        example = self.kind.example
        if example is None:
            raise ValueError("a kind of experts without a layer")
        router = self._draw(*example.router.shape) * example.router.shape[1] ** -0.5
        biases = {name: getattr(example, name) for name in ("router_bias", "correction_bias")}
        flat = {name: torch.zeros_like(bias) for name, bias in biases.items() if bias is not None}
        weights: RoutedWeights = dataclasses.replace(example, router=router, **flat)
        return BoundExperts(self.kind, weights, Norm(torch.ones_like(router[0]), 1e-6))

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator(self.on).manual_seed(0)

    def _draw(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.kind.dtype, device=self.on).normal_(generator=self._generator)

    def tokens(self, count: int) -> list[Tensor]:
        """Return one residual stream [count, hidden_size] for each of the layers that are timed together."""
        if count not in self._tokens:  # holds one count at a time: the largest need much memory
            self._tokens.clear()
            self._tokens[count] = [self._draw(count, self.kind.spec.hidden_size) for _ in range(self.layers(count))]
        return self._tokens[count]

    def wrong(self, name: str) -> str:
        """Return the result of `fault` for a kernel, which is checked once."""
        if name not in self._faults:
            self._faults[name] = self.fault(self.kind.kernels[name])
        return self._faults[name]

    def obey(self, seconds: float) -> None:
        """Select kernels of this kind by measured times, if any times exist. seconds: time that may be spent on measuring."""
        table, kind = find_table(self, seconds), self.kind
        if table is not None:
            for name, why in failures(table).items():
                if kind.chooses and name in kind.kernels and name != kind.requested:
                    kind.leave_out(name, why)
            kind.use_times(self.times(table, TOKENS))
            if table.prior is not None:
                self._check_chosen()

    def _check_chosen(self) -> None:
        """Compile and check the kernels that shipped times select. A kernel with wrong answers is excluded."""
        kind = self.kind
        with on_device(self.on), torch.inference_mode():
            with nullcontext() if self.ahead is None else self.ahead():
                for count, name in kind.changes().items():
                    with suppress(Exception):  # the check meets the same error and reports it
                        self.run(kind.kernels[name], count)
            while bad := next(filter(self.wrong, kind.changes().values()), None):
                kind.leave_out(bad, self.wrong(bad))

    def able(self, count: int) -> list[str]:
        return [kernel.name for kernel in self.kind.serving(count)]

    def check(self, name: str, count: int) -> None:
        if why := self.wrong(name):
            raise ArithmeticError(why)

    def layers(self, count: int) -> int:
        return _LAYERS if self.on.type == "cuda" and count <= _GRAPHED else 1

    @contextmanager
    def ready(self, counts: Collection[int]) -> Iterator[None]:
        if self.ahead is not None:
            with self.ahead():
                for count in counts:
                    for kernel in self.kind.serving(count):
                        with suppress(Exception):  # the check meets the same error and reports it
                            self.run(kernel, count)
        for name in self.kind.kernels:  # like the compilation of attention kernels, this does not count as measuring time
            self.wrong(name)
        yield

    def run(self, kernel: ExpertsKernel, count: int) -> None:
        """Run each layer once with a kernel and `count` tokens."""
        for x in self.tokens(count):
            self.sample.add(kernel, self.sample.routed(x, kernel), x)

    def call(self, name: str, count: int) -> Callable[[], object]:
        """Return a call that runs the layers as an engine does: by replaying a CUDA graph if there are few tokens."""
        run = partial(self.run, self.kind.kernels[name], count)
        if self.layers(count) == 1:
            return run
        try:
            return captured(run)
        except Exception as error:
            return partial(_raise, error)  # raised while timing, like errors of later calls

    def fault(self, kernel: ExpertsKernel) -> str:
        """Return a description of a kernel's error for one token and for a few tokens compared with torch's operations, or of the
        exception. "" means correct."""
        taken = [count for count in TOKEN_COUNTS if kernel.runs(count)]
        few = max([count for count in taken if count <= _FEW] or taken[:1])
        third_party = kernel in self.kind.third_party
        more = [count for count in TRIED if third_party and kernel.runs(count)]
        try:
            error, count = max((self._error(kernel, count), count) for count in {taken[0], few, *more})
        except Exception as raised:
            raised = raised.error if isinstance(raised, KernelRaisedError) else raised
            return f"{type(raised).__name__}: {raised}"
        right = error < max_error(kernel, self.kind.dtype, _TOLERANCE, third_party)
        if right and third_party and self.kind.fixed and not self._is_invariant(kernel):
            return "batch_invariant: the bits of a token depend on the others"
        return "" if right else f"its answer is off by {error:.1e} with {count} tokens"

    def _is_invariant(self, kernel: ExpertsKernel) -> bool:
        """Return whether the output of a step's last token has the same bits if the token is computed in a separate step."""
        whole = self.sample.routed(self.tokens(TRIED[-1])[0], kernel)
        alone = dataclasses.replace(whole, x=whole.x[-1:], experts=whole.experts[-1:], weights=whole.weights[-1:])
        found = [torch.zeros_like(each.x) for each in (whole, alone)]
        for routed, out in zip((whole, alone), found, strict=True):
            self.sample.add(kernel, routed, out)
        return torch.equal(found[0][-1:], found[1])

    def _error(self, kernel: ExpertsKernel, count: int) -> float:
        routed = self.sample.routed(self.tokens(count)[0], kernel)
        found, expected = torch.zeros_like(routed.x), torch.zeros_like(routed.x)
        self.sample.add(kernel, routed, found)
        plain = TorchExperts(self.kind.spec)
        plain.apply(routed.x, routed.experts, routed.weights, self._linears, expected)
        return float((found - expected).float().norm() / expected.float().norm())

    @cached_property
    def _linears(self) -> Any:
        """The layer's weights in the format that `TorchExperts` needs."""
        assert self.sample.weights is not None
        return TorchExperts(self.kind.spec).prepare(self.sample.weights)


def _raise(error: Exception) -> None:
    raise error


def expert_layer(
    kind: ExpertsKind, device: DeviceIdentity, ahead: CompileAhead | None = None, registry: Registry | None = None
) -> ExpertLayer:
    """Return a kind of MoE layer as a layer that can be measured."""
    forms = "" if kind.forms == ("", "") else f" {' / '.join(kind.forms)}"
    record = ExpertsRecord(layer=f"{kind.config}{HIDDEN}{kind.spec.hidden_size} {DTYPE_NAMES[kind.dtype]}{forms}")
    wanted = counted_points("tokens", TOKEN_COUNTS)
    return ExpertLayer(record, device, list(kind.kernels), wanted, kind.device, INTERLEAVED, registry, kind, ahead)
