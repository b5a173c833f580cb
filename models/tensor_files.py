"""The tensors of a folder of safetensors files, as they are stored: which are there, of which elements, and which nobody read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown
from headway.models.axes import Axis, whole_sizes

PLAIN = ("float64", "float32", "bfloat16", "float16")
"""Elements that are the weights themselves; integers and float8 are quantised ones, which mean nothing without their scales."""
NEEDED = "float32, bfloat16 or float16"
"""What elements should be, for messages."""
_ELEMENTS = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""torch's names of the elements that a file of safetensors has."""


class TensorFiles:
    """Each tensor goes from the mapped file to the device by itself: no copy of the checkpoint is made in host memory."""

    def __init__(
        self, folder: Path, device: torch.device, aliases: tuple[tuple[str, str], ...] = (), beside: str | None = None
    ) -> None:
        """aliases: parts of names, and what stands in their place where the checkpoint has no tensor of the name.

        beside: a folder inside of the folder, whose files are read too.

        :raises ModelError: no safetensors file in the folder, or one that is missing or truncated.
        """
        self.folder, self.device, self._aliases = folder, device, aliases
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path in [*_files(folder), *([] if beside is None else _files(folder / beside))]:
            file = _open(path, device)
            self._file_of.update(dict.fromkeys(file.keys(), file))
            self._path_of.update(dict.fromkeys(file.keys(), path))
        self._left = set(self._file_of)

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._file_of

    def _stored(self, name: str) -> str:
        """The checkpoint's own name: one of the model without its output head leaves out what names that (`transformer.`)."""
        others = [name.replace(part, other, 1) for part, other in self._aliases if part in name]
        return next((known for known in (name, name.partition(".")[2], *others) if known in self._file_of), name)

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor, for messages."""
        return self._path_of[self._stored(name)].name

    def elements(self, name: str) -> str:
        """Return torch's name of a tensor's elements, such as float8_e4m3fn; "" where the tensor is not there."""
        stored = self._stored(name)
        return _elements(self._file_of[stored].get_slice(stored)) if stored in self._file_of else ""

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor that is there."""
        stored = self._stored(name)
        shape: list[int] = self._file_of[stored].get_slice(stored).get_shape()
        return shape

    def use(self, name: str) -> None:
        """Count a tensor as one that was read, if it is there."""
        self._left.discard(self._stored(name))

    def read(self, name: str, axes: tuple[Axis, ...]) -> Tensor:
        """Read one tensor as it is stored, on the device; of one whose axes are cut, nothing but the rank's part.

        :raises ModelError: it is missing, or its shape is not that of the axes.
        """
        stored = self._found(name)
        file, whole = self._file_of[stored], list(whole_sizes(axes))
        lazy = file.get_slice(stored)
        shape = lazy.get_shape()
        if shape != whole:
            raise ModelError(f"weights: {name} needs shape {whole} by config.json, got {shape}")
        tensor: Tensor = file.get_tensor(stored) if all(axis.is_whole for axis in axes) else _sliced(lazy, axes)
        return tensor

    def read_number(self, name: str) -> float:
        """Read a tensor of one element, whatever its shape.

        :raises ModelError: it is missing, or has more elements.
        """
        stored = self._found(name)
        tensor: Tensor = self._file_of[stored].get_tensor(stored)
        if tensor.numel() != 1:
            raise ModelError(f"weights: {name} needs one element, got shape {list(tensor.shape)}")
        return float(tensor)

    def _found(self, name: str) -> str:
        """The checkpoint's own name of a tensor that is read now."""
        stored = self._stored(name)
        if stored not in self._file_of:
            raise ModelError(f"weights: {self.folder} has no tensor {name!r}, which its config.json implies")
        self._left.discard(stored)
        return stored

    @property
    def left(self) -> list[str]:
        """The names of what nobody read."""
        return sorted(self._left)

    def is_zero(self, name: str) -> bool:
        """Whether all elements of a tensor that is there are 0. It does not count as read."""
        return not bool(self._file_of[name].get_tensor(name).any())

    def close(self) -> None:
        """Nothing more is read: let go of the files."""
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
            if (found := _elements(file.get_slice(name))) not in PLAIN:
                raise ModelError(
                    f"weights: {name} needs {NEEDED} elements, got {found}: it is quantised, and transformers is given none such"
                )


def _open(path: Path, device: torch.device) -> Any:
    if not path.is_file():  # a pipe, say, would be waited for
        raise ModelError(f"weights: {path} cannot be read: it is no file")
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"weights: {path} cannot be read ({error}); it is truncated or not a safetensors file, fetch it again"
        ) from error


def _elements(lazy: Any) -> str:
    kind = str(lazy.get_dtype())
    return _ELEMENTS.get(kind, kind)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        if not index.is_file():
            raise ModelError(f"weights: {index} cannot be read: it is no file")
        try:
            listed = sorted(set(parse_json(read_text(index), index.name, dict, any_number=True)["weight_map"].values()))
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
