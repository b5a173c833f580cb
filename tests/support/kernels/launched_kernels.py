"""Kernels launched in real use: steps of models with real sizes, attention of every kind, and sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from absent_gpu import SHARED_MEMORY, absent_gpu, most_local_bytes, most_registers
from attention_layer import AttentionLayer
from expert_layers import fused_layer
from headway.backends.states.triton.backend import TritonStates
from headway.backends.triton.backend import FP8_CAPABILITY, TritonAttention
from headway.core.contract.adapters import AdapterSlots, rows_with
from headway.core.contract.backend import Lengths, StepLimits
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import HND, LATENT, NHD, NHD_INT8, VLLM_5D, CacheLayout
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import AttentionFunctions
from headway.core.contract.rule import AttentionRule, PerHead
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import KEY_VALUE, VALUE_KEY, StateLayout, StateMetadata, StateParameters, StateSpec
from headway.core.contract.weights import Float4Weight, Float8Weight, Int4Weight, Int8Weight, QuantizedWeight
from headway.kernels.all_reduce.copy_kernels import ShareSum
from headway.kernels.all_reduce.one_shot_kernels import OneShotAllReduce
from headway.kernels.all_reduce.two_shot_kernels import TwoShotAllReduce
from headway.kernels.experts.bound import BoundExperts
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear.choice import spec_of
from headway.kernels.linear.forms import Operand
from headway.kernels.linear.gpu_kernels import dequantize, round_rows
from headway.kernels.linear.quantized import TritonKernel
from headway.kernels.linear.tile_kernels import InvariantTiles
from headway.kernels.runtime.triton_launch import Launchers
from headway.kernels.sampling.draw_kernels import FusedPart, FusedSampling
from headway.kernels.sampling.top_k_top_p_kernels import TopKTopPSampler
from headway.kernels.step.config import LatentConfig
from headway.kernels.step.fused import Fused
from headway.kernels.step.operations import Gate, Heads, Norm
from headway.models.checkpoints.locate import locate
from headway.models.checkpoints.weights import DummyWeights
from headway.models.config import DecoderConfig, RopeConfig
from headway.models.families.families import read_decoder_config
from headway.models.layers.decoder import Decoder
from headway.models.loader import read_config

GPU = torch.device("cuda", 0)
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LIMITS = StepLimits(max_num_tokens=2100, max_num_seqs=70, max_model_len=9000, max_decode_len=4)
ROWS = (1, 5, 16, 40, 100, 300, 3000)
"""Numbers of tokens per step: one for each kernel of linear layers, norms and experts."""
FEW_ROWS = (1, 5, 16, 40, 100)
"""Without those from which on the choice among 256 experts takes the compiler minutes (route_tiles)."""


class EmptyWeights(DummyWeights):
    """Tensors with shapes but no values; tensors that the host reads are zeros."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, GPU

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape) if name.endswith("sinks") else torch.empty(shape, dtype=self.dtype, device=GPU)


def shipped(model: str) -> DecoderConfig:
    """The first two layers of a model whose shapes ship with Headway."""
    config = read_decoder_config(read_config(locate(model, weights=False)))
    return replace(config, layers=config.layers[:2])


