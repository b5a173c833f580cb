"""Safetensors checkpoints: each tensor is read once, checked, and taken; what is missing or left over is an error."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.system.files import read_text
from headway.core.system.text import shown
from headway.models.axes import Axis, Shape, axes_of, held_part, held_sizes, whole_sizes

IGNORED = ("rotary_emb.inv_freq", ".q_scale", ".prob_scale")
"""Suffixes of tensors that some checkpoints carry and nobody needs: what is computed instead, scales of what is not quantised."""

STORED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Elements that are the weights themselves; integers and float8 are quantised ones, which mean nothing without their scales."""


class WeightSource(Protocol):
    """Where a decoder takes its tensors from, by checkpoint name."""

    dtype: torch.dtype
    device: torch.device

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint brings a tensor of its own by this name."""

    def take(self, name: str, shape: Shape) -> Tensor:
        """One tensor of this shape: of a rank, what it holds of the tensor's axes."""

    def take_merged(self, sizes: Mapping[str, int | Axis], *rest: int | Axis) -> Tensor:
        """Tensors of shape [size, *rest] as one, one after the other along the first axis."""

    def take_into(self, target: Tensor, name: str, shape: Shape | None = None) -> None:
        """One tensor, converted to the target's dtype, into memory that is there already.

        shape: None: the target's, which is the whole tensor's.
        """

    def take_number(self, name: str) -> float:
        """A tensor of one element, whatever its shape."""

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Nothing more is taken. ignored: suffixes of what may be left; modules: what names of such tensors begin with."""


class Weights:
    """The tensors of a model folder, by checkpoint name, converted to one dtype and device as they are taken.

    Each goes from the mapped file to the device by itself: no copy of the checkpoint is made in host memory.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, aliases: tuple[tuple[str, str], ...] = ()) -> None:
        """aliases: parts of names, and what stands in their place where the checkpoint has no tensor of the name.

        :raises ModelError: no safetensors file in the folder, or one that is missing or truncated.
        """
        self.folder, self.dtype, self.device, self._aliases = folder, dtype, device, aliases
        self._file_of: dict[str, Any] = {}
        for path in _files(folder):
            file = _open(path, device)
            self._file_of.update(dict.fromkeys(file.keys(), file))
        self._left = set(self._file_of)

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._file_of

    def _stored(self, name: str) -> str:
        """The checkpoint's own name: one of the model without its output head leaves out what names that (`transformer.`)."""
        others = [name.replace(part, other, 1) for part, other in self._aliases if part in name]
        return next((known for known in (name, name.partition(".")[2], *others) if known in self._file_of), name)

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
        merged = torch.empty(sum(axis.size for axis in rows), *held_sizes(rest), dtype=self.dtype, device=self.device)
        row = 0
        for name, axis in zip(sizes, rows, strict=True):
            self.take_into(merged[row : row + axis.size], name, (axis, *rest))
            row += axis.size
        return merged

    def take_into(self, target: Tensor, name: str, shape: Shape | None = None) -> None:
        """Read one tensor into a part of another that was allocated for several. shape: None: the target's.

        :raises ModelError: it is missing, or its shape is not that.
        """
        target.copy_(self._read(name, axes_of(target.shape if shape is None else shape)))

    def _read(self, name: str, axes: tuple[Axis, ...]) -> Tensor:
        stored = self._found(name)
        file, whole = self._file_of[stored], list(whole_sizes(axes))
        lazy = file.get_slice(stored)
        shape = lazy.get_shape()
        cut = shape == whole and not all(axis.is_whole for axis in axes)
        tensor: Tensor = _sliced(lazy, axes) if cut else file.get_tensor(stored)
        _check_elements(name, tensor.dtype)
        if shape != whole:
            raise ModelError(f"weights: {name} needs shape {whole} by config.json, got {shape}")
        return tensor

    def _found(self, name: str) -> str:
        """The checkpoint's own name of a tensor that is taken now."""
        stored = self._stored(name)
        if stored not in self._file_of:
            raise ModelError(f"weights: {self.folder} has no tensor {name!r}, which its config.json implies")
        self._left.discard(stored)
        return stored

    def take_number(self, name: str) -> float:
        """Read a tensor of one element, whatever its shape.

        :raises ModelError: it is missing, or has more elements.
        """
        stored = self._found(name)
        tensor: Tensor = self._file_of[stored].get_tensor(stored)
        if tensor.numel() != 1:
            raise ModelError(f"weights: {name} needs one element, got shape {list(tensor.shape)}")
        return float(tensor)

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Check that nothing was left over: a tensor nobody took means a model that computes something else.

        ignored: suffixes of tensors of which it does not; modules: what the names of such tensors begin with.

        :raises ModelError: naming the first few.
        """
        left = sorted(name for name in self._left if not name.endswith(IGNORED + ignored) and not name.startswith(modules))
        if left:
            raise ModelError(f"weights: {len(left)} tensors that this architecture does not use, first {', '.join(left[:3])}")
        self._file_of.clear()


def _sliced(stored: Any, axes: tuple[Axis, ...]) -> Tensor:
    """What a rank holds of a tensor in a file. stored: safetensors' slice, which reads what it is asked for alone."""
    several = next((place for place, axis in enumerate(axes) if len(axis.held) > 1), None)
    if several is None:
        ranges = [axis.held[0] if axis.held else range(0) for axis in axes]
        part: Tensor = stored[tuple(slice(each.start, each.stop) for each in ranges)]
        return part
    before, axis, after = axes[:several], axes[several], axes[several + 1 :]
    pieces = [_sliced(stored, (*before, Axis(axis.whole, (each,)), *after)) for each in axis.held]
    return torch.cat(pieces, dim=several)


