"""Random quantized checkpoints, packed as each format specifies, and the equivalent plain ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from engine_logits import save_random
from plain_models import sizes

VOCAB = 61
QWEN3 = Qwen3Config(
    **sizes(VOCAB, 128, 256, 2, head_dim=32, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=True)
)
SIZES = {key: value for key, value in QWEN3.to_dict().items() if key not in ("architectures", "model_type")}
QWEN3_MOE = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1)


def gpt_oss(inner: int) -> GptOssConfig:
    """A tiny gpt-oss whose experts have this hidden size."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssConfig(**sizes(VOCAB, 64, inner, 2, head_dim=16, max_position_embeddings=64, initializer_range=0.2, **experts))


GPT_OSS = gpt_oss(128)
Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of a module, by what their names add, and its weight, float32 [N, K]."""
F8 = torch.float8_e4m3fn
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True)
class Format:
    """A quantization format: its entry in config.json, and the function that draws a module of the given rows and columns."""

    config: Mapping[str, Any]
    draw: Callable[[int, int], Packed]


def scales_of(*shape: int) -> Tensor:
    """Scales that differ by what they are for."""
    return torch.rand(shape) * 0.02 + 0.005


def float8_values(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns) * 4).to(F8)


def float8_blocks(rows: int, columns: int, size: int = 64) -> Packed:
    values, scales = float8_values(rows, columns), scales_of(-(-rows // size), -(-columns // size))
    weight = torch.stack([values.float()[:, k] * scales[torch.arange(rows) // size, k // size] for k in range(columns)], dim=1)
    return {".weight": values, ".weight_scale_inv": scales}, weight


def float8_powers(rows: int, columns: int) -> Packed:
    """Blocks whose scales are powers of two and stored as such (scale_fmt ue8m0)."""
    values, powers = float8_values(rows, columns), torch.randint(-8, -3, (-(-rows // 64), -(-columns // 64)))
    scales = (2.0**powers).repeat_interleave(64, 0).repeat_interleave(64, 1)[:rows, :columns]
    return {".weight": values, ".weight_scale_inv": (2.0**powers).to(torch.float8_e8m0fnu)}, values.float() * scales


def float8_named(name: str, *shape: int, static: bool = False) -> Callable[[int, int], Packed]:
    """A scale for the tensor, or with shape (-1, 1) for each row."""

    def draw(rows: int, columns: int) -> Packed:
        values, scales = float8_values(rows, columns), scales_of(*(rows if size == -1 else size for size in shape))
        rest = {".input_scale": torch.tensor(0.5)} if static else {}
        return {".weight": values, name: scales, **rest}, values.float() * scales.reshape(-1, 1)

    return draw


def float8_compressed_blocks(rows: int, columns: int) -> Packed:
    """As compressed-tensors calls them."""
    tensors, weight = float8_blocks(rows, columns)
    return {".weight": tensors[".weight"], ".weight_scale": tensors[".weight_scale_inv"]}, weight


def int8_rows(rows: int, columns: int) -> Packed:
    values, scales = torch.randint(-128, 128, (rows, columns), dtype=torch.int8), scales_of(rows, 1) / 16
    return {".weight": values, ".weight_scale": scales, ".input_scale": torch.ones(1)}, values.float() * scales


def words(codes: Tensor, dim: int, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes along an axis into int32. places: which of the codes of a word lies where, from the lowest bits on."""
    count = 32 // bits
    pieces = codes.long().unflatten(dim, (-1, count))
    packed = sum(pieces.select(dim + 1, which) << bits * place for place, which in enumerate(places or range(count)))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