def family(model_type: str) -> DecoderConfig:
    """The model that a family's configuration class has the sizes of, with one layer of each kind."""
    from transformers import AutoConfig

    missing = {
        "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
        "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    }
    config = read_decoder_config(AutoConfig.for_model(model_type, **missing.get(model_type, {})))
    return replace(config, layers=tuple(dict.fromkeys(config.layers)))


def with_experts() -> DecoderConfig:
    """Qwen3-235B-A22B, and a dense layer before."""
    small = shipped("qwen3-30b-a3b")
    assert small.experts is not None
    experts = replace(small.experts, intermediate_size=1536)
    layers = replace(small.layers[0], mlp="dense"), small.layers[1]
    return replace(small, hidden_size=4096, intermediate_size=12288, num_heads=64, experts=experts, layers=layers)


def with_latents() -> DecoderConfig:
    """The dense layers of DeepSeek-V3."""
    rope, latent = RopeConfig((1.0,) * 32, (1.0,) * 32, 64), LatentConfig(512, 128, 64, 128, q_lora_rank=1536)
    sizes = {"hidden_size": 7168, "num_heads": 128, "intermediate_size": 18432}
    return replace(shipped("qwen3-0.6b"), latent=latent, ropes=(rope,), qk_norm=None, **sizes)


def run_model(config: DecoderConfig, dtype: torch.dtype, rows: Sequence[int] = ROWS, every: int = 1) -> None:
    """Run everything between a model's attention layers. every: step between the MoE kernels that run."""
    run_decoder(Decoder(config, EmptyWeights(dtype)), rows, every)


def run_decoder(model: Decoder, rows: Sequence[int], every: int = 1) -> None:
    """Run a model as `run_model` does."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        latent = model.latent_layers.get(layer)
        if latent is None:
            return q.new_empty((*q.shape[:2], v.shape[2]))
        latent.absorb(q)
        out = q.new_empty((*q.shape[:2], latent.expanded.v_head_dim))
        latent.project(v.new_empty((*q.shape[:2], v.shape[2])), out)
        return out

    def run_state(layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        return x.new_empty(x.shape[0], model.state_layers[layer].spec.out_channels)

    attention = AttentionFunctions(attend, run_state)
    for count in rows:
        ids, positions = (torch.zeros(count, dtype=torch.int64, device=GPU) for _ in range(2))
        hidden = model(ids, positions.int(), attention)
        model.compute_logits(hidden[:1])
        for kind in model.expert_kinds:
            assert kind.example is not None
            compute_experts(BoundExperts(kind, kind.example, model.norm), hidden, every)


def compute_experts(layer: BoundExperts, x: Tensor, every: int) -> None:
    """Run an MoE layer with the Triton kernels for this number of tokens. every: step between the kernels that run."""
    for kernel in [each for each in layer.kind.kernels.values() if not each.name.startswith("cuda")][::every]:
        if kernel.runs(len(x)):
            layer.add(kernel, layer.routed(x, kernel), x)


def run_adapted(config: DecoderConfig, dtype: torch.dtype, slots: int, rank: int, rows: Sequence[int] = (3, 300)) -> None:
    """Run the kernels that adapters add to linear layers."""
    model = Decoder(config, EmptyWeights(dtype), slots=AdapterSlots(slots, rank))
    attention = AttentionFunctions(lambda layer, q, k, v: q.new_empty((*q.shape[:2], v.shape[2])))
    for count in rows:
        ids, positions = (torch.zeros(count, dtype=torch.int64, device=GPU) for _ in range(2))
        with rows_with(model.adapters, torch.zeros(count, dtype=torch.int32, device=GPU)):
            model(ids, positions.int(), attention)


def gate_outputs(dtype: torch.dtype) -> None:
    """Run the gates after attention, and the gated norms after recurrent layers."""
    rotated = torch.empty(1, 64, device=GPU)
    x, by = torch.empty(2, 8192, dtype=dtype, device=GPU), torch.empty(2, 12288, dtype=dtype, device=GPU)[:, 4096:]
    norms = {size: Norm(torch.empty(size, dtype=FP32, device=GPU), 1e-6) for size in (128, 8192)}
    for gate in (
        Gate("sigmoid"),
        Gate("silu", norms[128], 128),
        Gate("silu", norms[8192], 1024, gate_first=True),
        Gate("sigmoid", norms[8192], 8192),
    ):
        Fused(rotated, rotated).gate(x, by, gate)


def sum_over_two_ranks(dtype: torch.dtype) -> None:
    """Run each all-reduce kernel, with and without a residual stream."""
    for kind in (OneShotAllReduce, TwoShotAllReduce):
        ranks, x = kind(0, GPU, [0, 0], None), torch.empty(4096, dtype=dtype, device=GPU)
        ranks(x)
        ranks(x, torch.empty_like(x))
    share = ShareSum(0, GPU, [0, 0])
    for adds in (False, True):
        share(x, torch.empty_like(x), (0, 4096), 1, adds=adds)


def compute_quantized_experts(dtype: torch.dtype, counts: Iterable[int], every: int = 1) -> None:
    """Run experts with the sizes of gpt-oss-20b in MXFP4, and of Qwen3-30B-A3B in FP8 blocks. every: step between the kernels."""
    config = shipped("qwen3-30b-a3b").experts
    assert config is not None

    def blocks(rows: int, columns: int) -> QuantizedWeight:
        scales = torch.empty(rows // 128, columns // 128, dtype=FP32, device=GPU)
        return Float8Weight(torch.empty(rows, columns, dtype=FP8, device=GPU), scales, (128, 128))

    def mxfp4(rows: int, columns: int) -> QuantizedWeight:
        packed, exponents = (torch.empty(rows, columns // part, dtype=torch.uint8, device=GPU) for part in (2, 32))
        return Float4Weight(packed, exponents)

    clamped = replace(config, num_experts=32, top_k=4, intermediate_size=2880, biases=True, swiglu_limit=7.0)
    for made, hidden, form in ((config, 2048, blocks), (clamped, 2880, mxfp4)):
        sizes = {"gate_up_bias": (made.num_all, made.up_size), "down_bias": (made.num_all, hidden)}
        biases = {name: torch.empty(shape, dtype=dtype, device=GPU) if made.biases else None for name, shape in sizes.items()}
        gate_up, down = form(made.num_all * made.up_size, hidden), form(made.num_all * hidden, made.intermediate_size)
        router = torch.empty(made.num_logits, hidden, dtype=dtype, device=GPU)
        weights = RoutedWeights(router=router, gate_up=gate_up, down=down, **biases)
        layer = fused_layer(made, weights, Norm(router[0], 1e-6))
        for count in counts:
            compute_experts(layer, torch.empty(count, hidden, dtype=dtype, device=GPU), every)


def multiply_invariant(shape: tuple[int, int], gated: bool, dtype: torch.dtype, rows: Iterable[int]) -> None:
    """Launch the linear kernel of deterministic mode. shape: of the weight."""
    weight = torch.empty(shape, dtype=dtype, device=GPU)
    kernel, around = InvariantTiles(spec_of(weight, dtype, GPU)), {"gated": True, "activation": "silu"} if gated else {}
    for count in rows:
        kernel.compute(torch.empty(count, shape[1], dtype=dtype, device=GPU), Operand.of(weight, None), **around)


def multiply_quantized(shape: tuple[int, int], dtype: torch.dtype, rows: Iterable[int]) -> None:
    """Run linear layers with a quantized weight of each format, with each kernel that supports it."""
    heads, rope = Heads(4, 2, 128), tuple(torch.empty(2, 64, 64, dtype=FP32, device=GPU))
    launchers, norm = Launchers(GPU), Norm(torch.empty(shape[1], dtype=dtype, device=GPU), 1e-6)
    for whole, weight in quantized_weights(shape):
        spec = spec_of(weight, dtype, GPU)
        for count in rows if TritonKernel.supports(spec) else ():
            x, kernel = torch.empty(count, shape[1], dtype=dtype, device=GPU), TritonKernel(spec)
            read, multiply = kernel.prepare(weight), kernel.compute
            multiply(x, read)
            if not whole:
                continue
            multiply(x, read, norm, gated=True, activation="silu")
            multiply(x, read, add_to=torch.empty(count, shape[0], dtype=dtype, device=GPU))
            if kernel.rotates(count, read, heads):
                multiply(x, read, norm, rotated=(heads, (rope[0], rope[1])))
        dequantize(launchers, weight, dtype)
    for group in (128, shape[1]) if torch.cuda.get_device_capability() >= FP8_CAPABILITY else ():
        round_rows(launchers, torch.empty(5, shape[1], dtype=dtype, device=GPU), group, norm)


def quantized_weights(shape: tuple[int, int]) -> Iterable[tuple[bool, QuantizedWeight]]:
    """Quantized weights of each format, without values, and whether all operations around the linear layer run with it."""
    rows, columns = shape

    def empty(*size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(size, dtype=dtype, device=GPU)

    yield False, Float8Weight(empty(rows, columns, dtype=FP8), empty(rows, 1, dtype=FP32), (1, columns))
    yield True, Float8Weight(empty(rows, columns, dtype=FP8), empty(-(-rows // 128), columns // 128, dtype=FP32), (128, 128))
    yield False, Int8Weight(empty(rows, columns, dtype=torch.int8), empty(rows, dtype=FP32))
    for group, zeros in ((128, False), (64, True), (32, True)):
        scales = empty(rows, columns // group, dtype=FP16)
        zero = empty(rows, columns // group) if zeros else None
        yield group == 64, Int4Weight(empty(rows, columns // 2), scales, zero, group)
    yield False, Float4Weight(empty(rows, columns // 2), empty(rows, columns // 32))


def choose_tokens(vocab_size: int, dtype: torch.dtype, rows: int = 4) -> None:
    """Sampling: greedy, random, with top_k, top_p and min_p, on one of several ranks, and verification of drafts."""
    logits = torch.empty(rows, vocab_size, dtype=dtype, device=GPU)
    keys, scales = torch.zeros(rows, dtype=torch.int64, device=GPU), torch.ones(rows, device=GPU)
    sampling, part = FusedSampling(GPU), FusedPart(GPU)
    sampling.greedy(logits)
    TopKTopPSampler(GPU)(logits, sampling.draw(logits, scales, keys), keys, torch.ones(4, rows, device=GPU))
    for ranks in (2, 8):
        part.winners(part.best_of_part(logits, None, None, vocab_size).expand(ranks, -1).contiguous())
        part.best_of_part(logits, scales, keys, 5)
    for width in (2, 4, 8):
        sampled, ids = torch.zeros(2, rows, width, dtype=torch.int64, device=GPU)
        sampling.accept_drafts(sampled, ids, keys, keys, keys)


def attend(spec: AttentionSpec, layout: CacheLayout, block_size: int, every: bool = False) -> None:
    """A step of each kind; every: all that the backend says its kernels are chosen by. None where it refuses the layer."""
    if not TritonAttention.supports(spec, layout, block_size, Phase.PREFILL):
        return
    layer = AttentionLayer(spec, layout, block_size, LIMITS)
    if every:
        layer.warm_up()
    for lengths in (*PROMPTS, *([] if spec.dense else CACHED)):
        layer.step(*map(list, zip(*lengths, strict=True)))


def run_states(spec: StateSpec, layout: StateLayout = KEY_VALUE, steps: Sequence[Sequence[Lengths]] | None = None) -> None:
    backend = TritonStates(spec, layout)
    cache, bias = layout.allocate(spec, 100), spec.kind == "mamba1"
    heads, keys, conv = spec.num_heads, spec.key_dim, spec.conv_channels

    def weight(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=GPU)

    per_key = {"kda": (heads, keys), "mamba1": (heads, keys)}.get(spec.kind, (heads,))
    parameters = StateParameters(
        conv_weight=weight(conv, spec.conv_width, dtype=spec.dtype) if conv else None,
        conv_bias=weight(conv, dtype=spec.dtype) if conv and bias else None,
        A_log=weight(*(per_key if spec.kind == "mamba1" else (heads,))),
        dt_bias=weight(*(per_key if spec.kind == "kda" else (heads,))),
        D=weight(heads) if spec.kind in ("mamba1", "mamba2") else None,
    )
    shapes = {
        "gated_delta": [(heads,), (heads,)], "kda": [(heads, keys), (heads,)], "mamba2": [(heads,)],
        "mamba1": [(heads,), (keys,), (keys,)],
    }.get(spec.kind, [])  # fmt: skip
    for lens in STEPS if steps is None else steps:
        drafts = [each.num_drafts for each in lens]
        query, context = [each.query_len for each in lens], [each.context_len for each in lens]
        step = AttentionMetadata.build(query, context, [[0]] * len(lens), 1 << 20, GPU, num_draft_tokens=drafts)
        slots, out_slots = torch.zeros(len(lens), dtype=torch.int32), torch.zeros(len(lens), 1 + max(drafts), dtype=torch.int32)
        on_gpu = slots.to(GPU), out_slots.to(GPU)
        left = None if step.num_decodes else torch.tensor([[0, 64, 3]], dtype=torch.int32)
        checkpoints = None if left is None else left.to(GPU)
        metadata = StateMetadata(step, *on_gpu, slots, out_slots, checkpoints, left)
        x, *gates = (
            torch.empty(step.num_tokens, *shape, dtype=spec.dtype, device=GPU) for shape in ((spec.input_channels,), *shapes)
        )
        out = torch.empty(step.num_tokens, spec.out_channels, dtype=spec.dtype, device=GPU)
        serve = backend.step if step.num_decodes else backend.scan
        serve(x, gates, parameters, cache, backend.plan(metadata), out)
        if max(drafts):  # and as a graph has it
            captured = replace(metadata, recomputed=torch.zeros(len(lens), dtype=torch.int64, device=GPU))
            serve(x, gates, parameters, cache, backend.plan_for_capture(captured), out)


STEPS: Sequence[Sequence[Lengths]] = (
    [Lengths(1, 20)],
    [Lengths(1, 20)] * 64,
    [Lengths(4, 20, 3)] * 3,
    [Lengths(1000, 0)],
    [Lengths(100, 8)] * 16,
)
_DELTA = StateSpec("gated_delta", 32, 16, 128, 128, 8192, 4, dtype=BF16, device=GPU, qk_norm=True)
STATES: dict[str, tuple[StateSpec, StateLayout]] = {
    "gated_delta": (_DELTA, KEY_VALUE),
    "gated_delta, value_key": (_DELTA, VALUE_KEY),
    "gated_delta, float32": (replace(_DELTA, dtype=FP32), KEY_VALUE),
    "kda": (StateSpec("kda", 32, 32, 128, 128, 12288, 4, dtype=BF16, device=GPU, qk_norm=True), KEY_VALUE),
    "kda, float32": (StateSpec("kda", 8, 8, 72, 136, 8 * 280, 4, device=GPU, qk_norm=True), KEY_VALUE),
    "mamba2": (StateSpec("mamba2", 128, 8, 128, 64, 10240, 4, dtype=BF16, device=GPU), VALUE_KEY),
    "mamba2, 256": (StateSpec("mamba2", 128, 1, 256, 64, 8704, 4, dtype=BF16, device=GPU), VALUE_KEY),
    "mamba1": (StateSpec("mamba1", 8192, 1, 16, 1, 8192, 4, dtype=BF16, device=GPU, state_dtype=BF16), VALUE_KEY),
    "lightning": (StateSpec("lightning", 64, 64, 96, 96, dtype=BF16, device=GPU), KEY_VALUE),
    "conv": (StateSpec("conv", 0, 0, 0, 0, 2048, 3, "none", BF16, GPU), KEY_VALUE),
}
"""Layers with a state, by what is unusual."""

PROMPTS = [(5, 0, 0)], [(2000, 0, 0)]
CACHED = [(300, 0, 0), (20, 3000, 0)], [(1, 20, 0)], [(1, 8000, 0)], [(1, 100, 0)] * 60, [(9, 0, 0), (1, 4000, 0)], [(4, 4000, 3)]
"""Steps: query, context and draft tokens of each sequence."""


class Documents(AttentionRule):
    """A rule that has every function and both buffers of parameters. A tile of its bias would fill the shared memory."""

    documents: Tensor
    bias: Tensor
    slopes: PerHead

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return 20 * torch.tanh(score / 20) - params.slopes * (q_pos - k_pos) + params.bias[(q_pos - k_pos).clamp(0, 99)]

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return params.documents[q_pos] == params.documents[k_pos]

    def gate(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return torch.where((k_pos * 0x9E3779B1 >> 7) & 1 == 0, 1.0, params.slopes)


_RULE = Documents(torch.arange(9000) // 1000, torch.zeros(100), (0.5,) * 16)
_KIND = AttentionSpec(16, 8, 128, 128**-0.5, BF16, GPU)
_HEAD_64 = AttentionSpec(64, 8, 64, 0.125, BF16, GPU)
_WINDOWED = replace(_HEAD_64, sliding_window=128, sinks=(0.0,) * 64)
_DENSE_64 = replace(_HEAD_64, num_heads=12, num_kv_heads=12, dense=True, causal=False)
_HEAD_256 = AttentionSpec(8, 4, 256, 0.0625, BF16, GPU)
_ABSORBED = AttentionSpec(16, 1, 576, 192**-0.5, BF16, GPU, v_head_dim=512, value_in_key=True)
_EXPANDED = AttentionSpec(16, 16, 192, 192**-0.5, BF16, GPU, v_head_dim=128)
ATTENTION: dict[str, tuple[AttentionSpec, CacheLayout, int]] = {
    "head 128": (_KIND, NHD, 16),
    "head 128, blocks of 256": (replace(_KIND, num_heads=32), NHD, 256),
    "head 128, hnd": (_KIND, HND, 64),
    "head 128, float16": (replace(_KIND, dtype=FP16), NHD, 16),
    "head 64, vllm_5d": (replace(_HEAD_64, num_heads=14, num_kv_heads=2), VLLM_5D, 16),
    "head 64, sinks and window": (_WINDOWED, NHD, 16),
    "head 64, alibi": (replace(_HEAD_64, num_heads=8, dtype=FP16, alibi_slopes=(0.5,) * 8), NHD, 16),
    "head 64, float32": (replace(_HEAD_64, num_heads=12, num_kv_heads=12, dtype=FP32), NHD, 16),
    "head 80": (AttentionSpec(32, 32, 80, 80**-0.5, BF16, GPU), NHD, 16),
    "head 256, window": (replace(_HEAD_256, num_kv_heads=1, sliding_window=512), NHD, 64),
    "head 256, softcap and window": (replace(_HEAD_256, softcap=50.0, sliding_window=4096), NHD, 16),
    "head 256, float32": (replace(_HEAD_256, dtype=FP32), NHD, 16),
    "fp8 cache": (replace(_KIND, kv_dtype=FP8), NHD, 16),
    "fp8 cache, vllm_5d": (replace(_KIND, kv_dtype=FP8), VLLM_5D, 16),
    "int8 cache": (replace(_KIND, kv_dtype=torch.int8), NHD_INT8, 16),
    "int8 cache, float16 and blocks of 128": (replace(_KIND, dtype=FP16, kv_dtype=torch.int8), NHD_INT8, 128),
    "int8 cache, head 64, sinks and window": (replace(_WINDOWED, kv_dtype=torch.int8), NHD_INT8, 16),
    "batch invariant": (replace(_KIND, invariance=Invariance.BATCH), NHD, 16),
    "576/512": (_ABSORBED, LATENT, 64),
    "576/512, 128 heads": (replace(_ABSORBED, num_heads=128), LATENT, 64),
    "576/512, float32": (replace(_ABSORBED, dtype=FP32), LATENT, 16),
    "192/128": (_EXPANDED, NHD, 16),
    "head 64, bidirectional": (_DENSE_64, NHD, 16),
    "head 64, bidirectional window": (replace(_DENSE_64, sliding_window=65), NHD, 16),
    "head 128, rule": (replace(_KIND, rule=_RULE), NHD, 16),
    "576/512, rule": (replace(_ABSORBED, rule=_RULE), LATENT, 64),
    "192/128, without a cache": (replace(_EXPANDED, dense=True), NHD, 16),
}
"""Kinds of layers, by what is unusual."""


def print_resources() -> None:
    """Print registers and local memory (bytes) per thread, shared memory (KiB) and thread blocks per SM of common attention."""
    for capability, size in product(SHARED_MEMORY, (64, 128, 256)):
        with absent_gpu(capability) as found:
            layer = AttentionLayer(replace(_KIND, num_heads=32, head_dim=size, v_head_dim=size), NHD, 16, LIMITS)
            for step in ([2000], [0], [0]), ([300, 20], [0, 3000], [0, 0]), ([1], [8000], [0]):
                layer.step(*step)
        for (variant, compiled), constants in zip(found.variants.items(), found.constants, strict=True):
            if {"BLOCK_M", "BLOCK_N"} <= constants.keys():
                tile = " x ".join(constants[each] for each in ("BLOCK_M", "BLOCK_N", "num_warps"))
                per_thread = [most(compiled.asm["cubin"]) for most in (most_registers, most_local_bytes)]
                shared = compiled.metadata.shared >> 10
                print(capability, size, variant[0], tile, *per_thread, shared, found.blocks_per_multiprocessor(compiled))


if __name__ == "__main__":
    print_resources()
