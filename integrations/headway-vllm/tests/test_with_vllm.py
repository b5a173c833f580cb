"""The plugin's classes against the vLLM that is installed: `make test-vllm`, or any environment that has one."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
os.environ["HEADWAY_ATTN_BACKEND"] = "sdpa.math"

from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import headway_vllm
from headway_vllm import backends, metadata
from headway_vllm.generation import find_generation

GENERATION = find_generation()


def test_vllm_has_every_field_that_is_read() -> None:
    wanted = set(metadata.CommonMetadata.__annotations__)
    assert wanted <= {field.name for field in dataclasses.fields(CommonAttentionMetadata)}


def test_registering_twice_does_no_harm_and_names_lead_to_classes() -> None:
    headway_vllm.register()
    headway_vllm.register()
    names = ("HEADWAY", "HEADWAY_SDPA") if GENERATION.names_are_free else ("CUSTOM",)
    for name in (*names, "CPU_ATTN"):
        backend = AttentionBackendEnum[name].get_class()
        assert issubclass(backend, backends.HeadwayBackend)
        assert backend.get_name() == name
        assert f"{backend.__module__}.{backend.__qualname__}" == f"headway_vllm.backends.{name}"
    AttentionBackendEnum.CPU_ATTN.clear_override()


def test_nothing_that_vllm_calls_is_left_abstract() -> None:
    backend = backends.CPU_ATTN
    for each in (backend, backend.get_impl_cls(), backend.get_builder_cls()):
        assert not each.__abstractmethods__


def test_vllm_asks_before_it_takes_a_backend() -> None:
    asked = {"use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False}
    common = {"dtype": torch.float32, "block_size": 16, "device_capability": None, "attn_type": AttentionType.DECODER, **asked}
    backend = backends.CPU_ATTN
    assert backend.validate_configuration(head_size=64, kv_cache_dtype="auto", **common) == []
    assert backend.validate_configuration(head_size=64, kv_cache_dtype="fp8", **common)
    assert backend.validate_configuration(head_size=64, kv_cache_dtype="auto", **{**common, "use_mla": True})
    (reason,) = backends.HEADWAY_HOPPER.validate_configuration(head_size=64, kv_cache_dtype="auto", **common)
    assert "hopper" in reason
    assert backends.HEADWAY_FLASH_ATTN.block_multiple() == 256


def test_a_step_of_vllms_own_types_is_computed_in_memory_of_the_shape_that_was_asked_for() -> None:
    """From the layer's constructor to its output: two sequences that decode, one with a prompt."""
    backend = backends.CPU_ATTN
    impl = backend.get_impl_cls()(4, 64, 0.125, 2, None, None, "auto", None, AttentionType.DECODER, None)
    layer = SimpleNamespace(impl=impl, attn_backend=backend)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}, cudagraph_capture_sizes=[1, 2]),
        model_config=SimpleNamespace(dtype=torch.float32, max_model_len=64),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=24),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        speculative_config=None,
    )
    builder_class = backend.get_builder_cls()
    builder = builder_class(SimpleNamespace(block_size=16), ["layer"], config, torch.device("cpu"))
    assert builder_class.get_cudagraph_support(config, SimpleNamespace(block_size=16)).name == "NEVER"
    cache = torch.zeros(8, 2, 16, 128) if GENERATION.names_are_free else torch.zeros(backend.get_kv_cache_shape(8, 16, 2, 64))
    table = torch.tensor([[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 0, 0]], dtype=torch.int32)
    layer.kv_cache = cache

    def common(starts, lens, slots):
        starts, lens = torch.tensor(starts, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
        longest = int(starts.diff().max())
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            num_reqs=len(lens),
            num_actual_tokens=int(starts[-1]),
            max_query_len=longest,
            max_seq_len=int(lens.max()),
            block_table_tensor=table[: len(lens)],
            slot_mapping=torch.tensor(slots),
            seq_lens_cpu_upper_bound=lens,
        )

    def attend(step, q, k, v):
        out = torch.full((len(q), 4, 64), torch.nan)
        impl.forward(layer, q, k, v, cache, step, out)
        return out

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    generator = torch.Generator().manual_seed(0)
    keys, values = draw(3, 20, 2, 64), draw(3, 20, 2, 64)
    first = common([0, 5, 24], [5, 19], [*range(16, 21), *range(48, 67)])
    attend(builder.build(0, first), draw(24, 4, 64), *(torch.cat([each[0, :5], each[1, :19]]) for each in (keys, values)))
    second = common([0, 1, 2, 9], [6, 20, 7], [21, 67, *range(80, 87)])
    new = [torch.cat([each[0, 5:6], each[1, 19:20], each[2, :7]]) for each in (keys, values)]
    q = draw(9, 4, 64)
    out = attend(builder.build(0, second), q, *new)
    token = 0
    for row, (query, end) in enumerate(((1, 6), (1, 20), (7, 7))):
        each = [t[row, :end].double().transpose(0, 1).repeat_interleave(2, 0) for t in (keys, values)]
        mask = torch.ones(query, end).tril(end - query).bool()
        part = q[token : token + query].double().transpose(0, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(part, *each, attn_mask=mask, scale=0.125)
        torch.testing.assert_close(out[token : token + query].double(), expected.transpose(0, 1), rtol=1e-5, atol=1e-6)
        token += query
    assert torch.equal(impl.forward(layer, q, *new, cache, None, out), torch.zeros(9, 4, 64))  # a profiling run
    seq_lens = torch.tensor([9, 9], dtype=torch.int32)
    captured = builder.build_for_cudagraph_capture(dataclasses.replace(common([0, 1, 2], [9, 9], [24, 56]), seq_lens=seq_lens))
    assert captured.num_decode_tokens == 2
    assert seq_lens.tolist() == [1, 1]
