"""The contract of kernels for linear layers: GEMM and GEMV over plain or quantized weights, with optional fused operations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.support import Reason, Support
from headway.core.contract.weights import Weight, WeightFormat, rewrite

FUSED = ("norm", "bias", "activation", "gated", "residual", "rotary")
"""Fields of `LinearSpec` that describe the operations before and after the GEMM."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Parameters of a linear layer, y = x W^T, and of the operations before and after its GEMM."""

    in_features: int
    out_features: int
    """Number of rows of the weight."""
    dtype: torch.dtype
    """Element type of x and y."""
    device: torch.device
    weight: WeightFormat
    norm: bool = False
    """True if RMSNorm is applied to x first."""
    bias: bool = False
    """True if a bias is added to the result of the GEMM."""
    activation: str | None = None
    """Activation applied after the bias: "silu", "gelu", ...; in gated layers, to the first half of the columns."""
    gated: bool = False
    """True if the activated first half of the columns is multiplied by the second half: y then has out_features / 2 columns."""
    residual: bool = False
    """True if the result is added to the residual stream."""
    rotary: bool = False
    """True if RoPE is applied to the q and k heads of the result."""

    @property
    def fused(self) -> tuple[str, ...]:
        """Names of the operations before and after the GEMM, out of FUSED."""
        return tuple(name for name in FUSED if getattr(self, name))

    def with_only(self, fused: Collection[str]) -> LinearSpec:
        """Return this spec with only the fused operations named in `fused`, a subset of FUSED."""
        return replace(
            self,
            norm=self.norm and "norm" in fused,
            bias=self.bias and "bias" in fused,
            activation=self.activation if "activation" in fused else None,
            gated=self.gated and "gated" in fused,
            residual=self.residual and "residual" in fused,
            rotary=self.rotary and "rotary" in fused,
        )

    def __str__(self) -> str:
        words = [str(self.weight), f"{self.out_features}x{self.in_features}", *(["gated"] if self.gated else [])]
        words.append(DTYPE_NAMES.get(self.dtype, str(self.dtype)))
        others = [name for name in self.fused if name not in ("gated", "bias")]
        return " ".join([*words, *(["with a bias"] if self.bias else []), *(f"with {name}" for name in others)])


@dataclass(frozen=True, slots=True)
class LinearParts:
    """Operations before and after the GEMM in a call of `LinearKernel.apply_fused`: only operations that the kernel claims to
    fuse."""

    norm: Tensor | None = None
    """[in_features], in the dtype of x or float32: RMSNorm weight, applied to the rows of x. None means no norm."""
    eps: float = 0.0
    """Epsilon of the norm."""
    bias: Tensor | None = None
    """[out_features]: added to the result of the GEMM. None means no bias."""
    activation: str | None = None
    """Activation after the bias, as in `LinearSpec`. None means no activation."""
    gated: bool = False
    """True if the layer is gated, as in `LinearSpec`."""
    residual: bool = False
    """True if `out` contains the residual stream, to which the result is added."""


