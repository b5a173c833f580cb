"""Random blocks of .gguf types, and a tiny converted model that has them in addition to its plain weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from headway.kernels.linear.forms import BLOCK_TYPES, GgufWeight
from headway.models.checkpoints.gguf.blocks import FOLDER, PREFIX
from plain_models import sizes

SCALES_AT = {"Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}
"""Offsets of the float16 scales in a type's blocks; 0 for other types."""
CONFIG = LlamaConfig(**sizes(160, 256, 512, 3, max_position_embeddings=256, tie_word_embeddings=True))


def blocks_of(name: str, rows: int, columns: int, seed: int, scale: float = 0.1) -> Tensor:
    """Blocks of random codes. scale: deviation of the blocks' own scales."""
    kind, generator = BLOCK_TYPES[name], numpy.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, columns // kind.columns, kind.num_bytes), dtype=numpy.uint8)
    for at in SCALES_AT.get(name, (0,)):
        scales = generator.normal(0, scale, (*blocks.shape[:2], 1)).astype(numpy.float16)
        blocks[..., at : at + 2] = scales.view(numpy.uint8)
    return torch.from_numpy(blocks)


def save_block_model(folder: Path, types: Mapping[str, str], seed: int = 0) -> None:
    """Save a model of `CONFIG`, as if converted from a .gguf file.

    types: the block type by the last name of a linear layer (q_proj, down_proj, ...) or embed_tokens; others are plain.
    """
    shapes, dim = {"model.embed_tokens": (CONFIG.vocab_size, CONFIG.hidden_size)}, CONFIG.hidden_size
    for layer in range(CONFIG.num_hidden_layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj": (dim // 2 if name in "kv" else dim, dim) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj": (CONFIG.intermediate_size, dim) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj"] = (dim, CONFIG.intermediate_size)
    plain, blocks = {"model.norm.weight": torch.ones(dim)}, {}
    for number, (module, (rows, columns)) in enumerate(shapes.items()):
        name = types.get(module.rpartition(".")[2])
        if name is None:
            draw = torch.Generator().manual_seed(seed + number)
            plain[f"{module}.weight"] = torch.randn(rows, columns, generator=draw) / columns**0.5
            continue
        stored = blocks_of(name, rows, columns, seed + number)
        expanded = GgufWeight((name,), (stored,)).dequantized(torch.float32)
        # As large as weights are, by a power of two, which changes nothing in float16.
        power = float(torch.log2(1 / (columns**0.5 * expanded.std())).round())
        for at in SCALES_AT.get(name, (0,)):
            stored[..., at : at + 2] = (stored[..., at : at + 2].contiguous().view(torch.float16) * 2**power).view(torch.uint8)
        blocks[f"{module}{PREFIX}{name}"] = stored
        plain[f"{module}.weight"] = GgufWeight((name,), (stored,)).dequantized(torch.float32)
    for layer in range(CONFIG.num_hidden_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain[f"model.layers.{layer}.{norm}.weight"] = torch.ones(dim)
    CONFIG.save_pretrained(folder)
    save_file(plain, folder / "model.safetensors")
    (folder / FOLDER).mkdir()
    save_file(blocks, folder / FOLDER / "model.safetensors")
