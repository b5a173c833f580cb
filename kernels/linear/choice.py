"""Choice of the kernel for a linear layer: the requested kernel, the fastest measured kernel, or one selected by a rule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from headway.core.contract.weights import QuantizedWeight, Weight, WeightFormat
from headway.core.select.costs import AxisTimes, CountAxis

log = logging.getLogger("headway")
Layer = Any
"""A `Linear`. The module of `Linear` imports this one, so this module cannot name the type."""

ROW_COUNTS = tuple(2**n for n in range(14))
"""Numbers of rows to measure. For any other number, the choice for the next larger measured number is used, because its tiles are
the same."""
ROWS = CountAxis("rows", ROW_COUNTS)
NUM_BUCKETS: Final = 32
"""Number of row buckets for which a layer is bound to kernels: up to 1, 2, 4, ... rows."""
FEW, SHARED = "few_rows", "shared_rows"
"""GEMV (up to 16 rows) and split-K GEMM (up to 512 rows) over quantized weights in CUDA C++."""
FLOAT8 = "w8a8"
"""FP8 GEMM for up to 256 rows of x, which are rounded to FP8, over FP8 weights."""
KERNEL, SCALED, DEQUANTIZED = "kernel", "scaled_mm", "dequantize"
"""Triton GEMM over quantized weights; `torch._scaled_mm`, with x rounded to FP8; and cuBLAS, with the weight dequantized in every
call."""
GEMV, TILES, INVARIANT, TORCH = "gemv", "tiles", "invariant", "torch"
"""Triton GEMV for up to 16 rows and split-K GEMM for up to 128 rows over dense weights, Triton GEMM whose rows have the same bits
among any number of rows, and torch.mm."""
MARLIN, CUTLASS = "marlin", "cutlass"
NATIVE, INT4PACK, ONEDNN, EXPANDED = "native", "int4pack", "onednn", "expanded"
"""CPU kernels: our C library, torch's GEMM over packed int4, oneDNN, and a weight that is dequantized once."""


def _info(name: str, summary: str, place: str, extra: str = "", devices: tuple[str, ...] = ("cuda",)) -> LinearKernelInfo:
    """Return a registration. place: the class's module below headway.kernels.linear, a colon, and the name of the class."""
    load = partial(resolve_name, f"headway.kernels.linear.{place}")
    return LinearKernelInfo(name, summary, load, extra, devices=devices, api_version=API_VERSION)


_TRITON, _CUDA = "headway[triton]", "headway[cuda]"
BUILTIN: Final = (
    _info(GEMV, "our GEMV and skinny GEMM over plain weights in Triton, up to 16 rows", "product_kernels:Gemv", _TRITON),
    _info(TILES, "our tiled split-K GEMM over plain weights in Triton, up to 128 rows", "tile_kernels:Tiles", _TRITON),
    _info(INVARIANT, "our GEMM over plain weights for deterministic mode", "tile_kernels:InvariantTiles", _TRITON),
    _info(KERNEL, "our fused GEMM over quantised weights in Triton", "quantized:TritonKernel", _TRITON),
    _info(FEW, "our GEMV over quantised weights in CUDA C++, up to 16 rows", "cuda_products:FewRowsKernel", _CUDA),
    _info(SHARED, "our split-K GEMM over quantised weights for H100 and H200", "cuda_products:SharedRowsKernel", _CUDA),
    _info(FLOAT8, "our FP8 GEMM for H100 and H200, which rounds x to FP8", "cuda_products:W8A8Kernel", _CUDA),
    _info(SCALED, "torch._scaled_mm, for which x is rounded to FP8", "gpu_kernels:ScaledMM", _TRITON),
    _info(DEQUANTIZED, "cuBLAS over a weight that is dequantised for each product", "gpu_kernels:Dequantize", _TRITON),
    _info(MARLIN, "vLLM's marlin_gemm", "gpu_kernels:Marlin", "vllm"),
    _info(CUTLASS, "vLLM's cutlass_scaled_mm, for which x is rounded to FP8", "gpu_kernels:Cutlass", "vllm"),
    _info(NATIVE, "our C over packed blocks on a CPU", "cpu_kernels:Native", devices=("cpu",)),
    _info(INT4PACK, "torch's GEMM over packed int4 on a CPU", "cpu_kernels:Int4Pack", devices=("cpu",)),
    _info(ONEDNN, "oneDNN over a weight that is packed once", "cpu_kernels:OneDnn", devices=("cpu",)),
    _info(TORCH, "torch.mm over a plain weight", "cpu_kernels:TorchMM", devices=()),
    _info(EXPANDED, "a weight that is dequantised once, on a CPU", "cpu_kernels:Expanded", devices=("cpu",)),
)
"""Registrations, in order of preference without measurements. For quantized weights on a GPU, `rule` takes precedence."""

