"""The contract of a kernel for linear layers: products of a step's rows over a weight, quantised or not."""

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
from headway.core.contract.weights import Weight, WeightFormat

FUSED = ("norm", "bias", "activation", "gated", "residual", "rotary")
"""Fields of `LinearSpec` that say what stands before and after the product."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer as a kernel is asked for it: y = x W^T, and what stands before and after the product."""

    in_features: int
    out_features: int
    """Rows of the weight."""
    dtype: torch.dtype
    """Element type of x and of y."""
    device: torch.device
    weight: WeightFormat
    norm: bool = False
    """x is normed first (RMSNorm)."""
    bias: bool = False
    """A bias is added to the product."""
    activation: str | None = None
    """Applied to the product: "silu", "gelu", ...; of a gated layer, to the first half."""
    gated: bool = False
    """The activated first half of the product multiplies the second: y has out_features / 2 columns."""
    residual: bool = False
    """The product is added to the residual stream."""
    rotary: bool = False
    """The heads of q and k in the product are rotated."""

    @property
    def fused(self) -> tuple[str, ...]:
        """Names of what stands before and after the product, out of FUSED."""
        return tuple(name for name in FUSED if getattr(self, name))

    def with_only(self, fused: Collection[str]) -> LinearSpec:
        """Return the layer with nothing before and after the product but what is named, out of FUSED."""
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
    """What one call of `LinearKernel.apply_fused` computes around the product: only what the kernel claims as fused."""

    norm: Tensor | None = None
    """[in_features], in the dtype of x or float32: weight of an RMSNorm of the rows of x, before the product. None: no norm."""
    eps: float = 0.0
    """Epsilon of the norm."""
    bias: Tensor | None = None
    """[out_features], added to the product. None: no bias."""
    activation: str | None = None
    """As in `LinearSpec`, after the bias."""
    gated: bool = False
    """As in `LinearSpec`."""
    residual: bool = False
    """True if `out` holds the residual stream, to which all of that is added."""


@dataclass(frozen=True, slots=True)
class LinearCapabilities:
    """The claims of a linear kernel: checked in one place, shown by `headway backends`, and tested both ways by the kit."""

    formats: frozenset[str]
    """Weights that the kernel reads, out of FORMATS."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    devices: tuple[str, ...] = ("cuda",)
    """Device types, as in torch.device.type."""
    group_sizes: tuple[int, ...] | None = None
    """Columns that may share a scale, for weights of 4 bits; None: any."""
    zeros: bool = True
    """True if the kernel reads weights with a zero for each group."""
    order: bool = False
    """True if the kernel reads weights whose columns are in another order than the inputs (`Int4Weight.order`)."""
    max_rows: int | None = None
    """Rows of x up to which the kernel serves; None: any."""
    batch_invariant: bool = False
    """True if the bits of a row depend not on the other rows nor on their number. Deterministic mode takes only such kernels."""
    fused: frozenset[str] = frozenset()
    """What `apply_fused` computes before and after the product, out of FUSED but for "rotary", whose call is Headway's own. The
    engine computes the rest; leave it empty for a kernel that writes only `apply`."""
    activations: frozenset[str] = frozenset({"silu"})
    """Activations that a kernel with "activation" or "gated" in `fused` computes; the engine computes others."""

    def check(self, spec: LinearSpec) -> Support:
        """Return every reason why a layer lies outside the claims; truthy where there is none. Nothing is raised."""
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
    """One named way to compute linear layers; it never sees the engine, the model or the checkpoint.

    A subclass sets `name` and `capabilities` and writes `apply`. On a GPU steps are captured in CUDA graphs, so that a kernel
    with a `graph_level` of NONE is refused there. The engine makes one instance for each distinct LinearSpec, whose fields out
    of FUSED are False unless the kernel claims them; it calls `prepare` once for each layer and `apply` in each step. `apply`
    must not synchronise with the host, and what it allocates must come from torch's allocator, so that a CUDA graph can own it.
    """

    capabilities: ClassVar[LinearCapabilities]
    rounds_input: ClassVar[bool] = False
    """True if x is rounded to 8 bits, which makes a coarser product: the engine then takes the kernel only where it is clearly
    faster, and users can rule it out."""

    variants: ClassVar[tuple[str, ...]] = ()
    """Names of configurations such as tile sizes, each of which is measured as a kernel of its own named "NAME VARIANT"."""
    arrangement: ClassVar[str] = ""
    """Name of what `prepare` returns: kernels with the same one share it. Empty: the kernel's name."""

    def __init__(self, spec: LinearSpec, variant: str = "") -> None:
        """variant: out of `variants`, or empty for the usual configuration."""
        self.spec = spec
        self.variant = variant

    @property
    def label(self) -> str:
        """The kernel's name with its variant, by which times are stored."""
        return f"{self.name} {self.variant}" if self.variant else self.name

    @classmethod
    def supports(cls, spec: LinearSpec) -> Support:
        """Return whether the kernel can serve a layer; extend it where `capabilities` cannot express a condition."""
        return cls.capabilities.check(spec)

    def runs(self, rows: int) -> bool:
        """Return whether the kernel runs steps of this number of rows. The answer may change only after a power of two."""
        most = self.capabilities.max_rows
        return most is None or rows <= most

    def prepare(self, weight: Weight) -> Any:
        """Return what `apply` reads of a layer: the weight itself, or an arrangement of it that is made once.

        :raises ArithmeticError: the weight's scales have no place in the arrangement.
        """
        return weight

    @abstractmethod
    def apply(self, x: Tensor, weight: Any, out: Tensor) -> None:
        """Write x W^T to `out`. x: [rows, in_features]; out: [rows, out_features], both in the spec's dtype and contiguous;
        weight: what `prepare` returned."""

    def apply_fused(self, x: Tensor, weight: Any, parts: LinearParts, out: Tensor) -> None:
        """Write the product and what is around it to `out`, in a kernel whose capabilities name fused parts.

        Like `apply`; out: [rows, out_features], half as many columns if gated. A call that raises leaves `out` as it was.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LinearKernelInfo(KernelInfo):
    """Registration of a linear kernel by a plugin, for the hook `headway_register_kernels`."""

    kind: ClassVar[str] = "linear"
