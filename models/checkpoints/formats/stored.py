"""Storage formats of quantized weights: FP8, int8, FP4 and integers with group scales.

FP8 is stored by DeepSeek, compressed-tensors and ModelOpt; int8 is W8A8; FP4 is MXFP4 and NVFP4; integers with group scales
are AWQ, GPTQ and pack-quantized. Formats without a kernel are dequantized while loading.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.contract.weights import (
    FP4_VALUES,
    MX_GROUP,
    Float4Weight,
    Float8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    packed,
)
from headway.kernels.linear.axes import Axis, axes_of
from headway.models.checkpoints.formats.rounding import Octets, drawn_float4, drawn_float8, drawn_int4, drawn_int8
from headway.models.checkpoints.tensor_files import PLAIN, TensorFiles


class QuantizedModule:
    """Tensors of one module, accessed by name suffix, and the axes of the weight that they encode."""

    def __init__(self, files: TensorFiles, name: str, axes: tuple[Axis, ...], dtype: torch.dtype) -> None:
        """name: module name without `.weight`. axes: out_features and in_features, or a stack's 3 axes. dtype: the model's."""
        self.name = name
        self.axes = axes
        self.dtype = dtype
        self.num_bytes = 0
        """Number of bytes read so far."""
        self._files = files

    @property
    def rows(self) -> Axis:
        """Axis of out_features, as sharded over ranks."""
        return self.axes[0]

    @property
    def columns(self) -> Axis:
        """Axis of in_features, as sharded over ranks."""
        return self.axes[1]

    def elements(self, suffix: str) -> str:
        """Return torch's name of a tensor's dtype; "" if the module has no such tensor."""
        return self._files.elements(self.name + suffix)

    def suffix_of(self, suffixes: Sequence[str]) -> str:
        """Return the first suffix with a tensor in this module, else the first suffix used by any module, else the first suffix
        in the list."""
        found = [suffix for suffix in suffixes if self.elements(suffix)]
        return next(iter(found or [suffix for suffix in suffixes if self._files.has_any(suffix)] or suffixes))

    def shape(self, suffix: str) -> list[int]:
        """Return the unsharded shape of a tensor. The tensor must exist."""
        return self._files.shape(self.name + suffix)

    def use(self, suffixes: tuple[str, ...]) -> None:
        """Count the module's tensors with these suffixes as read, even if its weight does not depend on them."""
        for suffix in suffixes:
            self._files.use(self.name + suffix)

    def take(self, suffix: str, elements: tuple[str, ...], shape: Sequence[int | Axis]) -> Tensor:
        """Read this rank's shard of one tensor.

        elements: allowed dtypes, as torch names them.

        :raises ModelError: if the tensor is missing or has a different dtype or shape.
        """
        name = self.name + suffix
        if name not in self._files:
            raise ModelError(f"weights: {self.name} is quantised, and {self._files.folder} has no tensor {name!r} beside it")
        if (got := self.elements(suffix)) not in elements:
            raise self.error(suffix, f"needs {' or '.join(elements)} elements", got)
        whole = [Axis.of(size).whole for size in shape]
        if (stored := self.shape(suffix)) != whole:
            raise self.error(suffix, f"needs shape {whole}", str(stored))
        tensor = self._files.read(name, axes_of(shape))
        self.num_bytes += tensor.nbytes
        return tensor

    def take_scales(
        self, suffix: str, shape: Sequence[int | Axis], signed: bool = False, elements: tuple[str, ...] = PLAIN
    ) -> Tensor:
        """Read scales in the stored dtype.

        signed: True if scales may be negative, because some tools write negative group scales for integers.

        :raises ModelError: as for `take`, or if a scale is 0, not finite, or negative while `signed` is false.
        """
        scales = self.take(suffix, elements, shape)
        values = scales.float()
        wrong = ~torch.isfinite(values) | ((values == 0) if signed else (values <= 0))
        if bool(wrong.any()):
            value = float(values[wrong][0])
            raise self.error(suffix, "needs finite scales other than 0" if signed else "needs finite scales above 0", f"{value}")
        return scales

    def error(self, suffix: str, need: str, got: str) -> ModelError:
        """Return an error that names a tensor and its file."""
        name = self.name + suffix
        return ModelError(f"weights: {name} ({self._files.file_of(name)}) {need}, got {got}")

    def divided(self, size: int) -> int:
        """Return the number of column groups. size: number of columns per group.

        :raises ModelError: if `size` does not divide in_features.
        """
        if self.columns.whole % size:
            raise ModelError(
                f"weights: {self.name} needs in_features of a multiple of group_size={size}, got {self.columns.whole}"
            )
        return self.columns.whole // size


