"""What a .gguf file says of its model, and its tensors by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.system.text import shown


class Header:
    """A .gguf file: its keys, read as they are asked for, and its tensors, dequantised as they are asked for.

    :raises ModelError: it names no architecture.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        reader = GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self.general("general.architecture")
        if not isinstance(architecture, str):
            raise ModelError(f"model {path}: general.architecture needs a text, got {shown(architecture)}")
        self.architecture = architecture

    def general(self, key: str, default: Any = None) -> Any:
        """The value of a key by its full name."""
        return self._fields[key].contents() if key in self._fields else default

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture's."""
        return self.general(f"{self.architecture}.{key}", default)

    def keys_below(self, key: str) -> list[str]:
        """What stands behind `key.` in the names of all keys, by their full names."""
        return [name.removeprefix(f"{key}.") for name in self._fields if name.startswith(f"{key}.")]

    @property
    def sizes(self) -> dict[str, int]:
        """Whole numbers among the architecture's keys, by their full names."""
        values = {name: self.general(name) for name in self._fields if name.startswith(f"{self.architecture}.")}
        return {name: value for name, value in values.items() if type(value) is int}

    def size(self, key: str, default: int | None = None, least: int = 0) -> int:
        """A whole number; the largest, where a list has one for each layer (0: the layer has no such part).

        :raises ModelError: there is none, and no default.
        """
        value = self.get(key, default)
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            value = max(value)
        if type(value) is not int or value < least:
            need = f"a whole number of at least {least}" if least else "a whole number"
            raise self.refuse(f"{self.architecture}.{key}", need, "no such key" if value is None else shown(value))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """:raises ModelError: there is none, and no default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"{self.architecture}.{key}", "a number", "no such key" if value is None else shown(value))
        return float(value)

    def per_layer(self, key: str) -> list[int]:
        """A whole number for each layer; a single one counts for all.

        :raises ModelError: there is none, or there are too few.
        """
        value, layers = self.get(key), self.num_layers
        if type(value) is int:
            value = [value] * layers
        if not isinstance(value, list) or len(value) < layers or not all(type(item) is int for item in value):
            got = "no such key" if value is None else shown(value)
            raise self.refuse(f"{self.architecture}.{key}", f"a whole number for each of the {layers} layers", got)
        return value[:layers]

    @property
    def num_layers(self) -> int:
        """Layers of the model: without those that propose drafts, which come last.

        :raises ModelError: none, or more than the file has tensors.
        """
        count, most = self.size("block_count") - self.size("nextn_predict_layers", 0), len(self._tensors)
        if not 1 <= count <= most:
            raise self.refuse(f"{self.architecture}.block_count", f"1 to {most} layers (the file's tensors)", str(count))
        return count

    def refuse(self, what: str, need: str, got: str) -> ModelError:
        """An error about something that the file says."""
        return ModelError(f"model {self.path}: {what} needs {need}, got {got}")

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return self.stored(name) in self._tensors

    def has_in_a_layer(self, name: str) -> bool:
        """Whether some layer has a tensor of this name, below `blk.N.`."""
        return any(stored.endswith(f".{name}") for stored in self._tensors)

    def stored(self, name: str) -> str:
        """The file's own name of a tensor: some converters leave out `.weight` where a name ends in `norm`."""
        return name if name in self._tensors else name.removesuffix(".weight")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape as PyTorch has it: the axis that lies close in memory last."""
        return tuple(int(size) for size in reversed(self._tensors[self.stored(name)].shape))

    def tensor(self, name: str) -> Tensor:
        """One tensor in float32."""
        from gguf import dequantize

        stored = self._tensors[self.stored(name)]
        return (
            torch.from_numpy(dequantize(stored.data, stored.tensor_type)).to(torch.float32, copy=True).reshape(self.shape(name))
        )
