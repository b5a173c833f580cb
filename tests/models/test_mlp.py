"""A layer's MLP is one operation, which every way of computing a decoder has, with the bits of its two products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_logits import save_random
from headway.core.contract.adapters import AdapterSlots
from headway.core.contract.ranks import Ranks
from headway.models.layers.mlp import MLP
from headway.models.loader import load_model
from headway.models.lora.bank import AdapterInMemory
from headway.models.operations import TorchOperations
from headway.models.rope import rope_tables
from plain_models import ROWS
from thread_ranks import on_ranks

FAMILIES = {"llama": (True, "silu"), "gpt2": (False, "gelu_tanh")}
"""Whether the MLP is gated, and its activation."""
WAYS: dict[str, dict[str, Any]] = {
    "as a CPU computes it": {},
    "rows whose bits do not depend on others": {"batch_invariant": True},
    "slots for adapters": {"slots": AdapterSlots(2, 8)},
    "slots for adapters, rows whose bits do not depend on others": {"slots": AdapterSlots(2, 8), "batch_invariant": True},
}


class Counted:
    """Operations that count their MLPs."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.mlps = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add_mlp(self, *given: Any) -> Tensor:
        self.mlps += 1
        return self._inner.add_mlp(*given)


def check(family: str, decoder: Any) -> None:
    """An MLP of a decoder beside its two products, by the decoder's own operations."""
    (gated, activation), mlp, ops = FAMILIES[family], decoder.layers[1].mlp, decoder.operations
    assert isinstance(mlp, MLP)
    x, counted = torch.randn(5, decoder.config.hidden_size), Counted(ops)
    first = ops.norm_gated_product if gated else ops.norm_product
    expected = ops.add_product(x.clone(), first(x.clone(), mlp.norm, mlp.up_proj, activation), mlp.down_proj)
    assert torch.equal(mlp(x.clone(), counted), expected)
    assert counted.mlps == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_mlp_is_one_operation(family: str, way: str, tmp_path: Path) -> None:
    save_random(ROWS[family], tmp_path)
    with torch.inference_mode():
        decoder: Any = load_model(str(tmp_path), "float32", skip_tokenizer_init=True, **WAYS[way]).decoder
        check(family, decoder)
        if decoder.adapters is None:
            return
        for slot in range(2):
            decoder.adapters.put(slot, AdapterInMemory(b"", decoder.adapters.drawn(slot).flat * 8))
        plain = decoder.layers[1].mlp(torch.ones(5, decoder.config.hidden_size), decoder.operations)
        decoder.adapters.begin(torch.tensor([0, -1, 1, 1, 0], dtype=torch.int32))
        check(family, decoder)
        adapted = decoder.layers[1].mlp(torch.ones(5, decoder.config.hidden_size), decoder.operations)
        assert torch.allclose(adapted[1], plain[1], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(adapted[[0, 2]], plain[[0, 2]], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_alone(family: str, tmp_path: Path) -> None:
    save_random(ROWS[family], tmp_path)
    with torch.inference_mode():
        decoder: Any = load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder
        decoder.operations = TorchOperations(*rope_tables(decoder.config.ropes, torch.device("cpu")))
        check(family, decoder)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_sum_what_each_adds(family: str, tmp_path: Path) -> None:
    save_random(ROWS[family], tmp_path)
    x = torch.randn(5, ROWS[family].hidden_size)

    def added(ranks: Ranks) -> Tensor:
        decoder: Any = load_model(str(tmp_path), "float32", skip_tokenizer_init=True, ranks=ranks).decoder
        return decoder.layers[1].mlp(x.clone(), decoder.operations)

    (expected,) = on_ranks(1, added)
    for found in on_ranks(2, added):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_norm_behind_the_products_leaves_them_apart(tmp_path: Path) -> None:
    save_random(ROWS["gemma2"], tmp_path)
    with torch.inference_mode():
        decoder: Any = load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder
        mlp, counted = decoder.layers[1].mlp, Counted(decoder.operations)
        assert mlp.post_norm is not None
        mlp(torch.randn(5, decoder.config.hidden_size), counted)
        assert counted.mlps == 0