ON_GPU: Final = tuple(each.name for each in BUILTIN if "cpu" not in each.devices)


def rule(rows: int, able: Collection[str]) -> str:
    """Select a kernel without measurements: a fused kernel as long as reading the weight dominates the time, else the fastest
    GEMM."""
    most = FEW_ROWS if SCALED in able else MORE_ROWS
    if FEW in able and rows <= LEAST_SHARED:
        return FEW
    if SHARED in able and rows <= most:
        return SHARED
    if KERNEL in able and rows <= most:
        return KERNEL
    return next(name for name in (SCALED, DEQUANTIZED, *able) if name in able)


WORTH = 1.05
"""Minimum speedup over kernels that do not round x with which a kernel that rounds x is selected."""
LEAST_SHARED = 8
"""Maximum rows for `few_rows`. On an H200, a 4-bit layer of an 8B model takes 55 us at 8 rows and 73 us at 16 rows. With
`shared_rows`, it takes 67 us and 65 us."""
FEW_ROWS = 32
"""Maximum rows for the fused kernels if `torch._scaled_mm` is available. On an H200, an FP8 weight of 28672 x 4096 takes 91 us at
64 rows, and 63 us with scaled_mm."""
MORE_ROWS = 256
"""Maximum rows for the fused kernels if only `dequantize` is available. On an H200, a 4-bit weight of 28672 x 4096 takes 209 us
at 256 rows, and 202 us with `dequantize`."""