@dataclass(frozen=True)
class Drawn:
    """Integers in groups: codes [N, K], scales and zeros [N, groups], the group of each column."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    @property
    def weight(self) -> Tensor:
        return (self.codes - self.zeros[:, self.group_of]) * self.scales.float()[:, self.group_of]


def draw_groups(rows: int, columns: int, size: int, bits: int = 4, symmetric: bool = False, ordered: bool = False) -> Drawn:
    count, top = columns // size, 2**bits
    group_of = torch.arange(columns) // size
    return Drawn(
        torch.randint(0, top, (rows, columns)),
        (scales_of(rows, count) * 16 / top).half(),
        torch.full((rows, count), top // 2) if symmetric else torch.randint(0, top, (rows, count)),
        group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))] if ordered else group_of,
    )


def awq(rows: int, columns: int) -> Packed:
    drawn, places = draw_groups(rows, columns, 32), (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        ".qweight": words(drawn.codes.t(), 1, 4, places),
        ".qzeros": words(drawn.zeros.t(), 1, 4, places),
        ".scales": drawn.scales.t().contiguous(),
    }, drawn.weight


def gptq(bits: int, less: int, ordered: bool = False, symmetric: bool = False, size: int = 32) -> Callable[[int, int], Packed]:
    """less: what is taken from zeros before they are stored."""

    def draw(rows: int, columns: int) -> Packed:
        group = columns if size == -1 else size
        drawn = draw_groups(rows, columns, group, bits, symmetric, ordered)
        return {
            ".qweight": words(drawn.codes.t(), 0, bits),
            ".qzeros": words((drawn.zeros.t() - less) % 2**bits, 1, bits),
            ".scales": drawn.scales.t().contiguous(),
            ".g_idx": drawn.group_of.int(),
        }, drawn.weight

    return draw


def pack_quantized(bits: int = 4, symmetric: bool = True, ordered: bool = False, size: int = 32) -> Callable[[int, int], Packed]:
    def draw(rows: int, columns: int) -> Packed:
        drawn = draw_groups(rows, columns, columns if size == -1 else size, bits, symmetric, ordered)
        tensors = {
            ".weight_packed": words(drawn.codes, 1, bits),
            ".weight_scale": drawn.scales,
            ".weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = words(drawn.zeros, 0, bits)
        if ordered:
            tensors[".weight_g_idx"] = drawn.group_of.int()
        return tensors, drawn.weight

    return draw


def nvfp4(codes_name: str, scale_name: str, divides: bool) -> Callable[[int, int], Packed]:
    def draw(rows: int, columns: int) -> Packed:
        codes = torch.randint(0, 16, (rows, columns))
        scales, factor = (torch.rand(rows, columns // 16) * 200 + 100).to(F8), torch.tensor([1 / 8192 + 0.0001])
        weight = FP4[codes] * (scales.float() * factor).repeat_interleave(16, 1)
        return {
            codes_name: (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8),
            ".weight_scale": scales,
            scale_name: 1 / factor if divides else factor.reshape(()),
            (".input_global_scale" if divides else ".input_scale"): torch.ones(1),
        }, weight

    return draw


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FORMATS = {
    "fp8 blocks": Format({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64]}, float8_blocks),
    "fp8 blocks of powers": Format({"quant_method": "fp8", "weight_block_size": [64, 64], "scale_fmt": "ue8m0"}, float8_powers),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "static"}, float8_named(".weight_scale", static=True)),
    "fp8 of transformers": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, float8_named(".weight_scale_inv", 1)),
    "compressed fp8 rows": Format(
        compressed("float-quantized", **FLOAT, strategy="channel"), float8_named(".weight_scale", -1, 1)
    ),
    "compressed fp8": Format(
        compressed("float-quantized", **FLOAT, strategy="tensor"), float8_named(".weight_scale", 1, static=True)
    ),
    "compressed fp8 blocks": Format(
        compressed("float-quantized", **FLOAT, strategy="block", block_structure=[64, 64]), float8_compressed_blocks
    ),
    "compressed int8": Format(compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_rows),
    "compressed int4": Format(compressed("pack-quantized", **INT4, symmetric=True), pack_quantized()),
    "compressed int4, zeros": Format(compressed("pack-quantized", **INT4, symmetric=False), pack_quantized(symmetric=False)),
    "compressed int4, ordered": Format(
        compressed("pack-quantized", **INT4, symmetric=True, actorder="group"), pack_quantized(ordered=True)
    ),
    "compressed int4, rows": Format(
        compressed("pack-quantized", num_bits=4, type="int", strategy="channel"), pack_quantized(size=-1)
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
    "gptq": Format(GPTQ, gptq(4, 1)),
    "gptq v2": Format({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 0)),
    "gptq, ordered": Format({**GPTQ, "desc_act": True, "sym": True}, gptq(4, 1, ordered=True, symmetric=True)),
    "gptq, rows": Format({**GPTQ, "group_size": -1}, gptq(4, 1, size=-1)),
    "gptq of 8 bits": Format({**GPTQ, "bits": 8}, gptq(8, 1)),
    "compressed nvfp4": Format(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4(".weight_packed", ".weight_global_scale", divides=True),
    ),
    "modelopt nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(".weight", ".weight_scale_2", divides=False)
    ),
    "modelopt fp8": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, float8_named(".weight_scale", static=True)),
}
"""Every format of linear layers, with groups and blocks that fit a tiny model."""


def save_both(
    folder: Path, form: Format, config: PretrainedConfig = QWEN3, plain: Callable[[str], bool] = lambda name: False
) -> tuple[Path, Path]:
    """Save a checkpoint in a format, and the equivalent plain one. plain: modules that stay unquantized."""
    dense, quantized = folder / "dense", folder / "quantized"
    save_random(config, dense)
    tensors = load_file(dense / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or "embed" in name or plain(module):
            stored[name] = tensor
            continue
        parts, tensors[name] = form.draw(*tensor.shape)
        stored |= {module + suffix: part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    write_config(quantized, json.loads((dense / "config.json").read_text()), quantization_config=form.config)
    return quantized, dense


def save_mxfp4(folder: Path, config: PretrainedConfig) -> tuple[Path, Path]:
    """Save gpt-oss with only its experts quantized, and the equivalent plain checkpoint."""
    dense, quantized = folder / "dense", folder / "quantized"
    save_random(config, dense)
    tensors = load_file(dense / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        codes, exponents = torch.randint(0, 16, (experts, rows, columns)), torch.randint(121, 126, (experts, rows, columns // 32))
        pairs = codes.view(experts, rows, columns // 32, 16, 2)
        stored[f"{name}_blocks"] = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
        stored[f"{name}_scales"] = exponents.to(torch.uint8)
        tensors[name] = (FP4[codes] * (2.0 ** (exponents - 127)).repeat_interleave(32, 2)).mT.contiguous()
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    stated = json.loads((dense / "config.json").read_text())
    write_config(quantized, stated, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return quantized, dense


def write_config(folder: Path, stated: Mapping[str, Any] | None = None, **changes: Any) -> None:
    """Write config.json. stated: changed values; None removes a value."""
    path = folder / "config.json"
    path.write_text(json.dumps({**(json.loads(path.read_text()) if stated is None else stated), **changes}))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
