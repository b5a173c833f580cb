"""Sources of a model's weights: safetensors checkpoints, random weights, and either of them rounded to fewer bits.

Each tensor of a checkpoint is read once, checked, and taken; what is missing or left over is an error.
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
"""Suffixes of tensors that some checkpoints carry and nobody needs: what is computed instead, scales of what is not quantised."""

log = logging.getLogger("headway")


class WeightSource(Protocol):
    """Where a decoder takes its tensors from, by checkpoint name. A source whose tensors are all plain inherits what it gives."""

    dtype: torch.dtype
    device: torch.device

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint brings a tensor of its own by this name."""

    def take(self, name: str, shape: Shape) -> Tensor:
        """One tensor of this shape: of a rank, what it holds of the tensor's axes."""

    def take_merged(self, sizes: Mapping[str, int | Axis], *rest: int | Axis) -> Tensor:
        """Tensors of shape [size, *rest] as one, one after the other along the first axis."""

    def take_product(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """Weights [size, in_features] of products of one input as one, which may be quantised. sizes: name -> out_features."""
        return self.take_merged(sizes, in_features)

    def take_experts(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """The same of the experts of a layer, whose rows follow one another. A form of it is what kernels of experts read."""
        return self.take_merged(sizes, in_features)

    def take_stacked(self, name: str, shape: Shape, transposed: bool = False) -> Tensor | QuantizedWeight:
        """A tensor of all experts of a layer: a plain one of this shape, a quantised one as rows [experts * out, in_features].

        shape: experts, out_features, in_features, or (transposed) experts, in_features, out_features.
        """
        return self.take(name, shape)

    def take_head(self, name: str, shape: Shape) -> QuantizedWeight | None:
        """The output head, or an embedding that serves as one too, in blocks that the CPU's products read; None: it is plain."""
        return None

    def expand(self, weight: QuantizedWeight) -> Tensor:
        """Expand what `take_experts` or `take_stacked` returned after all, [rows, in_features]."""
        raise AssertionError("a plain source gives no quantised weight")

    def take_as(self, dtype: torch.dtype, name: str, shape: Shape) -> Tensor:
        """Return one tensor of this shape in another dtype than the source's."""

    def take_number(self, name: str) -> float:
        """A tensor of one element, whatever its shape."""

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Nothing more is taken. ignored: suffixes of what may be left; modules: what names of such tensors begin with."""


class Weights(WeightSource):
    """The tensors of a model folder, by checkpoint name, converted to one dtype and device as they are taken.

    A quantised one is expanded, tensor by tensor, whatever takes it; `take_product`, `take_experts` and `take_stacked` alone
    return it as it is, if that is wanted.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        aliases: tuple[tuple[str, str], ...] = (),
        quantization: Quantization | None = None,
        keeps: Callable[[QuantizedWeight], bool] = lambda weight: False,
        keeps_experts: Callable[[QuantizedWeight], bool] = lambda weight: False,
    ) -> None:
        """aliases: parts of names, and what stands in their place where the checkpoint has no tensor of the name.

        keeps: tells of which forms products get a quantised weight as it is. keeps_experts: the same of experts.

        :raises ModelError: no safetensors file in the folder, or one that is missing or truncated.
        """
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._files = TensorFiles(folder, device, aliases, quantization.beside if quantization else None)
        self.quantization = quantization
        self._keeps = keeps
        self._keeps_experts = keeps_experts
        self._counted = Expansion()

    def __contains__(self, name: str) -> bool:
        return name in self._files or self._quantized(name, ()) is not None

    def take(self, name: str, shape: Shape) -> Tensor:
        """Read one tensor; of one whose axes are cut, nothing but the rank's part.

        :raises ModelError: it is missing, or its shape is not the configuration's.
        """
        return self._read(name, axes_of(shape)).to(self.dtype)

    def take_merged(self, sizes: Mapping[str, int | Axis], *rest: int | Axis) -> Tensor:
        """Read tensors of shape [size, *rest] into one of all their rows, which is allocated once: no part lies twice.

        sizes: name -> rows.

        :raises ModelError: one is missing, or its shape is not the configuration's.
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
        """Read the weights of products of one input as one, in the form in which the checkpoint has them, if that is to be kept.

        Parts of which one is plain, or which have different forms, are expanded.

        :raises ModelError: as `take_merged`.
        """
        return self._rows(sizes, in_features, self._keeps)

    def take_experts(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """Read the weights of all experts as `take_product` does those of products.

        :raises ModelError: as `take_merged`.
        """
        return self._rows(sizes, in_features, self._keeps_experts)

    def take_stacked(self, name: str, shape: Shape, transposed: bool = False) -> Tensor | QuantizedWeight:
        """Read a tensor of all experts, in the form in which the checkpoint has it, if that is to be kept.

        :raises ModelError: as `take`.
        """
        axes = axes_of(shape)
        found = self._quantized(name, axes)
        if found is None:
            return self.take(name, shape)
        before = self._counted.stored
        weight = self._weight(*found)
        if isinstance(weight, Tensor) or not self._keeps_experts(weight):
            return self._expanded(weight, axes)
        self._counted.kept += self._counted.stored - before
        return weight

    def take_head(self, name: str, shape: Shape) -> QuantizedWeight | None:
        found = self._quantized(name, axes_of(shape))
        weight = self._weight(*found) if found is not None and isinstance(found[0], GgufBlocks) else None
        kept = None if weight is None or isinstance(weight, Tensor) or not self._keeps(weight) else weight
        self._counted.kept += 0 if kept is None else kept.nbytes
        return kept

    def expand(self, weight: QuantizedWeight) -> Tensor:
        """Expand a weight that was kept, and count it so."""
        self._counted.kept -= weight.nbytes
        return self._expanded(weight)

    def _rows(
        self, sizes: Mapping[str, int | Axis], in_features: int | Axis, keeps: Callable[[QuantizedWeight], bool]
    ) -> Tensor | QuantizedWeight:
        """Weights of one input as one: in their form, where all have one that is kept."""
        modules = [self._quantized(name, axes_of((size, in_features))) for name, size in sizes.items()]
        known = [each for each in modules if each is not None]
        if len(known) < len(modules):
            return self.take_merged(sizes, in_features)
        before = self._counted.stored
        parts = [self._weight(*each) for each in known]
        forms = [part for part in parts if not isinstance(part, Tensor)]
        if len(forms) == len(parts) and keeps(forms[0]):
            with contextlib.suppress(ModelError):  # they do not merge
                whole = merged(forms)
                if keeps(whole):
                    self._counted.kept += self._counted.stored - before
                    return whole
        rows = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1], dtype=self.dtype, device=self.device)
        row = 0
        for part in parts:
            rows[row : row + part.shape[0]] = self._expanded(part)
            row += part.shape[0]
        return rows

    def take_as(self, dtype: torch.dtype, name: str, shape: Shape) -> Tensor:
        """Read one tensor in another dtype than the model's. Raises as `take`."""
        return self._read(name, axes_of(shape)).to(dtype)

    def take_number(self, name: str) -> float:
        """Read a tensor of one element, whatever its shape.

        :raises ModelError: it is missing, or has more elements.
        """
        return self._files.read_number(name)

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Check that nothing was left over: a tensor nobody took means a model that computes something else.

        ignored: suffixes of tensors of which it does not; modules: what the names of such tensors begin with.

        :raises ModelError: naming the first few.
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
            log.info("weights: %s", self._counted.told(self.dtype))

    def _read(self, name: str, axes: tuple[Axis, ...]) -> Tensor:
        return self._checked(name, axes)()

    def _checked(self, name: str, axes: tuple[Axis, ...]) -> Callable[[], Tensor]:
        """Return what reads a tensor, whose shape is checked by now: a quantised one is expanded then."""
        found = self._quantized(name, axes)
        if found is not None:
            return functools.partial(self._expanded, self._weight(*found), axes)
        told = "and config.json has no quantization_config that says how"
        if self.quantization is not None:
            told = f"and not in {self.quantization.label}, as {self.quantization.place} says"
        if (elements := self._files.elements(name)) not in ("", *PLAIN):
            raise ModelError(f"weights: {name} needs {NEEDED} elements, got {elements}: it is quantised, {told}")
        other = next((suffix for suffix in _PACKED if name.removesuffix(".weight") + suffix in self._files), None)
        if not elements and other is not None:
            raise ModelError(
                f"weights: {name} is not there, and {name.removesuffix('.weight')}{other} is: it is quantised, {told}"
            )
        self._files.check(name, axes)
        return functools.partial(self._files.read, name, axes)

    def _quantized(self, name: str, axes: tuple[Axis, ...]) -> tuple[StoredFormat, QuantizedModule] | None:
        """A quantised weight's format and tensors; None: there is no weight by this name, or it is a plain one."""
        if self.quantization is None:
            return None
        module = QuantizedModule(self._files, name.removesuffix(".weight"), axes, self.dtype)
        found = self.quantization.format_of(module)
        return None if found is None else (found, module)

    def _weight(self, form: StoredFormat, module: QuantizedModule) -> Tensor | QuantizedWeight:
        """Read a quantised weight: the rank's part, which may be nothing.

        Where that begins or ends within a group, the whole group is read, and the part is cut out of the expanded weight.
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
        """Whether a tensor that nobody read is a bias of zeros, which some makers of GPTQ add to every quantised module."""
        module = name.removesuffix(".bias")
        return module != name and self._quantized(module, ()) is not None and self._files.is_zero(name)

    def _expanded(self, weight: Tensor | QuantizedWeight, axes: tuple[Axis, ...] = ()) -> Tensor:
        whole = self._dense(weight, axes)
        self._counted.expanded += whole.nbytes
        return whole

    def _dense(self, weight: Tensor | QuantizedWeight, axes: tuple[Axis, ...]) -> Tensor:
        """The weight in the model's dtype; axes: three of a stack, [experts, in_features, out_features]."""
        if isinstance(weight, Tensor):
            return weight
        stacked = len(axes) == 3
        return weight.dequantized_stack(axes[0].size, self.dtype).mT if stacked else weight.dequantized(self.dtype)


_PACKED = (".qweight", ".weight_packed", "_blocks")
"""What names of quantised weights have at their end, where it is not `.weight`."""


@dataclass
class Expansion:
    """What became of a checkpoint's quantised weights, in bytes."""

    labels: dict[str, None] = field(default_factory=dict)
    """Formats that were read."""
    stored: int = 0
    kept: int = 0
    expanded: int = 0

    def told(self, dtype: torch.dtype) -> str:
        """The line of the log."""
        parts = [f"kept as they are: {shown_size(self.kept)}"] if self.kept else []
        if self.expanded:
            size, stored = shown_size(self.expanded), shown_size(self.stored - self.kept)
            parts.append(f"expanded to {str(dtype).removeprefix('torch.')}: {size} instead of {stored}")
        return f"{', '.join(self.labels)}, {', '.join(parts)}"


STD = 0.02
"""Standard deviation of the weights, the usual `initializer_range`: logits stay finite in half precision."""


class DummyWeights(WeightSource):
    """A checkpoint that holds whatever is asked for: normal weights from a fixed seed, norms of one.

    Equal on every start on one kind of device, because tensors are drawn in the order in which they are taken.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        unit: Container[str] = (),
        form: StoredFormat | None = None,
    ) -> None:
        """unit: tensors drawn with deviation 1, as the embedding before experts, so that a random router tells tokens apart.

        form: of products' and experts' weights; what it expands is drawn as plain weights are. None: all are plain.
        """
        self._form = form
        self.dtype = dtype
        self.device = device
        self._unit = unit
        # On torch's device `meta` tensors have shapes and no elements.
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return False  # nothing beyond what the configuration implies, so tied embeddings stay tied

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw one whole tensor."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        is_norm = len(shape) == 1 and name.endswith(".weight")
        std = 1.0 if name in self._unit else STD
        return tensor.fill_(1) if is_norm else tensor.normal_(0, std, generator=self.generator)

    def take(self, name: str, shape: Shape) -> Tensor:
        """Draw one tensor whole, so that all ranks draw alike, and cut it."""
        return shard_of(self.draw(name, whole_sizes(shape)), shape)

    def take_merged(self, sizes: Mapping[str, int | Axis], *rest: int | Axis) -> Tensor:
        """Draw all rows at once."""
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
        """uint8, each of the 256 values as often as any other: 8 of one number of the generator."""
        count = math.prod(shape)
        words = torch.empty(-(-count // 8), dtype=torch.int64, device=self.device)
        words.random_(-(2**63), None, generator=self.generator)
        return words.view(torch.uint8)[:count].view(shape)

    def _drawn(self, rows: Axis, columns: Axis) -> Tensor | QuantizedWeight | None:
        """Draw codes and scales, whole, so that all ranks draw alike; return what is held, or None if there is no form for it."""
        form = self._form
        whole = None if form is None else form.drawn(self._octets, rows.whole, columns.whole, STD, self.dtype)
        if whole is None:
            return None
        cut = whole if rows.is_whole else merged([whole.rows(each) for each in rows.held or (range(0),)])
        if columns.is_whole:
            return cut
        narrow = cut.columns(columns.held[0]) if len(columns.held) == 1 else None
        return shard_of(cut.dequantized(self.dtype), (cut.shape[0], columns)) if narrow is None else narrow

    def take_as(self, dtype: torch.dtype, name: str, shape: Shape) -> Tensor:
        """Draw one tensor."""
        return self.take(name, shape).to(dtype)

    def take_number(self, name: str) -> float:
        """No scale is drawn."""
        return 1.0

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Nothing can be left over."""


class QuantizeOnLoading:
    """A source whose weights of products and experts get fewer bits; embeddings, the head and routers stay as they are."""

    def __init__(
        self,
        inner: WeightSource,
        quantize: Callable[[Tensor], QuantizedWeight | Tensor],
        keeps: Callable[[QuantizedWeight], bool],
        keeps_experts: Callable[[QuantizedWeight], bool] = lambda weight: False,
        experts_alone: bool = False,
    ) -> None:
        """keeps, keeps_experts: as of `Weights`; another form is expanded again, rounded.

        experts_alone: nothing else is rounded.
        """
        self._inner = inner
        self._quantize = quantize
        self._keeps = keeps
        self._keeps_experts = keeps_experts
        self._experts_alone = experts_alone
        self.dtype = inner.dtype
        self.device = inner.device
        self.take = inner.take
        self.take_merged = inner.take_merged
        self.take_as = inner.take_as
        self.take_number = inner.take_number
        self.take_head = inner.take_head
        self._plain = self._bytes = 0
        """Bytes of the weights that were rounded, before and after."""
        self._forms: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def take_product(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        plain = self._inner.take_product(sizes, in_features)
        return plain if self._experts_alone else self._rounded(plain, self._keeps)

    def take_experts(self, sizes: Mapping[str, int | Axis], in_features: int | Axis) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        return self._rounded(self._inner.take_experts(sizes, in_features), self._keeps_experts)

    def take_stacked(self, name: str, shape: Shape, transposed: bool = False) -> Tensor | QuantizedWeight:
        """See WeightSource."""
        plain = self._inner.take_stacked(name, shape, transposed)
        rows = (plain.mT if transposed else plain).flatten(0, 1) if isinstance(plain, Tensor) else plain
        weight = self._rounded(rows, self._keeps_experts)
        if not isinstance(weight, Tensor):
            return weight
        stacked = weight.view(axes_of(shape)[0].size, -1, weight.shape[1])
        return stacked.mT if transposed else stacked

    def expand(self, weight: QuantizedWeight) -> Tensor:
        """See WeightSource."""
        whole = weight.dequantized(self.dtype)
        self._bytes += whole.nbytes - weight.nbytes
        return whole

    def _rounded(self, plain: Tensor | QuantizedWeight, keeps: Callable[[QuantizedWeight], bool]) -> Tensor | QuantizedWeight:
        weight = self._quantize(plain) if isinstance(plain, Tensor) else plain
        if isinstance(weight, Tensor):
            return weight
        kept = weight if keeps(weight) else weight.dequantized(self.dtype)
        if isinstance(plain, Tensor):
            self._forms[weight.kind] = None
            self._plain += plain.nbytes
            self._bytes += kept.nbytes
        return kept

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """See WeightSource; the log says what was rounded."""
        self._inner.finish(ignored, modules)
        if self._forms:
            size, was = shown_size(self._bytes), shown_size(self._plain)
            expanded = "" if self._bytes < self._plain else f", and expanded again to {str(self.dtype).removeprefix('torch.')}"
            became = f"{size} instead of {was}" if not expanded else f"{size} as before"
            log.info("weights: rounded to %s on loading%s: %s", ", ".join(self._forms), expanded, became)
