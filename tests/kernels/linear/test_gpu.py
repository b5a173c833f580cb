"""The fused operations on a GPU, over plain and quantised weights: each step against float64, decoders, and in CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
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

from headway.core.oracle.weight_cases import on_device
from headway.kernels.linear.choice import LinearChoice
from headway.kernels.linear.forms import Operand
from headway.kernels.linear.gpu_kernels import round_rows
from headway.kernels.linear.linear import Linear
from headway.kernels.linear.tile_kernels import InvariantTiles, Tiles
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.kernels.runtime.triton_launch import Launchers
from headway.kernels.runtime.vllm_library import find_library
from headway.kernels.step.fused import Fused
from headway.kernels.step.operations import Norm
from headway.kernels.step.torch_operations import TorchOperations
from headway.models.checkpoints.weights import Weights
from headway.models.families.families import read_decoder_config
from headway.models.families.rope import rope_tables
from headway.models.layers.decoder import Decoder
from headway.tuning.measure.linear import choose_linear_kernels
from operation_inputs import Inputs, Sizes, ropes
from quantized_weights import FORMS as PLAIN_FORMS
from quantized_weights import int4

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
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
    linear = Linear(torch.randn(shape, device="cuda").to(dtype) * 0.02, torch.randn(shape[0], device="cuda").to(dtype))
    x, y = torch.randn(rows, shape[1], device="cuda").to(dtype), torch.randn(rows, shape[0], device="cuda").to(dtype)
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    read = Operand.of(linear.weight, linear.bias)
    tiles = Tiles(linear.spec())
    assert tiles.runs(rows)
    for before in (y, torch.zeros_like(y)):
        found = tiles.compute(x, read, add_to=before.clone())
        assert float((found.double() - exact - before.double()).norm() / exact.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "shape", [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (4096, 12288), (24576, 4096), (250, 576)]
)
def test_any_number_of_rows_gives_the_same_bits(shape: tuple[int, int], gated: bool, dtype: torch.dtype) -> None:
    weight = torch.randn(shape, device="cuda").to(dtype) * 0.02
    linear = Linear(weight, torch.randn(shape[0], device="cuda").to(dtype))
    x = torch.randn(5000, shape[1], device="cuda").to(dtype)
    compute = partial(InvariantTiles(linear.spec()).compute, weight=Operand.of(linear.weight, linear.bias))
    around = {"gated": True, "activation": "silu"} if gated else {}
    whole = compute(x, **around)
    exact = x.float() @ weight.float().T + linear.bias.float()
    if gated:
        exact = torch.nn.functional.silu(exact[:, : shape[0] // 2]) * exact[:, shape[0] // 2 :]
    assert float((whole.float() - exact).norm() / exact.norm()) < TOLERANCE[dtype]
    for rows in (1, 2, 15, 16, 17, 40, 64, 65, 128, 129, 300, 1000, 4999):
        assert torch.equal(compute(x[-rows:].contiguous(), **around), whole[-rows:]), rows


def decoder(name: str, folder: Path, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return Decoder(read_decoder_config(CONFIGS[name]), Weights(folder, dtype, CUDA))


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
        model.operations = TorchOperations(*rope_tables(model.config.ropes, CUDA))
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
    ("rows", "padded", "form"),
    [
        *((*each, "") for each in ((2, 8), (5, 8), (8, 8), (9, 16), (13, 16), (17, 64), (40, 64), (70, 128), (127, 128))),
        *((*each, "int4 of 128") for each in ((2, 8), (9, 16), (17, 32), (40, 64))),
    ],
)
def test_a_padded_batch_gives_the_same_bits(rows: int, padded: int, form: str) -> None:
    """A graph pads its batch: as long as both take the same kernel, a row must not know how many others there are."""
    ops = Fused(*(table.cuda() for table in ropes(128)))
    sizes, quantize = (QUANTIZED_STEPS["qwen3"], FORMS[form]) if form else (STEPS["qwen3"], None)
    inputs = Inputs(dataclasses.replace(sizes, rows=padded), torch.bfloat16, quantize=quantize)
    whole = dict(inputs.results(ops, torch.bfloat16, "cuda"))
    for step, part in inputs.first(rows).results(ops, torch.bfloat16, "cuda"):
        assert torch.equal(part, whole[step][:rows]), step


QUANTIZED_STEPS = {
    "llama": Sizes(1, hidden=512, inner=1536, num_heads=8, num_kv_heads=2, head_dim=64),
    "qwen3": Sizes(1, hidden=1024, inner=3072, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True, bias=True),
}
FORMS = {**PLAIN_FORMS, "int4 of a row": lambda weight: int4(weight, weight.shape[1])}
COARSE = 6e-2
"""Error relative to the norm where x is rounded to floats of 8 bits, too."""


def choice_of(linear: Linear) -> LinearChoice:
    """A layer's kernels."""
    (choice,) = Fused(*(table.cuda() for table in ropes(64))).linear_choices([(linear, False)])
    return choice