class StoredFormat(ABC):
    """Storage format of a module's quantized weight."""

    suffixes: ClassVar[tuple[str, ...]]
    """Suffixes of all tensor names that a module of the format may have, including activation scales."""
    codes_in: ClassVar[tuple[str, tuple[str, ...]]] = ("", ())
    """Suffix of the tensor with quantized values, and the dtypes that identify the format; () means any dtype."""
    of_experts: ClassVar[bool] = False
    """True if the format applies only to stacked expert tensors, and other linear layers are unquantized."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the format, for log lines and error messages."""

    def holds(self, module: QuantizedModule) -> bool:
        """Return whether the module's tensors have this format, judged by their names and dtypes."""
        suffix, known = self.codes_in
        found = module.elements(suffix)
        return found in known if known else bool(found)

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        """Return, for each axis, the number of elements that must be read together; shards are widened to multiples of this
        number."""
        return 1, 1

    @abstractmethod
    def read(self, module: QuantizedModule) -> QuantizedWeight | Tensor:
        """Return the module's weight, quantized if a kernel supports the format, else dequantized to the model's dtype.

        :raises ModelError: if a tensor is missing, has a wrong shape, or has impossible scales.
        """

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> QuantizedWeight | None:
        """Draw a random weight [rows, columns] in the format that `read` returns; None if `read` dequantizes.

        octets: function that draws quantized values. std: standard deviation. dtype: the model's dtype.
        """
        return None


_FLOAT8, _INT8 = ("float8_e4m3fn",), ("int8",)
_POWERS = "float8_e8m0fnu"
"""torch's name of the dtype for power-of-two scales."""


