"""Access to the tensors in a folder of safetensors files: names, dtypes, shapes, data, and a record of unread tensors."""

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
"""dtypes of unquantized weights; integers and FP8 are quantized values, which are meaningless without their scales."""
NEEDED = "float32, bfloat16 or float16"
"""List of the accepted dtypes, for error messages."""
INDEX = "model.safetensors.index.json"
"""Name of the index file, which maps each tensor of a checkpoint to a safetensors file."""
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
"""torch's dtype names, keyed by safetensors' names."""


class TensorFiles:
    """Tensors in a folder, copied one by one from the memory-mapped file to the device, without an additional copy in host
    memory."""

    def __init__(
        self, folder: Path, device: torch.device, aliases: tuple[tuple[str, str], ...] = (), extra_folder: str | None = None
    ) -> None:
        """aliases: pairs of a substring of a name and its replacement, tried if the checkpoint has no tensor of that name.

        extra_folder: subfolder whose files are also read; None means no subfolder.

        :raises ModelError: if the folder has no safetensors file, a file is missing or truncated, the index does not match the
        files, or two files without an index have a tensor of the same name.
        """
        self.folder = folder
        self.device = device
        self._aliases = aliases
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path, listed in [*_files(folder).items(), *({} if extra_folder is None else _files(folder / extra_folder)).items()]:
            self._add(path, listed)
        self._left = set(self._file_of)

    def _add(self, path: Path, listed: Sequence[str] | None) -> None:
        """Open one file. listed: the tensors that the index assigns to it; None means all, if the folder has no index."""
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
        """Return a tensor's name in the checkpoint: checkpoints without an output head omit the outer prefix (`transformer.`)."""
        others = [name.replace(part, other, 1) for part, other in self._aliases if part in name]
        return next((known for known in (name, name.partition(".")[2], *others) if known in self._file_of), name)

    def file_of(self, name: str) -> str:
        """Return the name of the file that contains a tensor, for messages."""
        return self._path_of[self._stored(name)].name

    def elements(self, name: str) -> str:
        """Return torch's name of a tensor's dtype, such as float8_e4m3fn; "" if no such tensor exists."""
        stored = self._stored(name)
        kind = str(self._file_of[stored].get_slice(stored).get_dtype()) if stored in self._file_of else ""
        return _ELEMENTS.get(kind, kind)

    def has_any(self, suffix: str) -> bool:
        """Return whether the name of any tensor ends with the suffix."""
        return any(name.endswith(suffix) for name in self._file_of)

    def shape(self, name: str) -> list[int]:
        """Return the unsharded shape of a tensor. The tensor must exist."""
        stored = self._stored(name)
        shape: list[int] = self._file_of[stored].get_slice(stored).get_shape()
        return shape

    def use(self, name: str) -> None:
        """Mark a tensor as read if it exists."""
        self._left.discard(self._stored(name))

    def read(self, name: str, axes: tuple[Axis, ...]) -> Tensor:
        """Read one tensor onto the device in its stored dtype; only this rank's shard if the tensor is sharded.

        :raises ModelError: if the tensor is missing, or its shape differs from the axes.
        """
        self.check(name, axes)
        stored = self._found(name)
        file = self._file_of[stored]
        whole = all(axis.is_whole for axis in axes)
        tensor: Tensor = file.get_tensor(stored) if whole else _sliced(file.get_slice(stored), axes)
        return tensor

    def check(self, name: str, axes: tuple[Axis, ...]) -> None:
        """Check a tensor's shape in the file header against `axes`, before anything is read or allocated.

        :raises ModelError: if the tensor is missing, or its shape differs from the axes.
        """
        self._found(name)
        shape, whole = self.shape(name), list(whole_sizes(axes))
        if shape != whole:
            raise ModelError(f"weights: {name} needs shape {whole} by config.json, got {shape}")

    def read_number(self, name: str) -> float:
        """Return the value of a one-element tensor of any shape. :raises ModelError: if the tensor is missing or has more
        elements."""
        stored = self._found(name)
        tensor: Tensor = self._file_of[stored].get_tensor(stored)
        if tensor.numel() != 1:
            raise ModelError(f"weights: {name} needs one element, got shape {list(tensor.shape)}")
        return float(tensor)

    def _found(self, name: str) -> str:
        """Return a tensor's name in the checkpoint, and mark the tensor as read."""
        stored = self._stored(name)
        if stored not in self._file_of:
            raise ModelError(f"weights: {self.folder} has no tensor {name!r}, which its config.json implies")
        self._left.discard(stored)
        return stored

    @property
    def left(self) -> list[str]:
        """Sorted names of the tensors that have not been read."""
        return sorted(self._left)

    def slices(self) -> dict[str, Any]:
        """Return safetensors' slice objects, keyed by tensor name."""
        return {name: file.get_slice(name) for name, file in self._file_of.items()}

    def is_zero(self, name: str) -> bool:
        """Return whether all elements of a tensor are 0, without marking the tensor as read. The tensor must exist."""
        return not bool(self._file_of[name].get_tensor(name).any())

    def close(self) -> None:
        """Release the files; nothing can be read afterwards."""
        self._file_of.clear()


def _sliced(stored: Any, axes: tuple[Axis, ...]) -> Tensor:
    """Read a rank's shard of a tensor in a file. stored: safetensors' slice object, which reads only the indexed elements."""
    several = next((place for place, axis in enumerate(axes) if len(axis.held) > 1), None)
    if several is None:
        ranges = [axis.held[0] if axis.held else range(0) for axis in axes]
        part: Tensor = stored[tuple(slice(each.start, each.stop) for each in ranges)]
        return part
    before, axis, after = axes[:several], axes[several], axes[several + 1 :]
    pieces = [_sliced(stored, (*before, Axis(axis.whole, (each,)), *after)) for each in axis.held]
    return torch.cat(pieces, dim=several)


def plain_slices(folder: Path) -> dict[str, Any]:
    """Return safetensors' slice objects, keyed by tensor name, for a checkpoint that another library loads; no data is read.

    :raises ModelError: as for `TensorFiles`, or if a tensor is quantized.
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
    if not path.is_file():  # opening a pipe would block
        raise ModelError(f"weights: {path} cannot be read: it is no file")
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"weights: {path} cannot be read ({error}); it is truncated or not a safetensors file, fetch it again"
        ) from error


def _files(folder: Path) -> dict[Path, Sequence[str] | None]:
    """Return a folder's safetensors files, each with the tensor names that the index assigns to it; None without an index."""
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
    """Return the tensor names that an index assigns to each file, keyed by file name.

    :raises ModelError: if the file is not an index, or names a file outside its folder.
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
    """Return whether a file name points outside the folder and its subfolders."""
    return Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name or not is_unicode(name)


def _check_shards(folder: Path, files: list[Path]) -> None:
    """Check that no file is missing from a set of files named as shards, if the model has no index."""
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
