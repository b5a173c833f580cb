"""Tests of models whose kernels read the blocks of .gguf files, compared with the same models dequantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.bench.generate.roofline import ElementBytes, Roofline
from headway.kernels.linear.forms import BLOCK_TYPES
from headway.kernels.runtime.native.library import functions, native_support
from headway.models.layers.decoder import Decoder
from headway.models.loader import LoadOptions, load_model

pytest.importorskip("gguf")
from gguf_block_models import save_block_model

PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens")
MIXED = dict(zip(PRODUCTS, ("Q4_K", "Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q8_0", "Q6_K", "Q8_0"), strict=True))
"""Types as a file of medium size has them: q, k and v of several, the head in 8 bits."""

pytestmark = pytest.mark.skipif(functions() is None, reason=f"our C is not built here: {native_support()}")


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    heads = [each.transpose(0, 1)[None] for each in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))]
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1)


def logits_of(decoder: Decoder, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return decoder.compute_logits(decoder(tokens, torch.arange(len(tokens)), causal)).double()


@pytest.mark.parametrize(
    "types", [*({"down_proj": name} for name in BLOCK_TYPES), MIXED], ids=lambda types: "-".join(types.values())
)
def test_logits_differ_from_the_expanded_models_by_rounding(types: dict[str, str], tmp_path: Path) -> None:
    """A rounding of x in groups of 32 is off by 2e-5 of x in 16 bits, by 0.4 to 0.8 % in 8; a model adds such errors up."""
    save_block_model(tmp_path, types, seed=7)
    kept, expanded = (
        load_model(str(tmp_path), "auto", skip_tokenizer_init=True, options=LoadOptions(keep_quantized=keep))
        for keep in (True, False)
    )
    down = [linear for linear, _ in kept.decoder.products if linear.in_features == 512]
    assert all(linear.reads_quantized and linear.expanded_bytes == 0 for linear in down)
    found = functions()
    bound = {0: 1e-5, 8: 0.03 if types is MIXED else 0.02, 16: 1e-4}[found.x_bits]
    for count in (1, 5, 40):
        tokens = torch.randint(160, (count,), generator=torch.Generator().manual_seed(count))
        own, exact = logits_of(kept.decoder, tokens), logits_of(expanded.decoder, tokens)
        error = float((own - exact).norm() / exact.norm())
        assert error < bound, error
        assert error > 0


def test_a_float32_that_is_named_rounds_nothing(tmp_path: Path) -> None:
    save_block_model(tmp_path, {"down_proj": "Q8_0"}, seed=8)
    named, expanded = (
        load_model(str(tmp_path), "float32", skip_tokenizer_init=True, options=LoadOptions(keep_quantized=keep))
        for keep in (True, False)
    )
    tokens, found = torch.arange(20), functions()
    own, exact = logits_of(named.decoder, tokens), logits_of(expanded.decoder, tokens)
    assert float((own - exact).norm() / exact.norm()) < 1e-5
    kept = [linear.reads_quantized and linear.in_features == 512 for linear, _ in named.decoder.products]
    assert named.rounding == ""
    by_itself = load_model(str(tmp_path), "auto", skip_tokenizer_init=True)
    assert by_itself.rounding.startswith(f".gguf blocks: activations rounded to {found.x_bits} bits" if found.x_bits else "")
    assert bool(by_itself.rounding) == bool(found.x_bits)
    assert found.x_bits or any(kept), "where nothing would be rounded the blocks stay as they are"


def test_blocks_that_rounding_on_loading_leaves_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_block_model(tmp_path, MIXED)
    load_model(str(tmp_path), "auto", skip_tokenizer_init=True)
    assert "not used" not in caplog.text
    load_model(str(tmp_path), "auto", skip_tokenizer_init=True, options=LoadOptions(quantization="fp8"))
    assert (
        "the blocks of the .gguf file are not used, because quantization=fp8 quantizes the dequantized weights again"
        in caplog.text
    )


def test_the_roofline_counts_the_bytes_that_are_held(tmp_path: Path) -> None:
    save_block_model(tmp_path, dict.fromkeys(PRODUCTS, "Q8_0"))
    decoder = load_model(str(tmp_path), "auto", skip_tokenizer_init=True).decoder
    held = ElementBytes.of(decoder)
    assert (held.products, held.head) == pytest.approx((34 / 32, 34 / 32))
    elements = sum(linear.in_features * linear.out_features for linear, _ in decoder.products) + 160 * 256
    assert Roofline(decoder.config, decoder.attention_specs, held=held).weight_bytes == pytest.approx(elements * 34 / 32)
    assert Roofline(decoder.config, decoder.attention_specs).weight_bytes == 4 * elements
