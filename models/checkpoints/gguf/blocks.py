"""Quantized blocks of a .gguf file, stored in addition to the dequantized weights, for CPU kernels that read the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.kernels.linear.forms import BLOCK_TYPES, GgufWeight
from headway.models.checkpoints.formats.stored import FormatRule, Quantization, QuantizedModule, StoredFormat

PREFIX = ".gguf_"
"""Separator between a module's name and a block type in the name of a tensor of blocks."""


@dataclass(frozen=True, slots=True)
class GgufBlocks(StoredFormat):
    """Format of a uint8 tensor [N, blocks, num_bytes] with GGUF blocks, stored in addition to the dequantized weight."""

    suffixes: ClassVar[tuple[str, ...]] = (".weight", *(PREFIX + name for name in BLOCK_TYPES))

    @property
    def label(self) -> str:
        return "GGUF blocks"

    def holds(self, module: QuantizedModule) -> bool:
        return any(module.elements(PREFIX + name) for name in BLOCK_TYPES)

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        return 1, BLOCK_TYPES[self._type(module)].columns

    def read(self, module: QuantizedModule) -> GgufWeight:
        name = self._type(module)
        kind = BLOCK_TYPES[name]
        shape = module.rows, module.columns.units(kind.columns), kind.num_bytes
        blocks = module.take(PREFIX + name, ("uint8",), shape)
        return GgufWeight((name,), (blocks,))

    def _type(self, module: QuantizedModule) -> str:
        return next(name for name in BLOCK_TYPES if module.elements(PREFIX + name))


FOLDER = "gguf_blocks"
"""Folder of the blocks inside the converted model's folder, where transformers does not look."""


def write_blocks(path: Path, folder: Path) -> None:
    """Save the blocks of the .gguf tensors whose dequantized weights are in the converted folder, in the same row order.

    llama.cpp permutes the rows of q and k; the blocks are saved in the row order of the dequantized weight.
    """
    from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        return
    names = get_tensor_name_map(known[architecture], int(reader.fields[f"{architecture}.block_count"].contents()))
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.tensor_type.name in BLOCK_TYPES}
    found: dict[str, Tensor] = {}
    for module, plain in _plain_weights(folder):
        stored = tensors.get(f"{names.get_name(module)}.weight")
        blocks = None if stored is None else _blocks_of(stored, plain, reader, architecture)
        if stored is not None and blocks is not None:
            found[f"{module}{PREFIX}{stored.tensor_type.name}"] = blocks
    if found:
        (folder / FOLDER).mkdir()
        save_file(found, folder / FOLDER / "model.safetensors")


def _plain_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors file is not a mapping)
                if name.endswith(".weight") and len(file.get_slice(name).get_shape()) == 2:
                    yield name.removesuffix(".weight"), file.get_tensor(name)


def _blocks_of(stored: Any, plain: Tensor, reader: Any, architecture: str) -> Tensor | None:
    """Return a tensor's blocks in the row order of the plain weight; None if no known order gives the same values."""
    kind = BLOCK_TYPES[stored.tensor_type.name]
    blocks = torch.from_numpy(numpy.array(stored.data)).view(len(plain), -1, kind.num_bytes)
    weight = GgufWeight((stored.tensor_type.name,), (blocks,)).dequantized(torch.float32)
    if weight.shape != plain.shape:
        return None
    for order in _orders(len(plain), reader, architecture):
        if torch.equal(weight[order], plain):
            return blocks[order].contiguous()
    return None


def _orders(rows: int, reader: Any, architecture: str) -> Iterator[Tensor]:
    """Yield the candidate orders in which to read a weight's rows: unchanged, and with the interleaved halves of each head
    separated."""
    yield torch.arange(rows)
    for key in ("head_count", "head_count_kv"):
        field = reader.fields.get(f"{architecture}.attention.{key}")
        heads = None if field is None else field.contents()
        if isinstance(heads, int) and heads > 0 and rows % (2 * heads) == 0:
            yield torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def stored_blocks(folder: Path) -> Quantization | None:
    """Return the quantization for the GGUF blocks of a converted model; None if it has no blocks."""
    if not (folder / FOLDER).is_dir():
        return None
    return Quantization("its .gguf file", (FormatRule((), GgufBlocks()),), extra_folder=FOLDER)
