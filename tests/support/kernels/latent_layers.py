"""Layers whose keys and values have unlike lengths, as latent attention has them, and how a backend serves one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backend_cases import case_of, spec
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import CacheLayout, LayerCache
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, reference_with_lse, relative_error, run_backend
from headway.kernels.step.config import LatentConfig
from headway.kernels.step.operations import Embedding, Norm, Operations

UNEQUAL = {
    "expanded": spec(head_dim=48, v_head_dim=32),
    "192/128": spec(head_dim=192, v_head_dim=128),
    "longer value": spec(head_dim=32, v_head_dim=64),
    "expanded, window softcap sinks": spec(
        head_dim=48, v_head_dim=32, sliding_window=9, softcap=2.0, sinks=(0.3, -1.0, 2.0, 0.0)
    ),
}
IN_KEY = {
    "absorbed": spec(num_heads=4, num_kv_heads=1, head_dim=48, v_head_dim=32, value_in_key=True),
    "576/512": spec(num_heads=3, num_kv_heads=1, head_dim=576, v_head_dim=512, value_in_key=True),
    "short value": spec(num_heads=2, num_kv_heads=2, head_dim=64, v_head_dim=16, value_in_key=True),
}


def errors_of(backend: type[AttentionBackend], case: Case) -> tuple[float, float]:
    """Relative error of the output, and the largest error of the log-sum-exp."""
    for view in (case.metadata.prefill, case.metadata.decode):
        if view is not None:
            support = backend.supports(case.spec, case.cache.layout, case.cache.block_size, view.phase)
            assert support, str(support)
    assert backend.accepts(case.cache)
    made = backend(case.spec, case.cache.layout, case.cache.block_size)
    lse = torch.full((case.spec.num_heads, len(case.q)), math.nan)
    out = run_backend(made, case, lse)
    expected, sums = reference_with_lse(case)
    again = run_backend(made, case)
    error = max(relative_error(out, expected, case), relative_error(again, expected, case))
    return error, float((lse - sums).abs().max())


def assert_small(errors: tuple[float, float], most: float = 2e-6) -> None:
    """Hold what `errors_of` and `dense_errors` return to the tolerance of float32."""
    error, lse = errors
    assert error < most
    assert lse < 2e-5


def dense_errors(backend: type[AttentionBackend], layout: CacheLayout, **changes: object) -> tuple[float, float]:
    """Return errors as `errors_of` does, for prompts of a layer without a cache: the given cache holds only NaN."""
    case = case_of("prefill", spec(head_dim=48, v_head_dim=32, num_kv_heads=4, dense=True, **changes), layout)
    expected, sums = reference_with_lse(case)
    for tensor in case.cache.tensors.values():
        tensor.fill_(math.nan)
    assert backend.supports(case.spec, layout, 16, Phase.PREFILL)
    for phase in (Phase.EXTEND, Phase.DECODE):
        assert "dense: needs a prompt" in str(backend.supports(case.spec, layout, 16, phase))
    lse = torch.full((case.spec.num_heads, len(case.q)), math.nan)
    out = run_backend(backend(case.spec, layout, 16), case, lse)
    return relative_error(out, expected, case), float((lse - sums).abs().max())


def strided(case: Case) -> Case:
    """Return the step with a cache whose keys and values share one tensor [block, head, slot, key + value], as in vLLM."""
    cache, spec = case.cache, case.spec
    blocks, size = cache.geometry.num_blocks, cache.block_size
    packed = torch.full((blocks, spec.num_kv_heads, size, spec.head_dim + spec.v_head_dim), math.nan, dtype=spec.dtype)
    k, v = packed.transpose(1, 2).split((spec.head_dim, spec.v_head_dim), dim=-1)
    k.copy_(cache.key)
    v.copy_(cache.value)
    foreign = LayerCache.wrap({"key": k, "value": v}, cache.layout, spec)
    return Case(spec, case.metadata, foreign, case.q, case.k, case.v)


LITE = LatentConfig(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
ODD = LatentConfig(kv_lora_rank=48, qk_nope_head_dim=20, qk_rope_head_dim=12, v_head_dim=36)


def latent_steps(
    ops: Operations, config: LatentConfig, heads: int, rows: int, dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """Each step's result in float64 on the CPU. Inputs depend only on the sizes, and have a merged projection's strides."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device, dtype, copy=True)

    _, (rope,) = ops.embed(torch.arange(rows).to(device), (7 * torch.arange(rows)).to(device), Embedding(draw(max(rows, 1), 16)))
    both, norm = draw(rows, heads * config.q_dim + config.kv_dim), Norm(draw(config.kv_lora_rank), 1e-6)
    expanded = AttentionSpec(heads, heads, config.q_dim, 1.0, v_head_dim=config.v_head_dim, dense=True)
    weight = draw(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank) * config.kv_lora_rank**-0.5
    layer = ops.latent_layer(expanded, config, weight)
    attended, out = (
        draw(rows, heads, config.kv_lora_rank),
        torch.empty(rows, heads, config.v_head_dim, dtype=dtype, device=device),
    )
    whole = [both[:, : heads * config.q_dim], both[:, heads * config.q_dim :]]
    results = {"absorb": layer.absorb(whole[0].view(rows, heads, config.q_dim))}
    results["k"], results["v"] = layer.expand(whole[1][:, None])
    layer.project(attended, out)
    results["project"] = out
    kept = both.clone().tensor_split([heads * config.q_dim], dim=1)
    results["q, not turned"], results["latent, not turned"] = ops.rotate_latent(*kept, config, norm, None)
    results["q"], results["latent"] = ops.rotate_latent(*whole, config, norm, rope)  # last, since it may be in place
    return {name: result.double().cpu() for name, result in results.items()}
