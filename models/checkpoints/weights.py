"""Sources of a model's weights: safetensors checkpoints, random weights, and a wrapper that quantizes while loading.

Each tensor of a checkpoint is checked and read once; a missing or unused tensor is an error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.contract.weights import QuantizedWeight, merged
from headway.core.system.text import shown_size
from headway.kernels.linear.axes import Axis, Shape, axes_of, held_sizes, shard_of, whole_sizes
from headway.models.checkpoints.formats.stored import Quantization, QuantizedModule, StoredFormat
from headway.models.checkpoints.gguf.blocks import GgufBlocks
from headway.models.checkpoints.tensor_files import NEEDED, PLAIN, TensorFiles

IGNORED = ("rotary_emb.inv_freq", ".q_scale", ".prob_scale")
"""Name suffixes of checkpoint tensors that Headway does not need: computed values, and scales of unquantized tensors."""

log = logging.getLogger("headway")


class WeightSource(Protocol):
    """Source of a decoder's tensors, keyed by checkpoint name. Sources without quantized weights inherit the defaults."""

    dtype: torch.dtype
    device: torch.device

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this name."""

    def take(self, name: str, shape: Shape) -> Tensor:
        """Return this rank's shard of a tensor, as selected by `shape`."""

    def take_merged(self, sizes: Mapping[str, int | Axis], *rest: int | Axis) -> Tensor:
        """Return tensors of shape [size, *rest], concatenated along the first axis. sizes: name -> number of rows."""
        return torch.cat([self.take(name, (size, *rest)) for name, size in sizes.items()])

    def take_product(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """Return concatenated weights of linear layers with the same input, possibly quantized. sizes: name -> out_features."""
        return self.take_merged(sizes, in_features)

    def take_experts(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """Return concatenated rows of a layer's experts, quantized only in a format that grouped GEMM kernels support."""
        return self.take_merged(sizes, in_features)

    def take_stacked(self, name: str, shape: Shape, transposed: bool = False) -> Tensor | QuantizedWeight:
        """Return a layer's stacked expert tensor: plain in this shape, or quantized as rows [experts * out, in_features].

        shape: experts, out_features, in_features; if transposed: experts, in_features, out_features.
        """
        return self.take(name, shape)

    def take_head(self, name: str, shape: Shape) -> QuantizedWeight | None:
        """Return the output head, or a tied embedding, as GGUF blocks for CPU kernels; None if the head is plain."""
        return None

    def dequantize(self, weight: QuantizedWeight) -> Tensor:
        """Dequantize a result of `take_experts` or `take_stacked` to [rows, in_features]."""
        raise AssertionError("a plain source gives no quantised weight")

    def take_as(self, dtype: torch.dtype, name: str, shape: Shape) -> Tensor:
        """Return one tensor of this shape in the given dtype instead of the source's dtype."""

    def take_number(self, name: str) -> float:
        """Return the value of a one-element tensor."""

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Finish reading. ignored: suffixes of tensors that may be unused; modules: name prefixes of such tensors."""


class Weights(WeightSource):
    """Tensors of a model folder, keyed by checkpoint name, converted to one dtype and device when they are read.

    Quantized tensors are dequantized one by one. Only `take_product`, `take_experts` and `take_stacked` return quantized weights.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        aliases: tuple[tuple[str, str], ...] = (),
        quantization: Quantization | None = None,
        supports: Callable[[QuantizedWeight], bool] = lambda weight: False,
        supports_experts: Callable[[QuantizedWeight], bool] = lambda weight: False,
    ) -> None:
        """aliases: pairs of a substring of a name and its replacement, tried if the checkpoint has no tensor of that name.

        supports: returns whether linear layers have a kernel for a weight's format; other weights are dequantized.
        supports_experts: returns whether MoE layers have a grouped GEMM kernel for a weight's format.

        :raises ModelError: if the folder has no safetensors file, or a file is missing or truncated.
        """
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._files = TensorFiles(folder, device, aliases, quantization.extra_folder if quantization else None)
        self.quantization = quantization
        self._supports = supports
        self._supports_experts = supports_experts
        self._counted = QuantizedBytes()

    def __contains__(self, name: str) -> bool:
        return name in self._files or self._quantized(name, ()) is not None

    def take(self, name: str, shape: Shape) -> Tensor:
        """Read one tensor; only this rank's shard if the tensor is sharded.

        :raises ModelError: if the tensor is missing, or its shape differs from the configuration.
        """
        return self._read(name, axes_of(shape)).to(self.dtype)

    def take_merged(self, sizes: Mapping[str, int | Axis], *rest: int | Axis) -> Tensor:
        """Read tensors of shape [size, *rest] into one tensor, allocated once so that no part is in memory twice.

        sizes: name -> number of rows.

        :raises ModelError: if a tensor is missing, or its shape is not the configuration's.
        """
        rows = [Axis.of(size) for size in sizes.values()]
        parts = [self._checked(name, axes_of((axis, *rest))) for name, axis in zip(sizes, rows, strict=True)]
        sizes_held = (sum(axis.size for axis in rows), *held_sizes(rest))
        merged = torch.empty(sizes_held, dtype=self.dtype, device=self.device)
        row = 0
        for part, axis in zip(parts, rows, strict=True):
            merged[row : row + axis.size].copy_(part())
            row += axis.size
        return merged

    def take_product(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """Read the weights of linear layers with the same input, quantized if `supports` accepts the format.

        If a weight is plain, or the weights' formats differ, all are dequantized.

        :raises ModelError: as for `take_merged`.
        """
        return self._rows(sizes, in_features, self._supports)

    def take_experts(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """Read the weights of all experts, quantized if `supports_experts` accepts the format.

        :raises ModelError: as for `take_merged`.
        """
        return self._rows(sizes, in_features, self._supports_experts)

    def take_stacked(self, name: str, shape: Shape, transposed: bool = False) -> Tensor | QuantizedWeight:
        """Read a stacked expert tensor, quantized if `supports_experts` accepts the format. :raises ModelError: as for `take`."""
        axes = axes_of(shape)
        found = self._quantized(name, axes)
        if found is None:
            return self.take(name, shape)
        before = self._counted.stored
        weight = self._weight(*found)
        if isinstance(weight, Tensor) or not self._supports_experts(weight):
            return self._dequantized(weight, axes)
        self._counted.quantized += self._counted.stored - before
        return weight

    def take_head(self, name: str, shape: Shape) -> QuantizedWeight | None:
        found = self._quantized(name, axes_of(shape))
        weight = self._weight(*found) if found is not None and isinstance(found[0], GgufBlocks) else None
        head = None if weight is None or isinstance(weight, Tensor) or not self._supports(weight) else weight
        self._counted.quantized += 0 if head is None else head.nbytes
        return head

    def dequantize(self, weight: QuantizedWeight) -> Tensor:
        """Dequantize a weight that was returned quantized, and count it as dequantized."""
        self._counted.quantized -= weight.nbytes
        return self._dequantized(weight)

    def _rows(
        self, sizes: Mapping[str, int | Axis], in_features: int | Axis, supports: Callable[[QuantizedWeight], bool]
    ) -> Tensor | QuantizedWeight:
        """Return concatenated weights, quantized if all have the same format and `supports` accepts it."""
        modules = [self._quantized(name, axes_of((size, in_features))) for name, size in sizes.items()]
        known = [each for each in modules if each is not None]
        if len(known) < len(modules):
            return self.take_merged(sizes, in_features)
        before = self._counted.stored
        parts = [self._weight(*each) for each in known]
        forms = [part for part in parts if not isinstance(part, Tensor)]
        if len(forms) == len(parts) and supports(forms[0]):
            with contextlib.suppress(ModelError):  # the formats cannot be concatenated
                whole = merged(forms)
                if supports(whole):
                    self._counted.quantized += self._counted.stored - before
                    return whole
        rows = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1], dtype=self.dtype, device=self.device)
        row = 0
        for part in parts:
            rows[row : row + part.shape[0]] = self._dequantized(part)
            row += part.shape[0]
        return rows

    def take_as(self, dtype: torch.dtype, name: str, shape: Shape) -> Tensor:
        """Read one tensor in the given dtype. :raises ModelError: as for `take`."""
        return self._read(name, axes_of(shape)).to(dtype)

    def take_number(self, name: str) -> float:
        """Return the value of a one-element tensor of any shape. :raises ModelError: if the tensor is missing or has more
        elements."""
        return self._files.read_number(name)

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Check that every tensor was used: an unused tensor means that the checkpoint belongs to a different model.

        ignored: suffixes of tensors that may be unused; modules: name prefixes of such tensors.

        :raises ModelError: if tensors were not used; the error names the first few.
        """
        left = [name for name in self._files.left if not self._is_bias_of_none(name) and 0 not in self._files.shape(name)]
        self._files.close()
        if self.quantization is not None and not self._counted.labels:
            said = f"{self.quantization.label} by {self.quantization.place}"
            raise ModelError(f"weights: {self.folder} needs weights in {said}, got none: its tensors are plain")
        left = [name for name in left if not name.endswith(IGNORED + ignored) and not name.startswith(modules)]
        if left:
            raise ModelError(f"weights: {len(left)} tensors that this architecture does not use, first {', '.join(left[:3])}")
        if self._counted.labels:
            log.info("weights: %s", self._counted.report(self.dtype))

    def _read(self, name: str, axes: tuple[Axis, ...]) -> Tensor:
        return self._checked(name, axes)()

    def _checked(self, name: str, axes: tuple[Axis, ...]) -> Callable[[], Tensor]:
        """Return a function that reads a tensor, and dequantizes it if it is quantized. The tensor's shape is checked at once."""
        found = self._quantized(name, axes)
        if found is not None:
            return functools.partial(self._dequantized, self._weight(*found), axes)
        why = "and config.json has no quantization_config that says how"
        if self.quantization is not None:
            why = f"and not in {self.quantization.label}, as {self.quantization.place} says"
        if (elements := self._files.elements(name)) not in ("", *PLAIN):
            raise ModelError(f"weights: {name} needs {NEEDED} elements, got {elements}: it is quantised, {why}")
        other = next((suffix for suffix in _PACKED if name.removesuffix(".weight") + suffix in self._files), None)
        if not elements and other is not None:
            raise ModelError(
                f"weights: {name} is not there, and {name.removesuffix('.weight')}{other} is: it is quantised, {why}"
            )
        self._files.check(name, axes)
        return functools.partial(self._files.read, name, axes)

    def _quantized(self, name: str, axes: tuple[Axis, ...]) -> tuple[StoredFormat, QuantizedModule] | None:
        """Return the format and tensors of a quantized weight; None if the weight does not exist or is plain."""
        if self.quantization is None:
            return None
        module = QuantizedModule(self._files, name.removesuffix(".weight"), axes, self.dtype)
        found = self.quantization.format_of(module)
        return None if found is None else (found, module)

    def _weight(self, form: StoredFormat, module: QuantizedModule) -> Tensor | QuantizedWeight:
        """Read this rank's shard of a quantized weight, which may be empty.

        If the shard begins or ends within a group, the whole group is read, and the shard is sliced from the dequantized weight.
        """
        axes = module.axes
        module.use(form.suffixes)
        self._counted.labels[form.label] = None
        if any(axis.size == 0 for axis in axes):
            return torch.empty(held_sizes(axes), dtype=self.dtype, device=self.device)
        wider = tuple(axis.rounded(size) for axis, size in zip(axes, form.units(module), strict=True))
        module = QuantizedModule(self._files, module.name, wider, self.dtype)
        weight = form.read(module)
        self._counted.stored += module.num_bytes
        if wider == axes:
            return weight
        whole = self._dense(weight, wider)
        for place, (axis, wide) in enumerate(zip(axes, wider, strict=True)):
            if axis != wide:
                whole = whole.index_select(place, torch.tensor(axis.places_in(wide), device=whole.device))
        return whole

    def _is_bias_of_none(self, name: str) -> bool:
        """Return whether an unread tensor is an all-zero bias, which some GPTQ tools add to every quantized module."""
        module = name.removesuffix(".bias")
        return module != name and self._quantized(module, ()) is not None and self._files.is_zero(name)

    def _dequantized(self, weight: Tensor | QuantizedWeight, axes: tuple[Axis, ...] = ()) -> Tensor:
        whole = self._dense(weight, axes)
        self._counted.dequantized += whole.nbytes
        return whole

    def _dense(self, weight: Tensor | QuantizedWeight, axes: tuple[Axis, ...]) -> Tensor:
        """Return the weight in the model's dtype. axes: 3 for experts, returned as [experts, in_features, out_features]."""
        if isinstance(weight, Tensor):
            return weight
        stacked = len(axes) == 3
        return weight.dequantized_stack(axes[0].size, self.dtype).mT if stacked else weight.dequantized(self.dtype)


_PACKED = (".qweight", ".weight_packed", "_blocks")
"""Name suffixes, other than `.weight`, of tensors with quantized values."""


@dataclass
class QuantizedBytes:
    """Sizes of a checkpoint's quantized weights in bytes: as stored, loaded as quantized, and dequantized."""

    labels: dict[str, None] = field(default_factory=dict)
    """Names of the storage formats read so far, as the keys of an ordered set."""
    stored: int = 0
    quantized: int = 0
    dequantized: int = 0

    def report(self, dtype: torch.dtype) -> str:
        """Return the log line that summarizes the quantized weights."""
        parts = [f"kept quantized: {shown_size(self.quantized)}"] if self.quantized else []
        if self.dequantized:
            size, stored = shown_size(self.dequantized), shown_size(self.stored - self.quantized)
            parts.append(f"dequantized to {str(dtype).removeprefix('torch.')}: {size} instead of {stored}")
        return f"{', '.join(self.labels)}, {', '.join(parts)}"


STD = 0.02
"""Standard deviation of random weights, the usual `initializer_range`: logits remain finite in half precision."""


class DummyWeights(WeightSource):
    """Source of random weights: normal values from a fixed seed, and ones for norms. A tensor of any name exists.

    On one kind of device, every start gives the same values, because the decoder takes its tensors in the same order.
    """

    _form: StoredFormat | None = None

    def __init__(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0, unit: Container[str] = (), form: StoredFormat | None = None
    ) -> None:
        """unit: names of tensors with standard deviation 1, such as an MoE model's embedding, so that the random router separates
        tokens.

        form: quantization format of linear layers and experts. Weights in formats that are dequantized are drawn plain. None
        means that all weights are plain.
        """
        self._form = form
        self.dtype = dtype
        self.device = device
        self._unit = unit
        # On torch's device `meta`, tensors have shapes but no elements.
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return False  # so that tied embeddings stay tied

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw one unsharded tensor."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        is_norm = len(shape) == 1 and name.endswith(".weight")
        std = 1.0 if name in self._unit else STD
        return tensor.fill_(1) if is_norm else tensor.normal_(0, std, generator=self.generator)

    def take(self, name: str, shape: Shape) -> Tensor:
        """Draw one unsharded tensor, the same on all ranks, and return this rank's shard."""
        return shard_of(self.draw(name, whole_sizes(shape)), shape)

    def take_merged(self, sizes: Mapping[str, int | Axis], *rest: int | Axis) -> Tensor:
        """Draw the concatenated rows as one tensor."""
        rows = functools.reduce(Axis.__add__, map(Axis.of, sizes.values()))
        return self.take(next(iter(sizes)), (rows, *rest))

    def take_product(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        if self._form is not None and self._form.of_experts:
            return self.take_merged(sizes, in_features)
        return self.take_experts(sizes, in_features)

    def take_experts(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        rows = functools.reduce(Axis.__add__, map(Axis.of, sizes.values()))
        drawn = self._drawn(rows, Axis.of(in_features))
        return self.take_merged(sizes, in_features) if drawn is None else drawn

    def take_stacked(self, name: str, shape: Shape, transposed: bool = False) -> Tensor | QuantizedWeight:
        experts, high, wide = axes_of(shape)
        each, columns = (wide, high) if transposed else (high, wide)
        held = [
            range(at * each.whole + one.start, at * each.whole + one.stop)
            for run in experts.held
            for at in run
            for one in each.held
        ]
        drawn = self._drawn(Axis(experts.whole * each.whole, tuple(held)), columns)
        if not isinstance(drawn, Tensor):
            return self.take(name, shape) if drawn is None else drawn
        stacked = drawn.view(experts.size, each.size, columns.size)
        return stacked.mT if transposed else stacked

    def _octets(self, *shape: int) -> Tensor:
        """Draw uniform uint8 values, eight from each 64-bit random number."""
        count = math.prod(shape)
        words = torch.empty(-(-count // 8), dtype=torch.int64, device=self.device)
        words.random_(-(2**63), None, generator=self.generator)
        return words.view(torch.uint8)[:count].view(shape)

    def _drawn(self, rows: Axis, columns: Axis) -> Tensor | QuantizedWeight | None:
        """Draw an unsharded quantized weight, the same on all ranks, and return this rank's shard; None without quantization."""
        form = self._form
        whole = None if form is None else form.drawn(self._octets, rows.whole, columns.whole, STD, self.dtype)
        if whole is None:
            return None
        shard = whole if rows.is_whole else merged([whole.rows(each) for each in rows.held or (range(0),)])
        if columns.is_whole:
            return shard
        narrow = shard.columns(columns.held[0]) if len(columns.held) == 1 else None
        return shard_of(shard.dequantized(self.dtype), (shard.shape[0], columns)) if narrow is None else narrow

    def take_as(self, dtype: torch.dtype, name: str, shape: Shape) -> Tensor:
        """Draw one tensor in the given dtype."""
        return self.take(name, shape).to(dtype)

    def take_number(self, name: str) -> float:
        """Return 1, since scales are not random."""
        return 1.0

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Do nothing: no tensor can be unused."""


class QuantizeOnLoading:
    """Weight source that quantizes linear layers and experts; embeddings, the head and routers stay plain."""

    def __init__(
        self,
        inner: WeightSource,
        quantize: Callable[[Tensor], QuantizedWeight | Tensor],
        supports: Callable[[QuantizedWeight], bool],
        supports_experts: Callable[[QuantizedWeight], bool] = lambda weight: False,
        experts_only: bool = False,
    ) -> None:
        """supports, supports_experts: as for `Weights`; weights whose format they reject are quantized, then dequantized.

        experts_only: True if only experts are quantized.
        """
        self._inner = inner
        self._quantize = quantize
        self._supports = supports
        self._supports_experts = supports_experts
        self._experts_only = experts_only
        self.dtype = inner.dtype
        self.device = inner.device
        self.take = inner.take
        self.take_merged = inner.take_merged
        self.take_as = inner.take_as
        self.take_number = inner.take_number
        self.take_head = inner.take_head
        self._plain = self._bytes = 0
        """Sizes of the quantized weights in bytes, before and after quantization."""
        self._forms: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def take_product(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """Return the inner source's weight, quantized unless `experts_only` is set."""
        plain = self._inner.take_product(sizes, in_features)
        return plain if self._experts_only else self._rounded(plain, self._supports)

    def take_experts(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """Return the inner source's expert weights, quantized."""
        return self._rounded(self._inner.take_experts(sizes, in_features), self._supports_experts)

    def take_stacked(self, name: str, shape: Shape, transposed: bool = False) -> Tensor | QuantizedWeight:
        """Return the inner source's stacked experts, quantized."""
        plain = self._inner.take_stacked(name, shape, transposed)
        rows = (plain.mT if transposed else plain).flatten(0, 1) if isinstance(plain, Tensor) else plain
        weight = self._rounded(rows, self._supports_experts)
        if not isinstance(weight, Tensor):
            return weight
        stacked = weight.view(axes_of(shape)[0].size, -1, weight.shape[1])
        return stacked.mT if transposed else stacked

    def dequantize(self, weight: QuantizedWeight) -> Tensor:
        """Dequantize a weight that was returned quantized."""
        whole = weight.dequantized(self.dtype)
        self._bytes += whole.nbytes - weight.nbytes
        return whole

    def _rounded(self, plain: Tensor | QuantizedWeight, supports: Callable[[QuantizedWeight], bool]) -> Tensor | QuantizedWeight:
        weight = self._quantize(plain) if isinstance(plain, Tensor) else plain
        if isinstance(weight, Tensor):
            return weight
        result = weight if supports(weight) else weight.dequantized(self.dtype)
        if isinstance(plain, Tensor):
            self._forms[weight.kind] = None
            self._plain += plain.nbytes
            self._bytes += result.nbytes
        return result

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Finish the inner source, and log the formats and sizes of the quantized weights."""
        self._inner.finish(ignored, modules)
        if self._forms:
            size, was = shown_size(self._bytes), shown_size(self._plain)
            dequantized = "" if self._bytes < self._plain else f", then dequantized to {str(self.dtype).removeprefix('torch.')}"
            became = f"{size} instead of {was}" if not dequantized else f"{size} as before"
            log.info("weights: quantized to %s while loading%s: %s", ", ".join(self._forms), dequantized, became)
