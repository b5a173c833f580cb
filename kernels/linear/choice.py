"""The choice of the kernel that computes a linear layer: the one that was asked for, the fastest measured one, or a rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor

from headway.core.contract.backend import API_VERSION
from headway.core.contract.errors import BackendError, ConfigError, HeadwayError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.linear import LinearKernel, LinearKernelInfo, LinearSpec
from headway.core.contract.operation import batch_invariance
from headway.core.contract.support import Support
from headway.core.select.costs import AxisTimes, CountAxis

log = logging.getLogger("headway")
Layer = Any
"""A `Linear`, whose module imports this one."""

ROW_COUNTS = tuple(2**n for n in range(14))
"""Numbers of rows that are measured; any other takes the choice of the next larger one, whose tiles are the same."""
ROWS = CountAxis("rows", ROW_COUNTS)
NUM_BUCKETS: Final = 32
"""Buckets of rows that a layer is bound for: up to 1, 2, 4, ... rows."""
FEW, SHARED = "few_rows", "shared_rows"
"""Our GEMV and split-K GEMM over quantised weights in CUDA C++, for up to 16 rows and for up to 512."""
FLOAT8 = "w8a8"
"""Our GEMM of FP8 by FP8, for up to 256 rows, which are rounded."""
KERNEL, SCALED, DEQUANTIZED = "kernel", "scaled_mm", "dequantize"
"""Our GEMM over quantised weights in Triton; `torch._scaled_mm`, for which x is rounded to FP8; cuBLAS over a weight that is
dequantised for each product."""
GEMV, TILES, TORCH = "gemv", "tiles", "torch"
"""Our kernels over plain weights for up to 16 rows and for up to 128, and torch.mm."""
MARLIN, CUTLASS = "marlin", "cutlass"
NATIVE, INT4PACK, ONEDNN, EXPANDED = "native", "int4pack", "onednn", "expanded"
"""On a CPU: our C, torch's product over packed int4, oneDNN, and a weight that is dequantised once."""


def _info(name: str, summary: str, place: str, extra: str = "", devices: tuple[str, ...] = ("cuda",)) -> LinearKernelInfo:
    """Return a registration. place: the class's module below headway.kernels.linear, a colon, and its name."""
    load = partial(resolve_name, f"headway.kernels.linear.{place}")
    return LinearKernelInfo(name, summary, load, extra, devices=devices, api_version=API_VERSION)


_TRITON, _CUDA = "headway[triton]", "headway[cuda]"
BUILTIN: Final = (
    _info(GEMV, "our GEMV and skinny GEMM over plain weights in Triton, up to 16 rows", "gpu_kernels:Gemv", _TRITON),
    _info(TILES, "our tiled split-K GEMM over plain weights in Triton, up to 128 rows", "gpu_kernels:Tiles", _TRITON),
    _info(KERNEL, "our fused GEMM over quantised weights in Triton", "gpu_kernels:TritonKernel", _TRITON),
    _info(FEW, "our GEMV over quantised weights in CUDA C++, up to 16 rows", "gpu_kernels:FewRowsKernel", _CUDA),
    _info(SHARED, "our split-K GEMM over quantised weights for H100 and H200", "gpu_kernels:SharedRowsKernel", _CUDA),
    _info(FLOAT8, "our FP8 GEMM for H100 and H200, which rounds x to FP8", "gpu_kernels:W8A8Kernel", _CUDA),
    _info(SCALED, "torch._scaled_mm, for which x is rounded to FP8", "gpu_kernels:ScaledMM", _TRITON),
    _info(DEQUANTIZED, "cuBLAS over a weight that is dequantised for each product", "gpu_kernels:Dequantize", _TRITON),
    _info(MARLIN, "vLLM's marlin_gemm", "marlin:Marlin", "vllm"),
    _info(CUTLASS, "vLLM's cutlass_scaled_mm, for which x is rounded to FP8", "marlin:Cutlass", "vllm"),
    _info(NATIVE, "our C over packed blocks on a CPU", "cpu_kernels:Native", devices=("cpu",)),
    _info(INT4PACK, "torch's product over packed int4 on a CPU", "cpu_kernels:Int4Pack", devices=("cpu",)),
    _info(ONEDNN, "oneDNN over a weight that is packed once", "cpu_kernels:OneDnn", devices=("cpu",)),
    _info(TORCH, "torch.mm over a plain weight", "cpu_kernels:TorchMM", devices=()),
    _info(EXPANDED, "a weight that is dequantised once, on a CPU", "cpu_kernels:Expanded", devices=("cpu",)),
)
"""Where nothing else decides, the first that can compute a layer does; over quantised weights on a GPU `rule` comes before."""