def bound(linear: Linear, name: str) -> Callable[..., Tensor]:
    """A layer's product by one of its kernels."""
    assert linear.choice is not None
    step = linear.bound_to(linear.choice.kernels[name])
    return lambda x, layer, *out, **around: step(x, out=out[0] if out else None, **around)


def assert_graphs_repeat(
    way: Callable[[torch.Tensor, Linear], torch.Tensor], x: torch.Tensor, linear: Linear, y: torch.Tensor
) -> None:
    """A CUDA graph of a product gives the bits that a call has given."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = way(x, linear)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, y), (way, linear)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 17, 33, 64, 100, 300])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", QUANTIZED_STEPS)
def test_every_step_over_quantised_weights_is_right(name: str, form: str, rows: int, dtype: torch.dtype) -> None:
    sizes = dataclasses.replace(QUANTIZED_STEPS[name], rows=rows)
    inputs, tables = Inputs(sizes, dtype, quantize=FORMS[form]), ropes(sizes.head_dim)
    fused = dict(inputs.results(Fused(*(table.cuda() for table in tables)), dtype, "cuda"))
    coarse = "fp8" in form and rows > 32
    for step, expected in inputs.results(TorchOperations(*tables), torch.float64, "cpu"):
        error = float((fused[step] - expected).norm() / expected.norm())
        assert error < (COARSE if coarse else 1.2e-2), (step, error)


@pytest.mark.parametrize("rows", [1, 16, 65, 500])
@pytest.mark.parametrize("form", FORMS)
def test_every_way_is_right_and_gives_the_same_bits_in_a_graph(form: str, rows: int) -> None:
    weight = FORMS[form](torch.randn(1024, 2048, generator=torch.Generator().manual_seed(1)))
    linear, x = Linear(on_device(weight, CUDA), dtype=torch.bfloat16), torch.randn(rows, 2048, device="cuda").bfloat16()
    expected = x.cpu().double() @ weight.dequantized(torch.float64).t()
    kind = choice_of(linear)
    assert ("scaled_mm" in kind.kernels) == ("fp8" in form and torch.cuda.get_device_capability() == (9, 0)), kind.name
    for way in kind.able(rows):
        step = bound(linear, way)
        y = step(x, linear)
        error = float((y.cpu().double() - expected).norm() / expected.norm())
        assert error < (COARSE if kind.kernels[way].rounds_input else 6e-3), (way, error)
        assert_graphs_repeat(step, x, linear, y)


LIBRARY_FORMS = {
    **FORMS,
    "int4 of 32": partial(int4, group=32),
    "int4 of a row": partial(int4, group=2048),
    "int4 of a row with zeros": partial(int4, group=2048, zeros=True),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", LIBRARY_FORMS)
@pytest.mark.parametrize("way", ["marlin", "cutlass"])
def test_a_way_of_vllms_library_is_right(way: str, form: str, dtype: torch.dtype) -> None:
    if not find_library():
        pytest.skip(f"vLLM's library: {find_library().brief}")
    generator = torch.Generator().manual_seed(12)
    weight = LIBRARY_FORMS[form](torch.randn(1024, 2048, generator=generator))
    bias = torch.randn(1024, generator=generator).to(dtype)
    linear = Linear(on_device(weight, CUDA), bias.cuda(), dtype=dtype)
    kind = choice_of(linear)
    expected_here = {"marlin": form != "int8" and (form, dtype) != ("mxfp4", torch.float16), "cutlass": "fp8" in form}
    assert (way in kind.kernels) == expected_here[way], str(kind.refused.get(way))
    if way not in kind.kernels:
        return
    step = bound(linear, way)
    for rows in (1, 3, 16, 65):
        x = torch.randn(rows, 2048, generator=generator).to(dtype)
        expected = x.double() @ weight.dequantized(torch.float64).t() + bias.double()
        out = torch.empty(rows, 1024, dtype=dtype, device="cuda")
        for y in (step(x.cuda(), linear), step(x.cuda(), linear, out)):
            error = float((y.cpu().double() - expected).norm() / expected.norm())
            assert error < (COARSE if kind.kernels[way].rounds_input else 6e-3), (rows, error)
        assert y.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("group", [128, 1024])
def test_x_is_rounded_to_the_nearest_after_its_norm(group: int) -> None:
    x, weight = torch.randn(5, 1024, device="cuda").bfloat16(), torch.randn(1024, device="cuda").bfloat16()
    y, scales = round_rows(Launchers(CUDA), x, group, Norm(weight, 1e-6))
    normed = torch.nn.functional.rms_norm(x.double(), (1024,), weight.double(), 1e-6)
    back = y[:5].double() * scales[:5].double().repeat_interleave(group, 1)
    assert (back - normed).norm() < 0.035 * normed.norm()


FLOAT8_WAYS = "w8a8", "w8a8 narrow"
FLOAT8_SHAPES = (6144, 4096), (4096, 14336), (1536, 768), (576, 7168)


@pytest.fixture
def hopper() -> None:
    """Skip elsewhere."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("w8a8 multiplies by the matrix units of compute capability 9.0")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", [1, 9, 16, 33, 64, 100, 130, 256])