class LinearChoice:
    """Choice of a kernel for linear layers of one format and shape: the candidates, and the kernel for each number of rows."""

    def __init__(
        self,
        name: str,
        kernels: Mapping[str, LinearKernel],
        refused: Mapping[str, Support] | None = None,
        gated: bool = False,
        third_party: Collection[str] = (),
        named: str | None = None,
        fixed: bool = False,
    ) -> None:
        """Prepare the choice.

        name: format, shape and other properties that distinguish choices. kernels: candidates by label, in order of preference
            without measurements. refused: reasons against the other kernels. third_party: names of third parties' kernels.
            named: the kernel that the user requested, which is used wherever it can run. fixed: True to ignore measured times
            (deterministic mode).
        """
        self.name = name
        self.fixed = fixed
        self.gated = gated
        self.kernels = dict(kernels)
        self.refused = dict(refused or {})
        self.compute: Callable[[str, Tensor, Layer], Tensor] = self._compute_one
        """Function that computes a layer for x [rows, in_features] with the named kernel.

        If the layer is gated and the device's operations fuse the following, the function computes RMSNorm (weight 1, epsilon
        1e-6), both GEMMs, and SiLU of the first output times the second output.
        """
        self._layers: WeakSet[Layer] = WeakSet()
        self.third_party = frozenset(third_party)
        """Names of third parties' kernels for the device, including refused ones."""
        self._named = named
        self.is_on_trial = False
        self.times: AxisTimes | None = None
        """Measured times that select the kernel. None means that a rule selects it."""
        self._chosen: dict[int, LinearKernel] = {}

    @property
    def layers(self) -> list[Layer]:
        """The model's layers of this kind, in order."""
        return sorted(self._layers, key=lambda layer: layer.number)

    def add(self, layer: Layer) -> None:
        """Add a layer to the layers of this kind."""
        self._layers.add(layer)

    @property
    def is_decided(self) -> bool:
        """True if the requested kernel is used, so that nothing needs to be measured."""
        return any(map(self.is_named, self.kernels))

    @property
    def is_open(self) -> bool:
        """True if a third party's kernel is a candidate, so that the rule cannot know the fastest kernel."""
        return any(self.is_third_party(name) for name in self.kernels)

    @cached_property
    def is_invariant(self) -> bool:
        """True in deterministic mode if one batch-invariant kernel runs all numbers of rows."""
        serving = [*self.serving()]
        return self.fixed and len(serving) == 1 and self.kernels[serving[0]].capabilities.batch_invariant

    @property
    def fuses_more(self) -> bool:
        """True if a third party's candidate fuses more operations than the GEMM."""
        return any(kernel.capabilities.fused for name, kernel in self.kernels.items() if self.is_third_party(name))

    def is_third_party(self, name: str) -> bool:
        """Return whether a kernel is a third party's. name: the kernel's name, optionally with its variant."""
        return name.partition(" ")[0] in self.third_party

    def is_named(self, name: str) -> bool:
        """Return whether a kernel is the requested one. name: the kernel's name, optionally with its variant."""
        return name.partition(" ")[0] == self._named

    def able(self, rows: int) -> list[str]:
        """Return the names of the kernels that run this number of rows."""
        bucket = 1 << max(rows - 1, 0).bit_length()
        able = [name for name, kernel in self.kernels.items() if kernel.runs(bucket)]
        return [name for name in able if self.is_named(name)] or able

    def leave_out(self, name: str, why: Support) -> None:
        """Remove a kernel from the candidates."""
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
        own = [name for name in able if not self.is_third_party(name)]
        return rule(1 << max(rows - 1, 0).bit_length(), own or able)

    def kernel_of(self, bucket: int) -> LinearKernel:
        """Return the kernel for more than 2**(bucket - 1) and up to 2**bucket rows. The first call selects it."""
        found = self._chosen.get(bucket)
        if found is None:
            found = self._chosen[bucket] = self.kernels[self.kernel_for(1 << bucket)]
        return found

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Return a context in which errors of kernels are raised unchanged. Outside the context, a kernel that raises an error is
        replaced."""
        self.is_on_trial = True
        try:
            yield
        finally:
            self.is_on_trial = False

    def use_times(self, times: AxisTimes) -> None:
        """Use measured times to select kernels from now on. Call this before any CUDA graph is captured."""
        self.times = times
        self._rebind()

    def _rebind(self) -> None:
        self._chosen.clear()
        for layer in self._layers:
            layer.unbind()

    @property
    def source(self) -> str:
        """Source of the choice, for messages: the user, measured times, or the rule."""
        if self.is_decided:
            return "asked for"
        return "rule, not measured" if self.times is None else self.times.source

    def serving(self) -> dict[str, int]:
        """Return the names of the kernels in use, each with the smallest of ROW_COUNTS that it runs."""
        return {self.kernel_for(rows): rows for rows in reversed(ROW_COUNTS)}

    def changes(self) -> dict[int, str]:
        """Return the name of the selected kernel, keyed by each number of rows at which the choice changes."""
        return ROWS.changes(self.kernel_for)

    def describe(self) -> str:
        """Return a description of the kernel for each range of row counts, and the source of the choice."""
        return ROWS.describe(self.changes(), self.source)

    def _compute_one(self, name: str, x: Tensor, layer: Layer) -> Tensor:
        """Compute a layer with one kernel, without fused operations."""
        found: Tensor = layer.bound_to(self.kernels[name])(x)
        return found

    def replace_failed(self, name: str, error: Exception) -> LinearKernel | None:
        """Remove a kernel that raised in a step, with a warning. Return the kernel, or None if it was already removed.

        :raises BackendError: if the user requested the kernel, or no other kernel can compute the layer.
        """
        why = f"{type(error).__name__}: {error}"
        if self.is_named(name) or len(self.kernels) == 1:
            raise BackendError(f"linear kernel {name}: needs to compute {self.name}, got {why}") from error
        kernel = self.kernels.get(name)
        if kernel is not None:
            log.warning("linear %s: excluding %s: it raised %s", self.name, name, why)
            self.leave_out(name, Support.no("a step", "no exception", why))
        return kernel


def spec_of(weight: Weight, dtype: torch.dtype, device: torch.device) -> LinearSpec:
    """Return the spec of a layer with this weight and no fused operations. dtype: type of x."""
    rows, columns = weight.shape
    return LinearSpec(columns, rows, dtype, device, WeightFormat.of(weight))


class LinearKernels:
    """Linear kernels of a model on one device, and the kernel choice for each kind of layer."""

    def __init__(
        self,
        device: torch.device,
        names: Sequence[str],
        load: Callable[[str], type[LinearKernel]],
        supports: Callable[[str, LinearSpec], Support],
        third_party: Collection[str] = (),
        named: str | None = None,
        invariant: bool = False,
    ) -> None:
        """Prepare the kernels.

        names: the kernels' names, in the order of registration. load: imports a kernel's class. supports: returns whether a
        kernel supports a layer. third_party: names of third parties' kernels. named: the requested kernel; None means auto.
        invariant: True for deterministic mode: INVARIANT replaces Headway's other kernels where it can run, and third parties'
        kernels are used only if they are batch-invariant.
        """
        self._invariant = invariant
        self.device = device
        self.named = named
        self._names = names
        self._load = load
        self._supports = supports
        self._guests = frozenset(third_party)
        self._choices: dict[LinearSpec, LinearChoice] = {}
        self._read: dict[LinearSpec, bool] = {}
        """Maps a kind of layer to True if a kernel reads its quantized weight."""
        self._unserved: dict[str, Support] = {}
        """Kinds of layers that the requested kernel does not support, each with the reason."""

    def choice(self, spec: LinearSpec) -> LinearChoice:
        """Return the choice for layers of a kind. The first call makes it."""
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
            if INVARIANT in kernels and not any(name.partition(" ")[0] == self.named for name in kernels):
                kernels = {name: made for name, made in kernels.items() if name == INVARIANT or name in self._guests}
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
        if name == INVARIANT and not self._invariant and name != self.named:
            support &= Support.no("linear_kernel", f"deterministic mode, or {INVARIANT} to be named", "auto")
        return (kernel if support else None), support

    def reads(self, weight: QuantizedWeight, dtype: torch.dtype) -> bool:
        """Return whether a kernel reads a quantized weight directly, so that it is not dequantized at loading. dtype: type of x.

        Kernels' `supports` is called once for each kind of weight. Returns True for a weight without elements (torch's device
        `meta`).
        """
        spec = spec_of(weight, dtype, self.device)
        found = self._read.get(spec)
        if found is None:
            found = self._read[spec] = self.device.type == "meta" or self._reads(spec)
        return found

    def _reads(self, spec: LinearSpec) -> bool:
        if any(self._kernel(name, spec)[0] is not None for name in self._names if name != EXPANDED):
            return True
        if self.named is not None:
            self._note_named(spec, {self.named: self._kernel(self.named, spec)[1]})
        return False

    def _note_named(self, spec: LinearSpec, refused: Mapping[str, Support]) -> None:
        """Log, once for each kind of layer, the reason why the requested kernel does not support the layer."""
        kind, why = str(spec), None if self.named is None else refused.get(self.named)
        if why is not None and kind not in self._unserved:
            self._unserved[kind] = why
            log.info("linear %s: --linear-kernel %s does not support it: %s", kind, self.named, why)

    def check_named(self, choices: Iterable[LinearChoice]) -> None:
        """Check that the requested kernel supports at least one layer.

        choices: a model's choices to be measured, which are checked in addition to the choices made so far.

        :raises ConfigError: if the requested kernel supports none of the layers. The message contains every reason.
        """
        made = (*choices, *self._choices.values())
        if self.named is None or any(self.named not in choice.refused for choice in made):
            return
        reasons = [f"{kind}: {why}" for kind, why in self._unserved.items()]
        raise ConfigError(
            "linear_kernel", "auto, or a kernel that serves a layer of the model", f"{self.named}: {'; '.join(reasons)}"
        )


def builtin_kernels(device: torch.device, names: Collection[str] | None = None) -> LinearKernels:
    """Return Headway's own kernels for a device. names: names of the kernels to include. None means all for the device."""
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
        return Support(tuple(lacking)) if lacking else kernel.supports(spec)  # a device is present: the caller has tensors on it

    return LinearKernels(device, [*names], lambda name: known[name].load(), supports)