def check_files(folder: Path) -> None:
    """Look at a checkpoint that something else will load: its files, and the element types of its tensors.

    :raises ModelError: a file is missing or truncated, or holds quantised weights.
    """
    for path in _files(folder):
        file = _open(path, torch.device("cpu"))
        for name in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
            _check_elements(name, file.get_slice(name)[:0].dtype)


def _open(path: Path, device: torch.device) -> Any:
    if not path.is_file():  # a pipe, say, would be waited for
        raise ModelError(f"weights: {path} cannot be read: it is no file")
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"weights: {path} cannot be read ({error}); it is truncated or not a safetensors file, fetch it again"
        ) from error


def _check_elements(name: str, dtype: torch.dtype) -> None:
    if dtype not in STORED_DTYPES:
        raise ModelError(
            f"weights: {name} needs float32, bfloat16 or float16 elements, got {str(dtype).removeprefix('torch.')}: the "
            "checkpoint is quantised; use the one that it was made from"
        )


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        if not index.is_file():
            raise ModelError(f"weights: {index} cannot be read: it is no file")
        try:
            listed = sorted(set(json.loads(read_text(index))["weight_map"].values()))
            outside = [name for name in listed if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ModelError(f"weights: {index} is not a safetensors index ({type(error).__name__}: {error})") from error
        if outside:
            raise ModelError(f"weights: {index} needs names of files in its folder, got {outside[0]!r}")
        names = [folder / name for name in listed]
        if others := [name for name, path in zip(listed, names, strict=True) if path.exists() and not path.is_file()]:
            raise ModelError(f"weights: {index} names {shown(others[0])}, and it is no file")
        missing = [path.name for path in names if not path.exists()]
        if missing:
            raise ModelError(f"weights: {folder} lacks {', '.join(missing)}, which {index.name} names; fetch the model again")
        return names
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    _check_shards(folder, files)
    if not files:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
        why = f"; {pickles[0]} is a pickle, which may run code: Headway never opens one, convert it" if pickles else ""
        raise ModelError(f"weights: {folder} holds no .safetensors file{why}")
    return files


def _check_shards(folder: Path, files: list[Path]) -> None:
    """Refuse shards without an index that are fewer than their names tell."""
    found = [match for path in files if (match := _SHARD.search(path.name))]
    for match in found:
        count = int(match["count"])
        names = [
            match.string.replace(match[0], f"-{number:0{len(match['number'])}}-of-{match['count']}")
            for number in range(1, count + 1)
        ]
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ModelError(f"weights: {folder} lacks {missing[0]}, which {match.string} says there is; fetch the model again")


_SHARD = re.compile(r"-(?P<number>\d+)-of-(?P<count>\d+)(?=\.safetensors$)")


STD = 0.02
"""Standard deviation of the weights, the usual `initializer_range`: logits stay finite in half precision."""


class DummyWeights:
    """A checkpoint that holds whatever is asked for: normal weights from a fixed seed, norms of one.

    Equal on every start on one kind of device, because tensors are drawn in the order in which they are taken.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0, unit: Container[str] = ()) -> None:
        """unit: names of tensors that are drawn with a standard deviation of 1, such as the embedding of a mixture of experts:

        so what a token is stays the larger part of the residual stream, and a random router tells tokens apart.
        """
        self.dtype, self.device = dtype, device
        self._unit = unit
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return False  # nothing beyond what the configuration implies, so tied embeddings stay tied

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw one whole tensor."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        is_norm = len(shape) == 1 and name.endswith(".weight")
        std = 1.0 if name in self._unit else STD
        return tensor.fill_(1) if is_norm else tensor.normal_(0, std, generator=self._generator)

    def take(self, name: str, shape: Shape) -> Tensor:
        """Draw one tensor whole, so that all ranks draw alike, and cut it."""
        return held_part(self.draw(name, whole_sizes(shape)), shape)

    def take_merged(self, sizes: Mapping[str, int | Axis], *rest: int | Axis) -> Tensor:
        """Draw all rows at once."""
        rows = functools.reduce(Axis.__add__, map(Axis.of, sizes.values()))
        return self.take(next(iter(sizes)), (rows, *rest))

    def take_into(self, target: Tensor, name: str, shape: Shape | None = None) -> None:
        """Draw one tensor in place."""
        target.copy_(self.take(name, tuple(target.shape) if shape is None else shape))

    def take_number(self, name: str) -> float:
        """No scale is drawn."""
        return 1.0

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Nothing can be left over."""