ON_GPU: Final = tuple(each.name for each in BUILTIN if "cpu" not in each.devices)


def rule(rows: int, able: Collection[str]) -> str:
    """Choose without a measurement: a kernel as long as reading the weight takes longest, then what multiplies fastest."""
    most = FEW_ROWS if SCALED in able else MORE_ROWS
    if FEW in able and rows <= LEAST_SHARED:
        return FEW
    if SHARED in able and rows <= most:
        return SHARED
    if KERNEL in able and rows <= most:
        return KERNEL
    return next(name for name in (SCALED, DEQUANTIZED, *able) if name in able)


WORTH = 1.05
"""How much faster a kernel that rounds x must be than one that does not."""
LEAST_SHARED = 8
"""Rows up to which `few_rows` serves. On an H200, an 8B layer in 4 bits: 55 us to 67 at 8 rows, 73 to 65 at 16."""
FEW_ROWS = 32
"""Rows up to which the kernel serves where `torch._scaled_mm` does too. On an H200, fp8 28672 x 4096: 91 us to 63 at 64 rows."""
MORE_ROWS = 256
"""Likewise where only `dequantize` does. On an H200, 4 bits 28672 x 4096: 209 us to 202 at 256 rows."""


class LinearChoice:
    """Linear layers of one format and shape: the kernels that can compute them, and the one for each number of rows."""

    def __init__(
        self,
        name: str,
        kernels: Mapping[str, LinearKernel],
        refused: Mapping[str, Support] | None = None,
        gated: bool = False,
        guests: Collection[str] = (),
        named: str | None = None,
        fixed: bool = False,
    ) -> None:
        """name: format, shape and whatever else tells choices apart. kernels: by label, in the order in which they are preferred
        without a measurement. refused: the other kernels, and why not. guests: names of third parties' kernels. named: the
        kernel that the user asked for, which runs wherever it can. fixed: times decide nothing (deterministic mode)."""
        self.name = name
        self.fixed = fixed
        self.gated = gated
        self.kernels = dict(kernels)
        self.refused = dict(refused or {})
        self.compute: Callable[[str, Tensor, Layer], Tensor] = self._alone
        """The step of x [rows, in_features] and a layer by a kernel: the product, or if it is gated and the device's operations
        fuse that, RMSNorm (weight 1, epsilon 1e-6), both products, and SiLU of the first times the second."""
        self._layers: WeakSet[Layer] = WeakSet()
        self._guests = frozenset(guests)
        self._named = named
        self.times: AxisTimes | None = None
        """Measured times, by which the layers choose; None: a rule does."""

    @property
    def layers(self) -> list[Layer]:
        """A model's layers of this kind, in their order."""
        return sorted(self._layers, key=lambda layer: layer.number)

    def add(self, layer: Layer) -> None:
        """Count a layer as one of this kind."""
        self._layers.add(layer)

    @property
    def is_decided(self) -> bool:
        """True if the kernel that the user asked for serves, so that nothing need be measured."""
        return any(map(self.is_named, self.kernels))

    @property
    def is_open(self) -> bool:
        """True if a third party's kernel takes part, so that a rule does not know the fastest."""
        return any(self.is_guest(name) for name in self.kernels)

    @cached_property
    def is_invariant(self) -> bool:
        """True if one third party's kernel serves any number of rows, in deterministic mode."""
        serving = [*self.serving()]
        return self.fixed and len(serving) == 1 and self.is_guest(serving[0])

    @property
    def hands_over(self) -> bool:
        """True if a third party's kernel takes part that computes more than the product."""
        return any(kernel.capabilities.fused for name, kernel in self.kernels.items() if self.is_guest(name))

    def is_guest(self, name: str) -> bool:
        """Return whether a kernel is a third party's. name: with its variant."""
        return name.partition(" ")[0] in self._guests

    def is_named(self, name: str) -> bool:
        """Return whether a kernel is the one that the user asked for. name: with its variant."""
        return name.partition(" ")[0] == self._named

    def able(self, rows: int) -> list[str]:
        """Return the names of the kernels that run this number of rows."""
        bucket = 1 << max(rows - 1, 0).bit_length()
        able = [name for name, kernel in self.kernels.items() if kernel.runs(bucket)]
        return [name for name in able if self.is_named(name)] or able

    def leave_out(self, name: str, why: Support) -> None:
        """Let a kernel serve no longer."""
        del self.kernels[name]
        self.refused[name] = why
        self._rebind()

    def kernel_for(self, rows: int) -> str:
        """Return the name of the kernel for this number of rows."""
        able = self.able(rows)
        coarser = {name: WORTH for name in able if self.kernels[name].rounds_input}
        measured = None if self.times is None else self.times.fastest(rows, able, coarser)
        if measured is not None:
            return measured
        own = [name for name in able if not self.is_guest(name)]
        return rule(1 << max(rows - 1, 0).bit_length(), own or able)

    def obey(self, times: AxisTimes) -> None:
        """Choose by measured times from now on: before any graph is captured."""
        self.times = times
        self._rebind()

    def _rebind(self) -> None:
        for layer in self._layers:
            layer.unbind()

    @property
    def source(self) -> str:
        """Where the choice comes from, in words: the user, measured times, or the rule."""
        if self.is_decided:
            return "asked for"
        return "rule, not measured" if self.times is None else self.times.source

    def serving(self) -> dict[str, int]:
        """Return the names of the kernels that serve, and the least of ROW_COUNTS that each does."""
        return {self.kernel_for(rows): rows for rows in reversed(ROW_COUNTS)}

    def changes(self) -> dict[int, str]:
        """Return, for each number of rows at which the choice changes, the kernel from there on."""
        return ROWS.changes(self.kernel_for)

    def describe(self) -> str:
        """Return the kernel for each range of rows, and where the choice comes from, in words."""
        return ROWS.describe(self.changes(), self.source)

    def _alone(self, name: str, x: Tensor, layer: Layer) -> Tensor:
        """Return a layer's product by one kernel, with nothing before and after it."""
        found: Tensor = layer.bound_to(self.kernels[name])(x)
        return found

    def replace_failed(self, name: str, error: Exception) -> LinearKernel | None:
        """Leave a kernel out that raised in a step, with a warning; return None if it was left out before.

        :raises BackendError: the user asked for it, or no other kernel can compute the layer.
        """
        why = f"{type(error).__name__}: {error}"
        if self.is_named(name) or len(self.kernels) == 1:
            raise BackendError(f"linear kernel {name}: needs to compute {self.name}, got {why}") from error
        kernel = self.kernels.get(name)
        if kernel is not None:
            log.warning("products %s: %s serves no longer: it raised %s", self.name, name, why)
            self.leave_out(name, Support.no("a step", "no exception", why))
        return kernel


