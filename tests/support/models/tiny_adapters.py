"""Random adapter (LoRA) folders for tiny models, as peft writes them; and adapter slots for one linear layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from headway.core.contract.adapters import AdapterSlots
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.linear import Linear, ProductOrigin
from headway.kernels.lora.bank import AdaptedProduct, AdapterBank
from headway.kernels.lora.operations import RANK_MULTIPLE

OPTIONS: dict[str, Any] = {
    "kv_cache_memory": "8MiB",
    "num_threads": 1,
    "block_size": 16,
    "autotune_budget": 0,
    "enable_lora": True,
    "max_lora_rank": 8,
}
"""Options of an engine of a tiny model."""
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def sizes_of(config: Any) -> dict[str, tuple[int, int]]:
    """Rows and columns of the linear layers of a Llama layer, by the end of the module's name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def adapter_tensors(
    config: Any, rank: int, targets: Sequence[str] = LLAMA, seed: int = 0, size: float = 0.3
) -> dict[str, Tensor]:
    """The tensors of an adapter for every layer of a Llama, by the names that peft gives them."""
    draw, sizes, tensors = torch.Generator().manual_seed(seed), sizes_of(config), {}
    for layer in range(config.num_hidden_layers):
        for target in targets:
            room = "self_attn" if target in LLAMA[:4] else "mlp"
            rows, columns = sizes[target]
            name = f"base_model.model.model.layers.{layer}.{room}.{target}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=draw) * size
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=draw) * size
    return tensors


def save_adapter(
    folder: Path,
    model: Path,
    rank: int = 4,
    targets: Sequence[str] = LLAMA,
    seed: int = 0,
    tensors: dict[str, Tensor] | None = None,
    **options: Any,
) -> Path:
    """Save an adapter for a tiny Llama. options: entries of adapter_config.json. tensors: replacements for random ones."""
    from transformers import AutoConfig

    folder.mkdir(parents=True, exist_ok=True)
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*targets], "bias": "none", **options}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    made = adapter_tensors(AutoConfig.from_pretrained(model), rank, targets, seed) if tensors is None else tensors
    save_file(made, folder / "adapter_model.safetensors")
    return folder


def made_bank(
    modules: dict[str, int], columns: int, slots: int, rank: int, dtype: torch.dtype, device: str = "cpu", joins: bool = False
) -> tuple[AdapterBank, AdaptedProduct]:
    """An adapter bank for one linear layer, with random adapters in all slots."""
    origin = ProductOrigin({name: Axis.all(rows) for name, rows in modules.items()}, Axis.all(columns), None, 1.0)
    linear = Linear(torch.zeros(sum(modules.values()), columns, dtype=dtype, device=device), origin=origin)
    bank = AdapterBank([linear], AdapterSlots(slots, rank), dtype, RANK_MULTIPLE, joins)
    product = bank.products[linear]
    product.a.normal_(generator=torch.Generator(device).manual_seed(1))
    product.b.normal_(generator=torch.Generator(device).manual_seed(2))
    return bank, product


def exact(y: Tensor, x: Tensor, product: AdaptedProduct, slots: Tensor) -> Tensor:
    """Row by row in float64."""
    y = y.double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for start, end, module in product.parts:
                a = product.a[slot, module * product.rank : (module + 1) * product.rank].double()
                y[row, start:end] += product.b[slot, start:end].double() @ (a @ x[row].double())
    return y