@pytest.mark.parametrize("form", [form for form in FORMS if "fp8" in form])
@pytest.mark.parametrize("way", FLOAT8_WAYS)
def test_floats_of_8_bits_by_such_floats(way: str, form: str, rows: int) -> None:
    """With a bias, and the same bits in a graph."""
    generator = torch.Generator().manual_seed(rows)
    for shape in FLOAT8_SHAPES:
        weight = FORMS[form](torch.randn(shape, generator=generator))
        bias = torch.randn(shape[0], generator=generator).bfloat16()
        linear = Linear(on_device(weight, CUDA), bias.cuda(), dtype=torch.bfloat16)
        kind = choice_of(linear)
        assert way in kind.kernels, str(kind.refused.get("w8a8"))
        step = bound(linear, way)
        x, group = torch.randn(rows, shape[1], generator=generator).bfloat16().cuda(), 128 if "blocks" in form else shape[1]
        rounded, scales = round_rows(Launchers(CUDA), x, group, None)
        read = rounded[:rows].double() * scales[:rows].double().repeat_interleave(group, 1)
        exact = read @ on_device(weight, CUDA).dequantized(torch.float64).t() + bias.cuda().double()
        y = step(x, linear)
        assert float((y.double() - exact).norm() / exact.norm()) < 6e-3, shape
        assert_graphs_repeat(step, x, linear, y)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [9, 64, 130])
@pytest.mark.parametrize("form", [form for form in FORMS if "fp8" in form])
@pytest.mark.parametrize("way", FLOAT8_WAYS)
def test_a_norm_before_and_a_gate_or_a_sum_behind_floats_of_8_bits(way: str, form: str, rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, norm = torch.randn(rows, 2048, generator=generator).to(dtype), torch.randn(2048, generator=generator).to(dtype)
    weight = FORMS[form](torch.randn(3072, 2048, generator=generator) * 0.02)
    linear, wide = Linear(on_device(weight, CUDA), dtype=dtype), weight.dequantized(torch.float64).t()
    choice_of(linear)
    kernel = bound(linear, way)
    gate, up = (torch.nn.functional.rms_norm(x.double(), (2048,), norm.double(), 1e-6) @ wide).chunk(2, 1)
    y = torch.randn(rows, 3072, generator=generator).to(dtype)
    for found, expected in (
        (
            kernel(x.cuda(), linear, norm=Norm(norm.cuda(), 1e-6), gated=True, activation="silu"),
            torch.nn.functional.silu(gate) * up,
        ),
        (kernel(x.cuda(), linear, add_to=y.cuda()), y.double() + x.double() @ wide),
    ):
        assert float((found.cpu().double() - expected).norm() / expected.norm()) < COARSE


def test_a_start_measures_every_way_and_the_choice_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    ops, device = Fused(*(table.cuda() for table in ropes(128))), torch.device("cuda", 0)
    weights = [FORMS["fp8 blocks"](torch.randn(1024, 2048, generator=torch.Generator().manual_seed(n))) for n in range(3)]
    layers = [(Linear(on_device(weight, CUDA), dtype=torch.bfloat16), gated) for weight in weights for gated in (False, True)]
    kinds = ops.linear_choices(layers)
    choose_linear_kernels(kinds, 60.0, compile_ahead(device))
    assert len(list((tmp_path / "crossover").glob("*.json"))) == 2
    for kind in kinds:
        assert "measured 20" in kind.describe()