@dataclass(frozen=True, slots=True)
class LinearCapabilities:
    """Claims of a linear kernel. `headway backends` shows them; the conformance kit tests supported and refused layers."""

    formats: frozenset[str]
    """Supported weight formats, out of FORMATS."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    devices: tuple[str, ...] = ("cuda",)
    """Supported device types, as in torch.device.type."""
    group_sizes: tuple[int, ...] | None = None
    """Supported group sizes of 4-bit weights: columns that share a scale. None means any."""
    zeros: bool = True
    """True if the kernel reads weights with a zero point per group."""
    order: bool = False
    """True if the kernel reads weights with permuted columns (`Int4Weight.order`, GPTQ's act-order)."""
    max_rows: int | None = None
    """Maximum number of rows of x. None means any."""
    batch_invariant: bool = False
    """True if the bits of a row of the output do not depend on the other rows or their number. Deterministic mode uses only such
    kernels."""
    fused: frozenset[str] = frozenset()
    """Operations before and after the GEMM that `apply_fused` computes, out of FUSED except "rotary", which only Headway's
    kernels fuse. The engine computes the rest. Empty for kernels that implement only `apply`."""
    activations: frozenset[str] = frozenset({"silu"})
    """Activations that a kernel with "activation" or "gated" in `fused` computes. The engine computes other activations."""

    def check(self, spec: LinearSpec) -> Support:
        """Return every reason why a layer is outside the claims. The result is truthy if there is none. Never raises."""
        return Support(tuple(self._refusals(spec)))

    def _refusals(self, spec: LinearSpec) -> Iterator[Reason]:
        weight, sizes = spec.weight, self.group_sizes
        dtypes = " or ".join(DTYPE_NAMES.get(dtype, str(dtype)) for dtype in self.dtypes)
        rules = [
            (weight.name in self.formats, "weight format", " or ".join(sorted(self.formats)), weight.name),
            (spec.device.type in self.devices, "device", " or ".join(self.devices), spec.device.type),
            (spec.dtype in self.dtypes, "dtype", dtypes, DTYPE_NAMES.get(spec.dtype, str(spec.dtype))),
            (
                sizes is None or weight.group_size is None or weight.group_size in sizes,
                "group size",
                " or ".join(map(str, sizes or ())),
                weight.group_size,
            ),
            (self.zeros or not weight.zeros, "zeros", "none", "one for each group"),
            (self.order or not weight.order, "columns", "the order of the inputs", "another order"),
            *((name in self.fused, name, "none", "a layer with it") for name in spec.fused),
        ]
        yield from (Reason(what, need, str(got)) for holds, what, need, got in rules if not holds)


class LinearKernel(Kernel):
    """A named implementation of linear layers. It sees neither the engine nor the model nor the checkpoint.

    A subclass sets `name` and `capabilities` and implements `apply`. The engine makes one instance per distinct `LinearSpec`,
    whose FUSED fields are set only if the kernel claims them. It calls `prepare` once per layer and `apply` in each step. `apply`
    must not synchronise with the host, and must allocate only through torch's allocator, so that a CUDA graph can own the memory.
    On a GPU, steps are captured in CUDA graphs: kernels with a `graph_level` of NONE are refused.
    """

    capabilities: ClassVar[LinearCapabilities]
    rounds_input: ClassVar[bool] = False
    """True if the kernel quantizes x to 8 bits. Because the result is less precise, the engine selects such a kernel only if it
    is clearly faster, and users can exclude it."""

    variants: ClassVar[tuple[str, ...]] = ()
    """Names of the kernel's configurations, such as tile sizes. Each is measured as a separate kernel named "NAME VARIANT"."""
    arrangement: ClassVar[str] = ""
    """Name of the weight layout that `prepare` returns. Kernels with the same name share the prepared weight. Empty means
    `name`."""

    def __init__(self, spec: LinearSpec, variant: str = "") -> None:
        """variant: one of `variants`, or "" for the default configuration."""
        self.spec = spec
        self.variant = variant

    @property
    def label(self) -> str:
        """Name of the kernel and its variant, under which measured times are stored."""
        return f"{self.name} {self.variant}" if self.variant else self.name

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the kernel supports a layer. Override it for conditions that `capabilities` cannot express."""
        return cls.capabilities.check(spec)

    def runs(self, rows: int) -> bool:
        """Return whether the kernel runs steps with this number of rows. The answer may change only between a power of two and
        its successor."""
        most = self.capabilities.max_rows
        return most is None or rows <= most

    def prepare(self, weight: Weight) -> Any:
        """Return the weight as `apply` reads it: unchanged, or repacked once when the model is loaded.

        :raises ArithmeticError: if the repacked format cannot represent the weight's scales.
        """
        return weight

    def update(self, prepared: Any, again: Any) -> None:
        """Copy `again`, prepared from new weights, into `prepared`, which captured steps read in place. `load_weights` calls this
        method.

        Override the method if `prepare` returns values other than tensors that depend on the weight's elements.

        :raises ConfigError: if `prepared` and `again` differ in anything other than the elements of tensors.
        """
        rewrite(prepared, again, self.name)

    @abstractmethod
    def apply(self, x: Tensor, weight: Any, out: Tensor) -> None:
        """Write x W^T to `out`.

        x: [rows, in_features], in the spec's dtype, contiguous.
        weight: result of `prepare`.
        out: [rows, out_features], in the spec's dtype, contiguous.
        """

    def apply_fused(self, x: Tensor, weight: Any, parts: LinearParts, out: Tensor) -> None:
        """Compute the GEMM together with the operations in `parts`, and write the result to `out`.

        Called only if `capabilities.fused` is not empty. Arguments are as in `apply`, but `out` has out_features / 2 columns if
        the layer is gated. A call that raises must leave `out` unchanged.
        """
        raise NotImplementedError(f"{self.name} declares no fused operations")


@dataclass(frozen=True, slots=True)
class LinearKernelInfo(KernelInfo):
    """A plugin's registration of a linear kernel, for the hook `headway_register_kernels`."""

    kind: ClassVar[str] = "linear"
