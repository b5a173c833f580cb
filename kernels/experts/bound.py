"""MoE layers bound to kernels: the candidate kernels for each kind of layer, and the selected kernel for each number of
tokens."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from headway.core.contract.errors import BackendError, UnsupportedError
from headway.core.contract.experts import ExpertsConfig, ExpertsKernel, ExpertsSpec
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.operation import batch_invariance
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.support import Support
from headway.core.select.costs import AxisTimes
from headway.core.system.logs import log_traceback
from headway.kernels.experts.builtin import TOKEN_COUNTS, TOKENS, builtin_classes, rules
from headway.kernels.experts.plain import Front, Routed, RoutedKernel, RouteTokens, TorchExperts
from headway.kernels.experts.weights import RoutedWeights, spec_of

log = logging.getLogger("headway")

AUTO = "auto"


@dataclass
class ExpertsOptions:
    """Options for the kernels of a model's MoE layers."""

    able: Callable[[str], Sequence[type[ExpertsKernel]]] = builtin_classes
    """Maps a device type to the kernel classes available on it, in order of preference. Called when an MoE layer is loaded."""
    requested: str = AUTO
    """Name of the kernel that the user requested. auto selects the kernel with the least measured time or, without measured
    times, by a rule."""
    refusals: dict[ExpertsSpec, Support] = field(default_factory=dict)
    """Kinds of layers that the requested kernel does not support, each with the reason."""
    specs: Counter[ExpertsSpec] = field(default_factory=Counter)
    """Number of bound layers for each spec."""
    invariant: bool = False
    """True to use third parties' kernels only if they are batch-invariant (deterministic mode)."""

    def reads(self, weight_format: str, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether a third party's kernel claims a weight format, so that such weights stay in the checkpoint's format."""
        claims = [each.capabilities for each in self.able(device.type) if not is_own(each)]
        return any(weight_format in each.formats and dtype in each.dtypes and device.type in each.devices for each in claims)

    def check(self) -> None:
        """Check that the requested kernel, if any, supports a layer of the model.

        :raises UnsupportedError: if the requested kernel supports none of the layers.
        """
        if self.requested == AUTO or len(self.specs) > len(self.refusals):
            return
        none = Support.no("model", "layers of experts", "one without")
        reasons = [reason for support in self.refusals.values() for reason in support.reasons]
        raise UnsupportedError(f"experts kernel {self.requested}", list(dict.fromkeys(reasons)) or none.reasons)


def is_own(kernel: type[ExpertsKernel]) -> bool:
    """Return whether a kernel is one of Headway's own."""
    return issubclass(kernel, TorchExperts | RoutedKernel)


class Experts(Protocol):
    """A layer of experts (MoE)."""

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return the residual stream plus the experts' output for its normed rows.

        x: [num_tokens, hidden_size], the residual stream. onto: tensor to add to instead of x; may be overwritten.
        """


Make = Callable[[type[ExpertsKernel], ExpertsSpec, dict[Any, Any]], ExpertsKernel | None]
"""Factory of a kernel. Its arguments include objects that kernels of one kind of layer share. Returns None if the kernel is not
used for the spec."""


Call = Callable[[Tensor, Tensor], None]
"""(x, out): add the experts' output for the normed rows of x to `out`."""


class ExpertsLayers:
    """Factory for the MoE layers of one model. Layers with equal specs share their kernels and the selection among them."""

    def __init__(self, options: ExpertsOptions, front: Callable[[ExpertsConfig], Front], make: Make) -> None:
        """Prepare the factory. front: returns a factory of a layer's norm and router, given the layer's configuration."""
        self._options = options
        self._front = front
        self._make = make
        self._kinds: dict[ExpertsSpec, ExpertsKind] = {}

    def bind(self, config: ExpertsConfig, weights: RoutedWeights, norm: Any) -> BoundExperts:
        """Return a layer that is ready to be called.

        :raises PluginError: if the requested kernel cannot be made or prepared.
        """
        spec = spec_of(config, weights)
        self._options.specs[spec] += 1
        return self.kind(spec).bind(weights, norm)

    def kind(self, spec: ExpertsSpec) -> ExpertsKind:
        """Return the `ExpertsKind` of a spec, with its candidate kernels. The first call makes it."""
        if spec not in self._kinds:
            self._kinds[spec] = self._kind(spec)
        return self._kinds[spec]

    def _kind(self, spec: ExpertsSpec) -> ExpertsKind:
        """Make the `ExpertsKind` of a spec. Third-party kernels that raise are skipped with a warning."""
        requested, kernels, shared = self._options.requested, list[ExpertsKernel](), dict[Any, Any]()
        refused = dict[str, Support]()
        for each in self._options.able(spec.device.type):
            try:
                support = each.supports(spec)
                if spec.device.type == "cuda" and each.graph_level == GraphLevel.NONE:
                    support &= Support.no("graph_level", "another than NONE, since steps are captured in CUDA graphs", "NONE")
                if self._options.invariant and not is_own(each):
                    support &= batch_invariance(each.capabilities)
                made = self._make(each, spec, shared) if support else None
            except Exception as error:
                log_traceback(f"experts kernel {each.name}", error)
                support, made = Support.no("supports()", "an answer", f"{type(error).__name__}: {error}"), None
                log.warning("experts: excluding %s: %s", each.name, support.brief)
            if made is not None:
                kernels.append(made)
            else:
                no = Support.no("kernel", "one that takes part in this mode", each.name)
                refused[each.name] = no if support else support
        served = requested in (kernel.name for kernel in kernels)
        if requested != AUTO and not served:
            self._options.refusals[spec] = refusal = refused[requested]
            log.warning("experts: %s does not support %s; auto selects the kernel for them: %s", requested, spec, refusal.brief)
        front, named = self._front(spec.config), requested if served else AUTO
        return ExpertsKind(spec, kernels, front, named, refused, self._options.invariant)


class KernelRaisedError(Exception):
    """An exception that a third party's kernel raised in a step."""

    def __init__(self, kernel: ExpertsKernel, error: Exception) -> None:
        self.kernel = kernel
        self.error = error


class ExpertsKind:
    """MoE layers of one spec. Built-in GPU kernels never synchronise or read values on the host, so CUDA graphs can capture
    them.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        kernels: Sequence[ExpertsKernel],
        front: Front,
        requested: str = AUTO,
        refused: Mapping[str, Support] | None = None,
        fixed: bool = False,
    ) -> None:
        """Prepare the layers' kernels.

        kernels: the candidates, in order of preference. refused: reasons against the other kernels. fixed: True to ignore
        measured times (deterministic mode).
        """
        self.fixed = fixed
        self.spec = spec
        self.front = front
        self.requested = requested
        self.kernels = {each.name: each for each in kernels if any(map(each.runs, TOKEN_COUNTS))}
        self.refused = dict(refused or {})
        self.example: RoutedWeights | None = None
        """Weights of one layer, for measurements. None if there is only one kernel."""
        self._bound: list[ref[BoundExperts]] = []
        self.times: AxisTimes | None = None
        """Measured times that select the kernel. None means that a rule selects it."""
        self._chosen: dict[int, ExpertsKernel] = {}

    @property
    def config(self) -> ExpertsConfig:
        """Configuration of the layers."""
        return self.spec.config

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the rows."""
        return self.spec.dtype

    @property
    def device(self) -> torch.device:
        """Device of the layers."""
        return self.spec.device

    @property
    def forms(self) -> tuple[str, str]:
        """Names of the two weights' quantization formats. An empty name means dense."""
        first, second = ("" if each.name == "plain" else str(each) for each in (self.spec.gate_up, self.spec.down))
        return first, second

    @property
    def chooses(self) -> bool:
        """True if there is more than one candidate kernel."""
        return len(self.kernels) > 1

    @property
    def third_party(self) -> list[ExpertsKernel]:
        """Kernels of third parties."""
        return [each for each in self.kernels.values() if not is_own(type(each))]

    def bind(self, weights: RoutedWeights, norm: Any) -> BoundExperts:
        """Return a layer of this kind. Its original weights stay in memory only while a kernel may need them."""
        layer = BoundExperts(self, weights, norm)
        if not self.chooses:
            layer.settle(self.kernels.values())
            return layer
        self.example = self.example or weights
        self._bound.append(ref(layer))
        return layer

    @property
    def _layers(self) -> list[BoundExperts]:
        return [layer for each in self._bound if (layer := each()) is not None]

    def serving(self, num_tokens: int) -> list[ExpertsKernel]:
        """Return the kernels that run this number of tokens."""
        return [each for each in self.kernels.values() if each.runs(num_tokens)]

    def kernel_for(self, num_tokens: int) -> ExpertsKernel:
        """Return the kernel for a number of tokens: the requested kernel, the fastest measured kernel, or the kernel that a rule
        selects."""
        if num_tokens not in self._chosen:
            able = {each.name: each for each in self.serving(num_tokens)}
            name = self.requested if self.requested in able else None
            name = name or (None if self.times is None else self.times.fastest(num_tokens, able))
            likely = [each for ruled in rules(num_tokens, self.config) for each in able.values() if each.name.startswith(ruled)]
            self._chosen[num_tokens] = able[name] if name else next(iter(likely or able.values()))
        return self._chosen[num_tokens]

    def use_times(self, times: AxisTimes) -> None:
        """Use measured times to select kernels from now on."""
        self.times = times
        self._rebind()

    def leave_out(self, name: str, why: str, error: BaseException | None = None) -> None:
        """Remove a kernel from the candidates because it failed or gave a wrong result.

        :raises BackendError: if it is the requested kernel.
        """
        if name == self.requested:
            raise BackendError(f"experts kernel {name}: {why}") from error
        log.warning("experts: excluding %s: %s", name, why)
        self.refused[name] = Support.no("its trial and its steps", "a right answer", why)
        del self.kernels[name]
        self._rebind()

    def leave_out_raised(self, raised: KernelRaisedError) -> None:
        """Remove the kernel that raised an error from the candidates, like `leave_out`."""
        log_traceback(f"experts kernel {raised.kernel.name}", raised.error)
        self.leave_out(raised.kernel.name, f"it raised {type(raised.error).__name__}: {raised.error}", raised.error)

    def _rebind(self) -> None:
        self._chosen.clear()
        for layer in self._layers:
            layer.rebind()

    def prepare(self) -> int:
        """Prepare all layers' weights for the selected kernels. Return the size, in bytes, of the memory that Headway's kernels
        need in addition to the weights."""
        serving = dict.fromkeys(map(self.kernel_for, TOKEN_COUNTS))
        if self.device.type == "cpu" and all(is_own(type(each)) for each in serving):
            self.kernels = {each.name: each for each in serving}  # avoids storing a layer's weights twice
            self.example = None
        try:
            for layer in self._layers:
                layer.settle(serving)
        except KernelRaisedError as raised:
            self.leave_out_raised(raised)
            return self.prepare()
        weights = [layer.weights for layer in self._layers if layer.weights is not None]
        own = [each for each in serving if isinstance(each, RoutedKernel)]
        return max((sum(map(each.extra_bytes, weights)) for each in own), default=0)  # kernels share this memory

    @property
    def source(self) -> str:
        """Source of the choice, for messages: the user, measured times, or the rule."""
        source = "not measured" if self.times is None else self.times.source
        return source if self.requested == AUTO else f"{self.requested} was asked for"

    def changes(self) -> dict[int, str]:
        """Return the name of the selected kernel, keyed by each number of tokens at which the choice changes."""
        return TOKENS.changes(lambda count: self.kernel_for(count).name)

    def describe(self) -> str:
        """Return a description of the kernel for each range of token counts, and the source of the choice."""
        text = TOKENS.describe(self.changes(), self.source)
        if self.forms == ("", ""):
            return text
        first, second = (form or DTYPE_NAMES[self.dtype] for form in self.forms)
        text = f"{first if first == second else f'{first}, down {second}'}: {text}"
        if any(self.kernel_for(count).name.startswith("dequantize") for count in TOKEN_COUNTS):
            text += f"; expanding a layer takes {self.scratch_bytes / 1e9:.1f} GB, for its length"
        return text

    @property
    def scratch_bytes(self) -> int:
        """Size of a layer's dequantized weights, in bytes."""
        config, hidden = self.config, self.spec.hidden_size
        sizes = (self.forms[0], config.up_size), (self.forms[1], config.intermediate_size)
        return sum(config.num_all * hidden * rows * self.dtype.itemsize for form, rows in sizes if form)


class BoundExperts:
    """One layer of experts: its norm, its router, and a bound kernel for each number of tokens."""

    def __init__(self, kind: ExpertsKind, weights: RoutedWeights, norm: Any) -> None:
        self.kind = kind
        self.weights: RoutedWeights | None = weights
        """Weights for kernels that are not prepared yet. None once no kernel needs them."""
        self.route: RouteTokens = kind.front(weights, norm)
        self._prepared: dict[str, Any] = {}
        self._calls: dict[int, Call] = {}

    def settle(self, serving: Iterable[ExpertsKernel]) -> None:
        """Prepare the weights for the selected kernels. On a CPU, free the original weights if only one kernel remains, because
        this kernel has its own copy."""
        for kernel in serving:
            self.prepared(kernel)
        if not self.kind.chooses and self.kind.device.type == "cpu":
            self.weights = None

    def prepared(self, kernel: ExpertsKernel) -> Any:
        """Return the weights prepared for a kernel. The first call prepares them.

        :raises KernelRaisedError: if a third party's kernel raised.
        """
        if kernel.name not in self._prepared:
            assert self.weights is not None
            try:
                self._prepared[kernel.name] = kernel.prepare(self.weights)
            except Exception as error:
                if is_own(type(kernel)):
                    raise
                raise KernelRaisedError(kernel, error) from error
        return self._prepared[kernel.name]

    def bind_as(self, other: BoundExperts) -> None:
        """Prepare this layer's weights for the same kernels as `other`, a layer of the same kind."""
        for kernel in other._kernels():
            self.prepared(kernel)
        if other.weights is None:
            self.weights = None

    def update(self, built: BoundExperts) -> None:
        """Copy the new weights of `built` (see `bind_as`) over the data that third-party kernels prepared.

        :raises ConfigError: if a kernel does not support updates.
        """
        for kernel in self._kernels():
            if not is_own(type(kernel)):
                kernel.update(self.prepared(kernel), built.prepared(kernel))

    def _kernels(self) -> list[ExpertsKernel]:
        """Return the kernels for which the weights are prepared."""
        return [kernel for name, kernel in self.kind.kernels.items() if name in self._prepared]

    def routed(self, x: Tensor, kernel: ExpertsKernel) -> Routed:
        """Return the normed rows and their experts. x: [num_tokens, hidden_size], the residual stream."""
        return self.route(x, not isinstance(kernel, RoutedKernel) or kernel.sorts)

    def add(self, kernel: ExpertsKernel, routed: Routed, out: Tensor) -> None:
        """Add a kernel's output for routed rows to `out`, in place."""
        if isinstance(kernel, RoutedKernel):
            kernel.add(routed, self.prepared(kernel), out)
        else:
            kernel.apply(routed.x, routed.experts, routed.weights, self.prepared(kernel), out)

    def rebind(self) -> None:
        """Forget the selected kernels, so that the next step selects them again."""
        self._calls.clear()

    def _call(self, kernel: ExpertsKernel) -> Call:
        """Return a function that calls a kernel, and raises KernelRaisedError if a third party's kernel raises."""
        route, weights = self.route, self.prepared(kernel)
        if isinstance(kernel, RoutedKernel):
            add, sorts = kernel.add, kernel.sorts
            return lambda x, out: add(route(x, sorts), weights, out)

        def call(x: Tensor, out: Tensor) -> None:
            routed = route(x, True)
            try:
                kernel.apply(routed.x, routed.experts, routed.weights, weights, out)
            except Exception as error:
                capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
                if capturing or is_own(type(kernel)) or isinstance(error, torch.OutOfMemoryError):
                    raise
                raise KernelRaisedError(kernel, error) from error

        return call

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Add the experts' output for the normed rows of x to `onto`, or to x itself, in place, and return the sum.

        x: [num_tokens, hidden_size], the residual stream. A third party's kernel that raises is replaced by the next candidate.
        :raises BackendError: if the requested kernel raised.
        """
        out, count = x if onto is None else onto, len(x)
        if count:
            try:
                call = self._calls.get(count)
                if call is None:
                    call = self._calls[count] = self._call(self.kind.kernel_for(count))
                call(x, out)
            except KernelRaisedError as raised:
                self.kind.leave_out_raised(raised)
                return self(x, onto)
        return out
