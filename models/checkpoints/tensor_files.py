"""The tensors of a folder of safetensors files, as they are stored: which are there, of which elements, and which nobody read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import is_unicode, shown
from headway.kernels.linear.axes import Axis, whole_sizes

PLAIN = ("float64", "float32", "bfloat16", "float16")
"""Elements that are the weights themselves; integers and float8 are quantised ones, which mean nothing without their scales."""
NEEDED = "float32, bfloat16 or float16"
"""What elements should be, for messages."""
INDEX = "model.safetensors.index.json"
"""Name of the file that gives each tensor of a checkpoint to one of its files."""
_SINGLE = "model.safetensors"
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

        :raises ModelError: no safetensors file in the folder, one that is missing or truncated, an index that does not fit the
            files, or two files with a tensor of one name and no index that chooses between them.
        """
        self.folder = folder
        self.device = device
        self._aliases = aliases
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path, listed in [*_files(folder).items(), *({} if beside is None else _files(folder / beside)).items()]:
            self._add(path, listed)
        self._left = set(self._file_of)

    def _add(self, path: Path, listed: Sequence[str] | None) -> None:
        """Open one file. listed: the tensors that the index gives to it; None if there is no index, and all of them count."""
        file = _open(path, self.device)
        stored = set(file.keys())
        for name in stored if listed is None else listed:
            if name not in stored:
                raise ModelError(f"weights: {path} lacks {shown(name)}, which {INDEX} gives to it; fetch the model again")
            if name in self._file_of:
                raise ModelError(
                    f"weights: {shown(name)} needs one file, got {self._path_of[name]} and {path.name}, and no {INDEX} chooses "
                    "between them; remove the file that does not belong to the model"
                )
            self._file_of[name], self._path_of[name] = file, path

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

    def has_any(self, suffix: str) -> bool:
        """Return whether the name of some tensor ends so."""
        return any(name.endswith(suffix) for name in self._file_of)

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
        self.check(name, axes)
        stored = self._found(name)
        file = self._file_of[stored]
        whole = all(axis.is_whole for axis in axes)
        tensor: Tensor = file.get_tensor(stored) if whole else _sliced(file.get_slice(stored), axes)
        return tensor

    def check(self, name: str, axes: tuple[Axis, ...]) -> None:
        """Compare a tensor's header with the shape that the configuration implies, before anything is read or allocated.

        :raises ModelError: it is missing, or its shape is not that of the axes.
        """
        self._found(name)
        shape, whole = self.shape(name), list(whole_sizes(axes))
        if shape != whole:
            raise ModelError(f"weights: {name} needs shape {whole} by config.json, got {shape}")

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

    def slices(self) -> dict[str, Any]:
        """Return safetensors' slice of each tensor."""
        return {name: file.get_slice(name) for name, file in self._file_of.items()}

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


def plain_slices(folder: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint that something else will load, by name, as safetensors' slices: nothing is read yet.

    :raises ModelError: as `TensorFiles`, or a tensor is quantised.
    """
    files = TensorFiles(folder, torch.device("cpu"))
    for name in files.left:
        if (found := files.elements(name)) not in PLAIN:
            raise ModelError(
                f"weights: {name} needs {NEEDED} elements, got {found}: it is quantised, and transformers is given none such"
            )
    return files.slices()


def _open(path: Path, device: torch.device) -> Any:
    if not is_unicode(str(path)):
        raise ModelError(f"weights: {shown(str(path))} needs a name in UTF-8, got other bytes; rename it")
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


def _files(folder: Path) -> dict[Path, Sequence[str] | None]:
    """Return the files of a folder with the tensors that its index gives to each; None if no index says."""
    index, single = folder / INDEX, folder / _SINGLE
    if index.exists():
        listed = _indexed(index)
        if single.exists() and _SINGLE not in listed:
            raise ModelError(
                f"weights: {folder} needs one checkpoint, got two: {_SINGLE}, and the files that {INDEX} names; remove one"
            )
        return {folder / name: names for name, names in listed.items()}
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    _check_shards(folder, files)
    if not files:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
        why = f"; {pickles[0]} is a pickle, which may run code: Headway never opens one, convert it" if pickles else ""
        raise ModelError(f"weights: {folder} holds no .safetensors file{why}")
    return dict.fromkeys(files)


def _indexed(index: Path) -> dict[str, list[str]]:
    """Return the names of the tensors that an index gives to each file, by the file's name.

    :raises ModelError: it is no index, or names what is no file of its folder.
    """
    if not index.is_file():
        raise ModelError(f"weights: {index} cannot be read: it is no file")
    try:
        place_of = parse_json(read_text(index), index.name, dict, any_number=True).get("weight_map")
    except (OSError, ValueError) as error:
        raise ModelError(f"weights: {index} is not a safetensors index ({error})") from error
    if not isinstance(place_of, dict) or not place_of or not all(isinstance(name, str) for name in place_of.values()):
        need = "weight_map needs an object of tensors' names and their files' names"
        raise ModelError(f"weights: {index} is not a safetensors index ({need}, got {shown(place_of)})")
    listed: dict[str, list[str]] = {}
    for tensor, name in sorted(place_of.items(), key=lambda each: each[1]):
        if _leaves_folder(name):
            raise ModelError(f"weights: {index} needs names of files in its folder, got {shown(name)}")
        listed.setdefault(str(Path(name)), []).append(tensor)
    paths = {name: index.parent / name for name in listed}
    missing = [shown(name)[1:-1] for name, path in paths.items() if not os.path.exists(path)]
    if others := [name for name, path in paths.items() if os.path.exists(path) and not path.is_file()]:
        raise ModelError(f"weights: {index} names {shown(others[0])}, and it is no file")
    if missing:
        raise ModelError(f"weights: {index.parent} lacks {', '.join(missing)}, which {INDEX} names; fetch the model again")
    return listed


def _leaves_folder(name: str) -> bool:
    """Return whether a name is not that of a file in the folder, or below it."""
    return Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name or not is_unicode(name)


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
