"""Safetensors checkpoints: each tensor is read once, checked, and taken; what is missing or left over is an error."""

from __future__ import annotations

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

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor of this shape."""

    def take_merged(self, sizes: Mapping[str, int], *rest: int) -> Tensor:
        """Tensors of shape [size, *rest] as one, one after the other along the first axis."""

    def take_into(self, target: Tensor, name: str) -> None:
        """One tensor of the target's shape, converted to its dtype, into memory that is there already."""

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

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read one tensor.

        :raises ModelError: it is missing, or its shape is not the configuration's.
        """
        return self._read(name, shape).to(self.dtype)

    def take_merged(self, sizes: Mapping[str, int], *rest: int) -> Tensor:
        """Read tensors of shape [size, *rest] into one of all their rows, which is allocated once: no part lies twice.

        sizes: name -> rows.

        :raises ModelError: one is missing, or its shape is not the configuration's.
        """
        merged = torch.empty(sum(sizes.values()), *rest, dtype=self.dtype, device=self.device)
        row = 0
        for name, size in sizes.items():
            self.take_into(merged[row : row + size], name)
            row += size
        return merged

    def take_into(self, target: Tensor, name: str) -> None:
        """Read one tensor into a part of another that was allocated for several.

        :raises ModelError: it is missing, or its shape is not the target's.
        """
        target.copy_(self._read(name, tuple(target.shape)))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensor(name)
        _check_elements(name, tensor.dtype)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"weights: {name} needs shape {list(shape)} by config.json, got {list(tensor.shape)}")
        return tensor

    def _tensor(self, name: str) -> Tensor:
        stored = self._stored(name)
        if stored not in self._file_of:
            raise ModelError(f"weights: {self.folder} has no tensor {name!r}, which its config.json implies")
        self._left.discard(stored)
        tensor: Tensor = self._file_of[stored].get_tensor(stored)
        return tensor

    def take_number(self, name: str) -> float:
        """Read a tensor of one element, whatever its shape.

        :raises ModelError: it is missing, or has more elements.
        """
        tensor = self._tensor(name)
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

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw one tensor."""
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        is_norm = len(shape) == 1 and name.endswith(".weight")
        std = 1.0 if name in self._unit else STD
        return tensor.fill_(1) if is_norm else tensor.normal_(0, std, generator=self._generator)

    def take_merged(self, sizes: Mapping[str, int], *rest: int) -> Tensor:
        """Draw all rows at once."""
        return self.take(next(iter(sizes)), (sum(sizes.values()), *rest))

    def take_into(self, target: Tensor, name: str) -> None:
        """Draw one tensor in place."""
        target.copy_(self.take(name, tuple(target.shape)))

    def take_number(self, name: str) -> float:
        """No scale is drawn."""
        return 1.0

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Nothing can be left over."""