class LinearKernels:
    """The linear kernels of a model on one device, and the choice between them for each kind of layer."""

    def __init__(
        self,
        device: torch.device,
        names: Sequence[str],
        load: Callable[[str], type[LinearKernel]],
        supports: Callable[[str, LinearSpec], Support],
        guests: Collection[str] = (),
        named: str | None = None,
        invariant: bool = False,
    ) -> None:
        """names: in the order of registration. load: imports a kernel's class. supports: whether it computes a layer here.
        guests: those of third parties. named: the one that the user asks for; None means auto. invariant: of third parties', only
        those take part whose rows do not depend on each other's number (deterministic mode)."""
        self._invariant = invariant
        self.device = device
        self.named = named
        self._names = names
        self._load = load
        self._supports = supports
        self._guests = frozenset(guests)
        self._choices: dict[LinearSpec, LinearChoice] = {}
        self._unserved: dict[str, Support] = {}
        """Kinds of layers that the kernel that the user asks for does not compute, and why."""

    def choice(self, spec: LinearSpec) -> LinearChoice:
        """Return the choice for layers of a kind, made at its first call."""
        found = self._choices.get(spec)
        if found is None:
            kernels: dict[str, LinearKernel] = {}
            refused: dict[str, Support] = {}
            for name in self._names:
                kernel, support = self._kernel(name, spec)
                if kernel is None:
                    refused[name] = support
                    continue
                own = spec.with_only(kernel.capabilities.fused)
                for made in (kernel(own), *(kernel(own, variant) for variant in kernel.variants)):
                    kernels[made.label] = made
            self._note_named(spec, refused)
            found = LinearChoice(str(spec), kernels, refused, spec.gated, self._guests, self.named, self._invariant)
            self._choices[spec] = found
        return found

    def _kernel(self, name: str, spec: LinearSpec) -> tuple[type[LinearKernel] | None, Support]:
        try:
            kernel = self._load(name)
        except (HeadwayError, ImportError):
            return None, self._supports(name, spec)
        support = self._supports(name, spec.with_only(kernel.capabilities.fused))
        if spec.device.type == "cuda" and kernel.graph_level == GraphLevel.NONE:
            support &= Support.no("graph_level", "one for captured steps, such as GraphLevel.ANY, on a GPU", "NONE")
        if self._invariant and name in self._guests:
            support &= batch_invariance(kernel.capabilities)
        return (kernel if support else None), support

    def reads(self, spec: LinearSpec) -> bool:
        """Return whether a kernel reads the weight of a layer as it is, and not dequantised when it is loaded."""
        if any(self._kernel(name, spec)[0] is not None for name in self._names if name != EXPANDED):
            return True
        if self.named is not None:
            self._note_named(spec, {self.named: self._kernel(self.named, spec)[1]})
        return False

    def _note_named(self, spec: LinearSpec, refused: Mapping[str, Support]) -> None:
        """Log once for each kind of layer why the kernel that the user asks for does not compute it."""
        kind, why = str(spec), None if self.named is None else refused.get(self.named)
        if why is not None and kind not in self._unserved:
            self._unserved[kind] = why
            log.info("products %s: --linear-kernel %s does not serve them: %s", kind, self.named, why)

    def check_named(self, choices: Iterable[LinearChoice]) -> None:
        """Check that the kernel that the user asks for serves a layer. choices: those of a model that times decide; others count
        too.

        :raises ConfigError: it serves none; with every reason.
        """
        made = (*choices, *self._choices.values())
        if self.named is None or any(self.named not in choice.refused for choice in made):
            return
        reasons = [f"{kind}: {why}" for kind, why in self._unserved.items()]
        raise ConfigError(
            "linear_kernel", "auto, or a kernel that serves a layer of the model", f"{self.named}: {'; '.join(reasons)}"
        )


def builtin_kernels(device: torch.device, names: Collection[str] | None = None) -> LinearKernels:
    """Return Headway's own kernels for a device. names: only these; None means all that are meant for the device."""
    known = {each.name: each for each in BUILTIN}
    if names is None:
        names = [each.name for each in BUILTIN if device.type in (each.devices or (device.type,))]

    def supports(name: str, spec: LinearSpec) -> Support:
        try:
            kernel = known[name].load()
        except ImportError as error:
            return Support.no("import", known[name].extra or name, error)
        lacking = [
            reason for reason in kernel.available().reasons if reason.what != "device" or getattr(kernel, "library", False)
        ]
        return Support(tuple(lacking)) if lacking else kernel.supports(spec)  # a device is there: the caller has tensors on it

    return LinearKernels(device, [*names], lambda name: known[name].load(), supports)
