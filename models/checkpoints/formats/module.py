"""One quantised module of a checkpoint: its tensors, checked as they are read, cut for a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.kernels.linear.axes import Axis, axes_of
from headway.kernels.linear.forms import QuantizedWeight
from headway.models.checkpoints.formats.drawn import Octets
from headway.models.checkpoints.tensor_files import PLAIN, TensorFiles


class QuantizedModule:
    """The tensors of one module, by what their names add to its name, and the axes of the weight that they stand for."""

    def __init__(self, files: TensorFiles, name: str, axes: tuple[Axis, ...], dtype: torch.dtype) -> None:
        """name: without `.weight`; axes: out_features and in_features, or those of a tensor of experts; dtype: the model's."""
        self.name = name
        self.axes = axes
        self.dtype = dtype
        self.num_bytes = 0
        """What was read of it."""
        self._files = files

    @property
    def rows(self) -> Axis:
        """out_features."""
        return self.axes[0]

    @property
    def columns(self) -> Axis:
        """in_features."""
        return self.axes[1]

    def elements(self, suffix: str) -> str:
        """Return torch's name of a tensor's elements; "" where the module has no such tensor."""
        return self._files.elements(self.name + suffix)

    def suffix_of(self, suffixes: Sequence[str]) -> str:
        """Return the suffix of the tensor that the module has; else the one that other modules have, else the first."""
        found = [suffix for suffix in suffixes if self.elements(suffix)]
        return next(iter(found or [suffix for suffix in suffixes if self._files.has_any(suffix)] or suffixes))

    def shape(self, suffix: str) -> list[int]:
        """The shape of a tensor that is there, whole."""
        return self._files.shape(self.name + suffix)

    def use(self, suffixes: tuple[str, ...]) -> None:
        """Count tensors as read that belong to the module, whether or not its weight is made of them."""
        for suffix in suffixes:
            self._files.use(self.name + suffix)

    def take(self, suffix: str, elements: tuple[str, ...], *shape: int | Axis) -> Tensor:
        """Read one tensor.

        elements: what it may hold.

        :raises ModelError: it is missing, of other elements, or its shape is not that.
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

    def take_scales(self, suffix: str, *shape: int | Axis, signed: bool = False, elements: tuple[str, ...] = PLAIN) -> Tensor:
        """Read scales, as they are stored.

        signed: whether they may be below 0, as some makers of groups of integers write them.

        :raises ModelError: also for one that is 0 or no number, or below 0.
        """
        scales = self.take(suffix, elements, *shape)
        values = scales.float()
        wrong = ~torch.isfinite(values) | ((values == 0) if signed else (values <= 0))
        if bool(wrong.any()):
            value = float(values[wrong][0])
            raise self.error(suffix, "needs finite scales other than 0" if signed else "needs finite scales above 0", f"{value}")
        return scales

    def error(self, suffix: str, need: str, got: str) -> ModelError:
        """Make the error of a tensor, with its file."""
        name = self.name + suffix
        return ModelError(f"weights: {name} ({self._files.file_of(name)}) {need}, got {got}")

    def divided(self, size: int) -> int:
        """Count the groups of columns. size: columns of each.

        :raises ModelError: they do not divide in_features.
        """
        if self.columns.whole % size:
            raise ModelError(
                f"weights: {self.name} needs in_features of a multiple of group_size={size}, got {self.columns.whole}"
            )
        return self.columns.whole // size


class StoredFormat(Protocol):
    """How a format keeps the weight of a module."""

    suffixes: ClassVar[tuple[str, ...]]
    """What the names of the tensors add that a module of the format may have, activations' scales among them."""
    of_experts: ClassVar[bool]
    """Whether it keeps tensors of all experts of a layer alone, and leaves other products plain."""

    @property
    def label(self) -> str:
        """The format in words, for the log and for errors."""

    def holds(self, module: QuantizedModule) -> bool:
        """Whether the module's tensors are of this format, as far as their names and elements tell."""

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        """Elements of each axis that lie together and are read together: whatever a rank holds is widened to whole ones."""

    def read(self, module: QuantizedModule) -> QuantizedWeight | Tensor:
        """Read the module's weight: in the form that products read, or, where there is none, expanded to the model's dtype.

        :raises ModelError: a tensor is missing, of a wrong shape, or has impossible scales.
        """

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> QuantizedWeight | None:
        """Draw a random weight [rows, columns] of deviation `std` in the form that `read` gives; None where that is expanded.

        octets: draws the codes; dtype: the model's.
        """
