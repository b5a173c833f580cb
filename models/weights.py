"""Safetensors checkpoints: each tensor is read once, checked, and taken; what is missing or left over is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.contract.errors import ModelError

IGNORED = ("rotary_emb.inv_freq",)
"""Suffixes of tensors that some checkpoints carry and that are computed instead."""

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

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Nothing more is taken; ignored: suffixes of what may be left."""


class Weights:
    """The tensors of a model folder, by checkpoint name, converted to one dtype and device as they are taken.

    Each goes from the mapped file to the device by itself: no copy of the checkpoint is made in host memory.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """:raises ModelError: no safetensors file in the folder, or one that is missing or truncated."""
        self.folder, self.dtype, self.device = folder, dtype, device
        self._file_of: dict[str, Any] = {}
        for path in _files(folder):
            file = _open(path, device)
            self._file_of.update(dict.fromkeys(file.keys(), file))
        self._left = set(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

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
        if name not in self._file_of:
            raise ModelError(f"weights: {self.folder} has no tensor {name!r}, which its config.json implies")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        _check_elements(name, tensor.dtype)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"weights: {name} needs shape {list(shape)} by config.json, got {list(tensor.shape)}")
        self._left.discard(name)
        return tensor

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Check that nothing was left over: a tensor nobody took means a model that computes something else.

        ignored: suffixes of tensors of which it does not.

        :raises ModelError: naming the first few.
        """
        left = sorted(name for name in self._left if not name.endswith(IGNORED + ignored))
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
        try:
            names = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"weights: {index} is not a safetensors index ({type(error).__name__}: {error})") from error
        missing = [path.name for path in names if not path.exists()]
        if missing:
            raise ModelError(f"weights: {folder} lacks {', '.join(missing)}, which {index.name} names; fetch the model again")
        return names
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
        why = f"; {pickles[0]} is a pickle, which may run code: Headway never opens one, convert it" if pickles else ""
        raise ModelError(f"weights: {folder} holds no .safetensors file{why}")
    return files