@dataclass(frozen=True, slots=True)
class Float8Format(StoredFormat):
    """`weight` float8_e4m3fn [N, K] times `weight_scale` (or `weight_scale_inv`, which is also a factor)."""

    scales: Literal["tensor", "channel"] | tuple[int, int]
    """Scope of each scale: the tensor, one row (channel), or a block given as (rows, columns)."""
    inverse_name: bool = False
    """True if the quantization method names its scales `weight_scale_inv`."""
    codes_in: ClassVar[tuple[str, tuple[str, ...]]] = (".weight", _FLOAT8)
    suffixes: ClassVar[tuple[str, ...]] = (
        *(".weight", ".weight_scale", ".weight_scale_inv"),
        *(".input_scale", ".activation_scale", ".activation_scale_inv"),
    )

    @property
    def label(self) -> str:
        if isinstance(self.scales, tuple):
            return f"fp8 (blocks of {self.scales[0]} x {self.scales[1]})"
        return f"fp8 (a scale for each {'row' if self.scales == 'channel' else 'tensor'})"

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        return (1, self.scales[1]) if isinstance(self.scales, tuple) else (1, 1)

    def read(self, module: QuantizedModule) -> Float8Weight:
        values = module.take(".weight", _FLOAT8, (module.rows, module.columns))
        suffix = module.suffix_of(self.suffixes[1:3] if not self.inverse_name else self.suffixes[2:0:-1])
        if not isinstance(self.scales, tuple):
            scales = _row_scales(module, suffix, self.scales)
            return Float8Weight(values, scales[:, None], (1, module.columns.size))
        rows, columns = self.scales
        blocks = module.columns.units(columns)
        elements = (*PLAIN, _POWERS)
        if _is_cut_within(module, rows):
            held = torch.tensor([row // rows for row in module.rows.pick(range(module.rows.whole))], device=values.device)
            scales = module.take_scales(suffix, (-(-module.rows.whole // rows), blocks), elements=elements)
            return Float8Weight(values, scales.float()[held], (1, columns))
        scales = module.take_scales(suffix, (module.rows.units(rows), blocks), elements=elements)
        return Float8Weight(values, scales.float(), (rows, columns))

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> Float8Weight:
        return drawn_float8(octets, rows, columns, std, self.scales if isinstance(self.scales, tuple) else None)


@dataclass(frozen=True, slots=True)
class Int8Format(StoredFormat):
    """`weight` int8 [N, K] times `weight_scale`, one per row or one per tensor."""

    scales: Literal["tensor", "channel"]
    codes_in: ClassVar[tuple[str, tuple[str, ...]]] = (".weight", _INT8)
    suffixes: ClassVar[tuple[str, ...]] = (".weight", ".weight_scale", ".input_scale", ".input_zero_point", ".weight_zero_point")

    @property
    def label(self) -> str:
        return f"int8 (a scale for each {'row' if self.scales == 'channel' else 'tensor'})"

    def read(self, module: QuantizedModule) -> Int8Weight:
        values = module.take(".weight", _INT8, (module.rows, module.columns))
        if module.elements(".weight_zero_point"):
            zeros: Tensor = module.take(".weight_zero_point", _INT8, module.shape(".weight_zero_point"))
            if bool(zeros.any()):
                raise module.error(".weight_zero_point", "needs zeros alone: rows are computed without", "others")
        return Int8Weight(values, _row_scales(module, ".weight_scale", self.scales))

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> Int8Weight:
        return drawn_int8(octets, rows, columns, std)


def _row_scales(module: QuantizedModule, suffix: str, scales: Literal["tensor", "channel"]) -> Tensor:
    """Return float32 [N]: one scale per row of this rank's shard; a single scale is repeated for every row."""
    stored = module.shape(suffix) if module.elements(suffix) else [1]
    if scales == "tensor":
        shape = stored if stored in ([], [1], [1, 1]) else [1]
        return module.take_scales(suffix, shape).float().reshape(1).repeat(module.rows.size)
    return module.take_scales(suffix, (module.rows,) if len(stored) == 1 else (module.rows, 1)).float().flatten()


def _is_cut_within(module: QuantizedModule, rows: int) -> bool:
    """Return whether this rank's shard begins or ends within a block of `rows` rows."""
    ends = [end for each in module.rows.held for end in (each.start, each.stop)]
    return any(end % rows and end != module.rows.whole for end in ends)


_OCTETS = ("uint8",)
_NV_GROUP = 16
"""Number of consecutive elements of a row that share a scale in NVFP4."""
_NAN = 255
"""Scale exponent that encodes NaN."""


@dataclass(frozen=True, slots=True)
class ExpertsMxfp4(StoredFormat):
    """MXFP4 of all experts: `_blocks` uint8 [E, N, K / 32, 16] and `_scales` uint8 [E, N, K / 32] for a tensor [E, K, N]."""

    codes_in: ClassVar[tuple[str, tuple[str, ...]]] = ("_blocks", ())
    suffixes: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")
    of_experts: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return "MXFP4"

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        return 1, MX_GROUP, 1

    def read(self, module: QuantizedModule) -> Float4Weight:
        """Return the weight with the concatenated rows of all experts: [E * N, K]."""
        experts, columns, rows = module.axes
        groups = columns.units(MX_GROUP)
        blocks = module.take("_blocks", _OCTETS, (experts, rows, groups, MX_GROUP // 2))
        exponents = module.take("_scales", _OCTETS, (experts, rows, groups))
        if bool((exponents == _NAN).any()):
            raise module.error("_scales", f"needs exponents below {_NAN}", f"{_NAN}, which is no number")
        octets = torch.empty(experts.size, rows.size, columns.size // 2, dtype=torch.uint8, device=blocks.device)
        for target, block in zip(octets, blocks, strict=True):  # one at a time: unpacked values need more memory
            target.copy_(packed(_codes(block.flatten(1)), MX_GROUP))
        return Float4Weight(octets.flatten(0, 1), exponents.flatten(0, 1))

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> Float4Weight | None:
        return None if columns % MX_GROUP else drawn_float4(octets, rows, columns, std)


@dataclass(frozen=True, slots=True)
class Nvfp4(StoredFormat):
    """NVFP4: values uint8 [N, K / 2], `weight_scale` float8 [N, K / 16], and one scale for the whole tensor."""

    codes: str
    """Suffix of the tensor with quantized values."""
    scale: str
    """Suffix of the scale for the whole tensor."""
    divides: bool
    """True if values are divided by the scale of the whole tensor; False if they are multiplied by it."""
    suffixes: ClassVar[tuple[str, ...]] = (
        *(".weight", ".weight_packed", ".weight_scale", ".weight_scale_2", ".weight_global_scale"),
        *(".input_scale", ".input_global_scale"),
    )

    @property
    def label(self) -> str:
        return "NVFP4"

    def holds(self, module: QuantizedModule) -> bool:
        return module.elements(self.codes) in _OCTETS

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        return 1, _NV_GROUP

    def read(self, module: QuantizedModule) -> Tensor:
        module.divided(_NV_GROUP)
        groups = module.columns.units(_NV_GROUP)
        codes = _codes(module.take(self.codes, _OCTETS, (module.rows, module.columns.units(2))))
        scales = module.take(".weight_scale", _FLOAT8, (module.rows, groups)).float()  # 0 where all of a group is 0
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            raise module.error(".weight_scale", "needs finite scales, none below 0", "others")
        one = module.shape(self.scale) if module.elements(self.scale) else [1]
        factor = module.take_scales(self.scale, one if one in ([], [1], [1, 1]) else [1]).float().reshape(())
        scales = scales / factor if self.divides else scales * factor
        values = torch.tensor(FP4_VALUES, device=codes.device)[codes.int()].view(len(codes), -1, _NV_GROUP)
        return (values * scales[:, :, None]).to(module.dtype).flatten(1)


def _codes(octets: Tensor) -> Tensor:
    """Unpack two 4-bit values per byte, the lower bits first: uint8 [R, C] to [R, 2 * C]."""
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)


_WORD = 32
"""Number of bits in a packed word."""
_WORDS, _INDICES = ("int32",), ("int32", "int64")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position within a word of each of 8 consecutive columns, as AWQ stores them."""


@dataclass(frozen=True, slots=True)
class IntegerGroups(StoredFormat):
    """Base of AWQ, GPTQ and pack-quantized: integers with a scale per group of columns."""

    name: ClassVar[str]
    bits: int
    group_size: int
    """Number of consecutive columns that share a scale; -1 means all columns."""

    @property
    def codes(self) -> int:
        """Number of quantized values per word."""
        return _WORD // self.bits

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        size, count = self.group(module)
        return self.codes, self.codes if count == 1 else size

    def group(self, module: QuantizedModule) -> tuple[int, int]:
        """Return the number of columns per group, and the number of groups in the unsharded weight."""
        size = module.columns.whole if self.group_size == -1 else self.group_size
        return size, module.divided(size)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.bits} bits, {'rows' if self.group_size == -1 else f'groups of {self.group_size}'})"

    def weight(
        self, module: QuantizedModule, codes: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor | None = None
    ) -> Int4Weight | Tensor:
        """Return an `Int4Weight` for the kernels if it can represent the 4-bit values, else the dequantized weight.

        codes: uint8 [N, K]; scales: [N, groups]; zeros: uint8 [N, groups], zero points; None means the middle of the value range.
        group_of: int64 [K], the group of each column; None means that groups are consecutive columns.
        """
        size = codes.shape[1] // scales.shape[1] if group_of is None else self.group(module)[0]
        order = None
        if group_of is not None:
            order = torch.argsort(group_of, stable=True)
            counted = torch.arange(codes.shape[1], device=order.device) // size
            fits = codes.shape[1] == size * scales.shape[1] and bool(torch.equal(group_of[order], counted))
        if self.bits == 4 and (group_of is None or fits):
            codes = codes if order is None else codes[:, order]
            plain = zeros is None or bool((zeros == 8).all())
            stored_zeros = None if zeros is None or plain else zeros.contiguous()
            return Int4Weight(
                packed(codes, size), scales.contiguous(), stored_zeros, size, None if order is None else order.int()
            )
        groups = group_of if group_of is not None else torch.arange(codes.shape[1], device=codes.device) // size
        middle = float(2 ** (self.bits - 1))
        values = codes.float() - (middle if zeros is None else zeros.float()[:, groups])
        return (values * scales.float()[:, groups]).to(module.dtype)

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> Int4Weight | None:
        size = columns if self.group_size == -1 else self.group_size
        return drawn_int4(octets, rows, columns, std, size, dtype) if self.bits == 4 and columns % size == 0 else None


@dataclass(frozen=True, slots=True)
class Awq(IntegerGroups):
    """`qweight` int32 [K, N / 8], `qzeros` [groups, N / 8], `scales` [groups, N] (AutoAWQ's `gemm` layout)."""

    name: ClassVar[str] = "AWQ"
    codes_in: ClassVar[tuple[str, tuple[str, ...]]] = (".qweight", ())
    suffixes: ClassVar[tuple[str, ...]] = (".weight", ".qweight", ".qzeros", ".scales")

    def read(self, module: QuantizedModule) -> Int4Weight | Tensor:
        size, count = self.group(module)
        words = module.rows.units(self.codes)
        groups = _groups(module, size, count)
        codes = _awq_columns(module.take(".qweight", _WORDS, (module.columns, words)))
        zeros = _awq_columns(module.take(".qzeros", _WORDS, (groups, words)))
        scales = module.take_scales(".scales", (groups, module.rows), signed=True)
        return self.weight(module, codes.t(), scales.t(), zeros.t())


@dataclass(frozen=True, slots=True)
class Gptq(IntegerGroups):
    """`qweight` int32 [K / 8, N], `qzeros` [groups, N / 8], `scales` [groups, N], `g_idx` [K] (group of each column)."""

    less_one: bool
    """True if the stored zero points are 1 too low, as in the first version of the format."""
    name: ClassVar[str] = "GPTQ"
    codes_in: ClassVar[tuple[str, tuple[str, ...]]] = (".qweight", ())
    suffixes: ClassVar[tuple[str, ...]] = (".weight", ".qweight", ".qzeros", ".scales", ".g_idx")

    def read(self, module: QuantizedModule) -> Int4Weight | Tensor:
        size, count = self.group(module)
        group_of = _group_of(module, ".g_idx", size, count)
        groups = _groups(module, size, count) if group_of is None else Axis.all(count)
        words = module.columns.units(self.codes)
        codes = unpacked_words(module.take(".qweight", _WORDS, (words, module.rows)).t(), self.bits)
        zeros = module.take(".qzeros", _WORDS, (groups, module.rows.units(self.codes)))
        zeros = unpacked_words(zeros, self.bits)
        if self.less_one:
            zeros = (zeros + 1) & (2**self.bits - 1)  # AutoGPTQ, which wrote them, lets a zero of 0 wrap around
        scales = module.take_scales(".scales", (groups, module.rows), signed=True)
        return self.weight(module, codes, scales.t(), zeros.t(), group_of)


@dataclass(frozen=True, slots=True)
class PackQuantized(IntegerGroups):
    """`weight_packed` int32 [N, K / 8], `weight_scale` [N, groups], `weight_zero_point` [N / 8, groups], `weight_g_idx`."""

    symmetric: bool
    name: ClassVar[str] = "pack-quantized"
    codes_in: ClassVar[tuple[str, tuple[str, ...]]] = (".weight_packed", _WORDS)
    suffixes: ClassVar[tuple[str, ...]] = (
        *(".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
        ".input_scale",
    )

    def read(self, module: QuantizedModule) -> Int4Weight | Tensor:
        size, count = self.group(module)
        group_of = _group_of(module, ".weight_g_idx", size, count)
        groups = _groups(module, size, count) if group_of is None else Axis.all(count)
        words = module.columns.units(self.codes)
        codes = unpacked_words(module.take(".weight_packed", _WORDS, (module.rows, words)), self.bits)
        scales = module.take_scales(".weight_scale", (module.rows, groups), signed=True)
        zeros = None
        if not self.symmetric or module.elements(".weight_zero_point"):
            held = module.rows.units(self.codes)
            columns = module.take(".weight_zero_point", _WORDS, (held, groups)).t()
            zeros = unpacked_words(columns, self.bits).t()[: module.rows.size]
        return self.weight(module, codes[:, : module.columns.size], scales, zeros, group_of)


def unpacked_words(words: Tensor, bits: int) -> Tensor:
    """Unpack the integers of 32-bit words, lowest bits first. words: int32 [R, C]. Returns uint8 [R, C * 32 / bits]."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)


def _awq_columns(words: Tensor) -> Tensor:
    """Return the values of AWQ's words in the order of the columns."""
    octets = unpacked_words(words, 4)
    codes = octets.view(len(octets), -1, 8)
    return codes[:, :, torch.tensor(_AWQ_PLACES, device=codes.device)].flatten(1)


def _groups(module: QuantizedModule, size: int, count: int) -> Axis:
    """Return the axis of this rank's column groups; a row with a single group may be sharded anywhere."""
    return Axis.all(1) if count == 1 else module.columns.units(size)


def _group_of(module: QuantizedModule, suffix: str, size: int, count: int) -> Tensor | None:
    """Return the group of each column of this rank's shard; None if groups are consecutive columns or none are stored.

    :raises ModelError: if a group index is out of range.
    """
    if not module.elements(suffix):
        return None
    whole = module.take(suffix, _INDICES, (module.columns.whole,)).long()
    counted = torch.arange(len(whole), device=whole.device) // size
    if torch.equal(whole, counted) or bool((whole == -1).any()):  # -1: compressed-tensors' word for "not ordered"
        return None
    low, high = int(whole.min()), int(whole.max())
    if low < 0 or high >= count:
        raise module.error(suffix, f"needs groups from 0 to {count - 1}", f"{low} to {high}")
    return torch.cat([whole[each.start : each.stop] for each in module.columns.held])


@dataclass(frozen=True, slots=True)
class FormatRule:
    """A storage format and the modules that it applies to."""

    targets: tuple[str, ...]
    """Module names, patterns that begin with `re:`, or classes such as Linear. A class or an empty tuple means all modules."""
    format: StoredFormat

    def names(self, module: str) -> bool:
        """Return whether a name or pattern in `targets` matches the module. Such a rule takes precedence over general rules."""
        return any(_matches(target, module) for target in self.targets)

    @property
    def is_general(self) -> bool:
        """True if the rule applies to all modules."""
        return not self.targets or any("." not in target and not target.startswith("re:") for target in self.targets)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Storage formats of a checkpoint's quantized weights."""

    place: str
    """Description of the file or key that states the quantization, for messages."""
    rules: tuple[FormatRule, ...]
    method: str = ""
    """Name of the quantization method, a key of METHODS."""
    extra_folder: str | None = None
    """Subfolder of the model's folder with additional quantized weights; None if no such folder exists."""

    @property
    def label(self) -> str:
        """Names of the storage formats, for log lines and error messages."""
        return ", ".join(dict.fromkeys(rule.format.label for rule in self.rules))

    def format_of(self, module: QuantizedModule) -> StoredFormat | None:
        """Return the format of a module's weight, or None if it is a plain tensor."""
        found = [rule for rule in self.rules if rule.format.holds(module)]
        if len(found) > 1:  # several formats have the same tensors
            found.sort(key=lambda rule: (not rule.names(module.name), not rule.is_general))
        return found[0].format if found else None


def _matches(target: str, module: str) -> bool:
    """Return whether a compressed-tensors target matches a module. Patterns are matched from the beginning of the name."""
    if not target.startswith("re:"):
        return module == target
    try:
        return re.match(target[3:], module) is not None
    except re.error:
        return False
