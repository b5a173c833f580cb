"""Rules from tensors of a .gguf file to those of a checkpoint, and what undoes the layouts of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


def as_it_is(tensor: Tensor) -> Tensor:
    """No change."""
    return tensor


@dataclass(frozen=True)
class Rule:
    """One kind of tensor, below a layer. Applies to the layers whose sources the file has."""

    sources: tuple[str, ...]
    """Names in the file, below `blk.N.`."""
    target: str
    """Name in the checkpoint, below the layer. `{}` is an expert's number: what is made has all experts along its first axis."""
    make: Callable[..., Tensor] = as_it_is
    """The checkpoint's tensor of the sources'."""


def renamed(names: dict[str, str], make: Callable[..., Tensor] = as_it_is, kinds: Sequence[str] = ("weight",)) -> list[Rule]:
    """One rule for each name. kinds: `weight`, `bias` or both; a bias that the file lacks is no error here."""
    return [Rule((f"{source}.{kind}",), f"{target}.{kind}", make) for source, target in names.items() for kind in kinds]


def attention(target: str = "self_attn", out: str = "o_proj", make: Callable[..., Tensor] = as_it_is) -> list[Rule]:
    """Products of attention, with their biases where there are any."""
    parts = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": out}
    return renamed({source: f"{target}.{name}" for source, name in parts.items()}, make, ("weight", "bias"))


def experts(gate: str, up: str, down: str) -> list[Rule]:
    """Routed experts, gate and up apart or as one (`ffn_gate_up_exps`)."""
    single = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return [
        *renamed({source: target for source, target in single.items() if target}),
        *(
            Rule(("ffn_gate_up_exps.weight",), f"{target}.weight", partial(half, place))
            for place, target in enumerate((gate, up))
        ),
    ]


def half(place: int, gate_up: Tensor) -> Tensor:
    """Gate (0) or up (1) of all experts, [experts, 2 * rows, columns]."""
    return gate_up.chunk(2, dim=1)[place]


def stacked(*tensors: Tensor) -> Tensor:
    """The rows of one below those of the other, of all experts where the tensors have an axis of these."""
    return torch.cat(tensors, dim=tensors[0].dim() - 2)


def convolution(kernel: Tensor) -> Tensor:
    """[channels, 1, width]; the file has them without the middle axis, or with further ones."""
    return kernel.reshape(-1, 1, kernel.shape[-1])


def flat(tensor: Tensor) -> Tensor:
    """One axis: of numbers for each head, and of norms, which the file has by group."""
    return tensor.reshape(-1)


def log_of_decay(a: Tensor) -> Tensor:
    """A_log of the -exp(A_log) that the file has."""
    return torch.log(-a)


def flat_log_of_decay(a: Tensor) -> Tensor:
    """The same for one number for each head."""
    return flat(log_of_decay(a))


def without_one(norm: Tensor) -> Tensor:
    """A norm's weight that is added to 1, of the sum that the file has."""
    return norm - 1


def from_pairs(num_heads: int, rows: Tensor) -> Tensor:
    """Heads whose halves rotate against one another, of heads whose neighbours do (Llama's layout in llama.cpp)."""
    dim = rows.shape[0] // num_heads
    return rows.reshape(num_heads, dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def by_key_head(num_key_heads: int, key_dim: int, qkv: Tensor, z: Tensor) -> Tensor:
    """All sections' rows of the first key head, then those of the second (Qwen3-Next), of rows by section."""
    keys, columns = num_key_heads * key_dim, qkv.shape[-1]
    sections = [*torch.split(qkv, [keys, keys, qkv.shape[0] - 2 * keys]), z]
    return torch.cat([rows.reshape(num_key_heads, -1, columns) for rows in sections], dim=1).reshape(-1, columns)


def grouped(num_key_heads: int, head_rows: int, start: int, tiled: Tensor) -> Tensor:
    """Value heads by key head, of heads in turn: the first of each key head, then the second of each (Qwen3.5).
    head_rows: rows of a value head; start: the first of them, behind queries and keys."""
    head, tail = tiled[:start], tiled[start:]
    shape = (-1, num_key_heads, head_rows, *tiled.shape[1:])
    return torch.cat([head, tail.reshape(shape).transpose(0, 1).reshape(tail.shape)])


def grouped_columns(num_key_heads: int, head_columns: int, tiled: Tensor) -> Tensor:
    """The same for the product of what the value heads return."""
    return grouped(num_key_heads, head_columns, 0, tiled.T).T.contiguous()


def latent_up(k_b: Tensor, v_b: Tensor) -> Tensor:
    """The product from the latent to keys and values of all heads. k_b: [heads, rank, dim], v_b: [heads, dim, rank]."""
    return torch.cat([k_b.transpose(1, 2), v_b], dim=1).reshape(-1, v_b.shape[-1])
