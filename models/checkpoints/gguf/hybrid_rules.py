"""Rules that map .gguf tensors to checkpoint tensors, and functions that undo the layouts of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


def as_it_is(tensor: Tensor) -> Tensor:
    """Return the tensor unchanged."""
    return tensor


@dataclass(frozen=True)
class Rule:
    """Mapping of one kind of tensor in a layer. A rule applies to the layers whose source tensors are in the file."""

    sources: tuple[str, ...]
    """Tensor names in the file, after the `blk.N.` prefix."""
    target: str
    """Name in the checkpoint, after the layer's prefix. `{}` is the expert index; `make` then returns all experts."""
    make: Callable[..., Tensor] = as_it_is
    """Function that makes the checkpoint's tensor from the source tensors."""


def renamed(names: dict[str, str], make: Callable[..., Tensor] = as_it_is, kinds: Sequence[str] = ("weight",)) -> list[Rule]:
    """Return rules that rename tensors. names: file -> checkpoint. kinds: `weight`, `bias` or both; biases are optional."""
    return [Rule((f"{source}.{kind}",), f"{target}.{kind}", make) for source, target in names.items() for kind in kinds]


def attention(target: str = "self_attn", out: str = "o_proj", make: Callable[..., Tensor] = as_it_is) -> list[Rule]:
    """Return rules for the linear layers of attention, with optional biases."""
    parts = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": out}
    return renamed({source: f"{target}.{name}" for source, name in parts.items()}, make, ("weight", "bias"))


def experts(gate: str, up: str, down: str) -> list[Rule]:
    """Return rules for routed experts whose gate and up are two tensors or one tensor (`ffn_gate_up_exps`)."""
    single = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return [
        *renamed({source: target for source, target in single.items() if target}),
        *(
            Rule(("ffn_gate_up_exps.weight",), f"{target}.weight", partial(half, place))
            for place, target in enumerate((gate, up))
        ),
    ]


def half(place: int, gate_up: Tensor) -> Tensor:
    """Return the gate (place 0) or up (place 1) weights of all experts. gate_up: [experts, 2 * rows, columns]."""
    return gate_up.chunk(2, dim=1)[place]


def stacked(*tensors: Tensor) -> Tensor:
    """Concatenate tensors along the row axis; a leading expert axis is preserved."""
    return torch.cat(tensors, dim=tensors[0].dim() - 2)


def convolution(kernel: Tensor) -> Tensor:
    """Return a convolution's kernel as [channels, 1, width]. The file's tensor has fewer or more axes."""
    return kernel.reshape(-1, 1, kernel.shape[-1])


def flat(tensor: Tensor) -> Tensor:
    """Flatten a tensor of per-head values, or of norm weights that the file stores by group."""
    return tensor.reshape(-1)


def log_of_decay(a: Tensor) -> Tensor:
    """Return A_log from -exp(A_log), which the file stores."""
    return torch.log(-a)


def flat_log_of_decay(a: Tensor) -> Tensor:
    """Return A_log as one axis, from -exp(A_log), which the file stores per head."""
    return flat(log_of_decay(a))


def without_one(norm: Tensor) -> Tensor:
    """Return the norm's weight w from the file's 1 + w."""
    return norm - 1


def from_pairs(num_heads: int, rows: Tensor) -> Tensor:
    """Return rows in half-split RoPE order, from rows in interleaved RoPE order (llama.cpp's layout for Llama)."""
    dim = rows.shape[0] // num_heads
    return rows.reshape(num_heads, dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def by_key_head(num_key_heads: int, key_dim: int, qkv: Tensor, z: Tensor) -> Tensor:
    """Return the rows of q, k, v and z grouped by key head (Qwen3-Next), from rows grouped by section."""
    keys, columns = num_key_heads * key_dim, qkv.shape[-1]
    sections = [*torch.split(qkv, [keys, keys, qkv.shape[0] - 2 * keys]), z]
    return torch.cat([rows.reshape(num_key_heads, -1, columns) for rows in sections], dim=1).reshape(-1, columns)


def grouped(num_key_heads: int, head_rows: int, start: int, tiled: Tensor) -> Tensor:
    """Return value heads grouped by key head, from value heads interleaved over the key heads (Qwen3.5).

    head_rows: rows per value head. start: first row of the value heads, after queries and keys.
    """
    head, tail = tiled[:start], tiled[start:]
    shape = (-1, num_key_heads, head_rows, *tiled.shape[1:])
    return torch.cat([head, tail.reshape(shape).transpose(0, 1).reshape(tail.shape)])


def grouped_columns(num_key_heads: int, head_columns: int, tiled: Tensor) -> Tensor:
    """Apply `grouped` to the columns of the output projection."""
    return grouped(num_key_heads, head_columns, 0, tiled.T).T.contiguous()


def latent_up(k_b: Tensor, v_b: Tensor) -> Tensor:
    """Return the up-projection to keys and values of all heads. k_b: [heads, rank, dim]; v_b: [heads, dim, rank]."""
    return torch.cat([k_b.transpose(1, 2), v_b], dim=1).reshape(-1, v_b.shape[-1])
