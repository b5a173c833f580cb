"""The fused operations on a GPU: each step against float64, whole decoders against the plain path, and in a CUDA graph."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from headway.kernels.linear.linear import Linear
from headway.kernels.step.operations import TorchOperations
from headway.models.checkpoints.weights import Weights
from headway.models.families.families import read_decoder_config
from headway.models.families.rope import rope_tables
from headway.models.layers.decoder import Decoder
from operation_inputs import Inputs, Sizes, ropes

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
STEPS = {
    "llama": Sizes(1, hidden=576, inner=1536, num_heads=9, num_kv_heads=3, head_dim=64),
    "qwen2": Sizes(1, hidden=896, inner=4864, num_heads=14, num_kv_heads=2, head_dim=64, bias=True),
    "qwen3": Sizes(1, hidden=1024, inner=3072, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True),
    "gemma3": Sizes(1, hidden=640, inner=2048, num_heads=4, head_dim=256, qk_norm=True, activation="gelu_tanh"),
    "gpt2": Sizes(
        1,
        768,
        3072,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        bias=True,
        layer_norm=True,
        rotated=False,
        learned_positions=True,
        activation="gelu",
    ),
    "olmo2": Sizes(1, 1024, 4096, num_heads=16, num_kv_heads=16, head_dim=64, qk_norm=True, whole_norm=True, activation="relu"),
}
SMALL = {
    "vocab_size": 211,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, head_dim=32),
    "llama, biased": LlamaConfig(**SMALL, head_dim=32, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=64),
    "gemma2": Gemma2Config(**SMALL, head_dim=32, sliding_window=4096),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=32, sliding_window=4096, sliding_window_pattern=2),
    "gpt2": GPT2Config(**{**SMALL, "n_inner": 320}),
    "granite": GraniteConfig(**SMALL, attention_multiplier=0.2, residual_multiplier=0.6, logits_scaling=2.5),
    "olmo2": Olmo2Config(**SMALL),
    "opt": OPTConfig(**{**SMALL, "ffn_dim": 320, "word_embed_proj_dim": 192, "init_std": 0.1}),
    "phi3, rotated in part": Phi3Config(
        **SMALL, pad_token_id=0, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "starcoder2": Starcoder2Config(**SMALL, sliding_window=4096),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16, 17, 64, 65, 128, 300])
@pytest.mark.parametrize("name", STEPS)
def test_every_step_is_right(name: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.kernels.step.fused import Fused

    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    sizes = dataclasses.replace(STEPS[name], rows=rows)
    inputs = Inputs(sizes, dtype)
    tables = ropes(sizes.head_dim)
    fused = dict(inputs.results(Fused(*(table.cuda() for table in tables)), dtype, "cuda"))
    for step, expected in inputs.results(TorchOperations(*tables), torch.float64, "cpu"):
        error = float((fused[step] - expected).norm() / expected.norm())
        assert error < TOLERANCE[dtype], (step, error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [9, 12, 16])
@pytest.mark.parametrize("shape", [(5120, 2880), (2880, 4096), (4096, 4096)], ids=str)
def test_tiles_whose_rows_are_the_weights(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    """With a bias, added to what is there; twice, since its counters must be zero again."""
    from headway.kernels.linear.tile_kernels import TiledProducts

    products = TiledProducts(torch.device("cuda"))
    linear = Linear(torch.randn(shape, device="cuda").to(dtype) * 0.02, torch.randn(shape[0], device="cuda").to(dtype))
    x, y = torch.randn(rows, shape[1], device="cuda").to(dtype), torch.randn(rows, shape[0], device="cuda").to(dtype)
    assert linear.bias is not None
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    assert products.takes(x, linear)
    for before in (y, torch.zeros_like(y)):
        found = products(x, linear, add_to=before.clone())
        assert float((found.double() - exact - before.double()).norm() / exact.norm()) < TOLERANCE[dtype]


def decoder(name: str, folder: Path, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return Decoder(read_decoder_config(CONFIGS[name]), Weights(folder, dtype, torch.device("cuda")))


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence without a cache."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 100])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_the_plain_path(
    tmp_path: Path, name: str, num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    ids = torch.randint(0, SMALL["vocab_size"], (num_tokens,), device="cuda")
    positions = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
    with torch.inference_mode():
        model = decoder(name, tmp_path, dtype)
        logits = model.compute_logits(model(ids, positions, causal))
        model.operations = TorchOperations(*rope_tables(model.config.ropes, torch.device("cuda")))
        expected = model.compute_logits(model(ids, positions, causal))
    assert logits.dtype == expected.dtype == dtype
    error = float((logits - expected).float().norm() / expected.float().norm())
    assert error < (1e-5 if dtype == torch.float32 else 3e-2), error


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 40])
def test_a_graph_gives_the_same_bits(tmp_path: Path, num_tokens: int) -> None:
    ids = torch.randint(0, SMALL["vocab_size"], (num_tokens,), device="cuda")
    positions = torch.arange(num_tokens, device="cuda")
    with torch.inference_mode():
        model = decoder("qwen3", tmp_path, torch.bfloat16)
        eager = model.compute_logits(model(ids, positions, causal))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model.compute_logits(model(ids, positions, causal), torch.empty_like(eager))
        for _ in range(3):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, eager)


@pytest.mark.parametrize(
    ("rows", "padded"), [(2, 8), (5, 8), (8, 8), (9, 16), (13, 16), (17, 64), (40, 64), (70, 128), (127, 128)]
)
def test_a_padded_batch_gives_the_same_bits(rows: int, padded: int) -> None:
    """A graph pads its batch: as long as both take the same kernel, a row must not know how many others there are."""
    from headway.kernels.step.fused import Fused

    ops = Fused(*(table.cuda() for table in ropes(128)))
    inputs = Inputs(dataclasses.replace(STEPS["qwen3"], rows=padded), torch.bfloat16)
    whole = dict(inputs.results(ops, torch.bfloat16, "cuda"))
    for step, part in inputs.first(rows).results(ops, torch.bfloat16, "cuda"):
        assert torch.equal(part, whole[step][:rows]), step
