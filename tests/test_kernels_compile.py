"""Every Triton kernel compiles for NVIDIA's GPUs, with the constants that launches have in life. None is needed, and none runs.

The interpreter, in which kernels are compared with float64, runs them as Python: it cannot see what Triton's compiler refuses.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable
from types import ModuleType

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

import headway.backends.states.triton
import headway.backends.triton
import headway.kernels.all_reduce
import headway.kernels.experts
import headway.kernels.linear
import headway.kernels.lora
import headway.kernels.sampling
import headway.kernels.step
from absent_gpu import SHARED_MEMORY, Capability, Compilations, absent_gpu, most_local_bytes
from attention_layer import AttentionLayer
from headway.backends.states.triton.backend import TritonStates
from headway.backends.triton.backend import FP8_CAPABILITY
from headway.backends.triton.tiles import parameter
from headway.core.contract.layout import NHD
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.kernels.linear.choice import spec_of
from headway.kernels.linear.forms import Operand
from headway.kernels.linear.tile_kernels import Tiles
from headway.kernels.runtime.triton_launch import INTERPRETED, PDL_CAPABILITY, Launcher
from headway.models.families.families import FAMILIES
from launched_kernels import (
    ATTENTION,
    BF16,
    FEW_ROWS,
    FP8,
    FP16,
    FP32,
    GPU,
    LIMITS,
    ROWS,
    STATES,
    STEPS,
    attend,
    choose_tokens,
    compute_quantized_experts,
    family,
    gate_outputs,
    multiply_invariant,
    multiply_quantized,
    run_adapted,
    run_model,
    run_states,
    shipped,
    sum_over_two_ranks,
    with_experts,
    with_latents,
)

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

HOPPER, ADA = (9, 0), (8, 9)
PACKAGES = (
    headway.kernels.all_reduce,
    headway.kernels.sampling,
    headway.backends.states.triton,
    headway.backends.triton,
    headway.kernels.experts,
    headway.kernels.linear,
    headway.kernels.step,
    headway.kernels.lora,
)


def launched_kernels() -> set[str]:
    """Names of all functions that Triton compiles but those that others of them call."""

    def modules(package: ModuleType) -> list[ModuleType]:
        return [importlib.import_module(each.name) for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]

    members = [value for package in PACKAGES for module in modules(package) for value in vars(module).values()]
    functions = [value for value in members if isinstance(value, triton.JITFunction)]
    called = {id(each.fn.__globals__.get(name)) for each in functions for name in each.fn.__code__.co_names}
    called.add(id(parameter))  # by the code of attention rules
    return {each.__name__ for each in functions if id(each) not in called}


def launch_every_kernel(
    attention: Iterable[str] = (
        "head 128",
        "head 128, rule",
        "head 64, sinks and window",
        "fp8 cache, vllm_5d",
        "int8 cache",
        "576/512",
        "head 64, bidirectional window",
    ),
) -> None:
    choose_tokens(151_936, BF16)
    gate_outputs(BF16)
    for dtype in (BF16, FP32):
        sum_over_two_ranks(dtype)
    multiply_quantized((1024, 1024), BF16, (1,))
    for shape, gated in (((1024, 3072), False), ((6144, 1024), True)):
        multiply_invariant(shape, gated, BF16, (1, 64, 300))
    compute_quantized_experts(BF16, (1, 300), every=5)
    run_model(shipped("qwen3-0.6b"), FP16, (1, 16, 40))
    for slots, rank in ((3, 16), (8, 64)):  # behind the weights, and apart
        run_adapted(shipped("qwen3-0.6b"), BF16, slots, rank)
    run_model(with_experts(), BF16, (2, 600), every=7)
    run_model(with_latents(), BF16, (2,))
    for name in attention:
        attend(*ATTENTION[name])
    for name in ("gated_delta", "mamba1"):
        run_states(*STATES[name])


def check(found: Compilations) -> None:
    assert found.variants
    assert not found.faults, "\n".join(found.faults)
    assert not found.too_large, found.too_large
    early = {constants["PDL"] for constants in found.constants if "PDL" in constants}
    assert early == {str(found.capability >= PDL_CAPABILITY)}
    assert {constants.get("enable_fp_fusion") for constants in found.constants} == {"True"}, "Triton 3.10 has another default"


def narrow_copies(found: Compilations) -> dict[str, int]:
    """Kernel -> most instructions of one of its variants that copy two bytes of the GPU's memory, where 16 lie together."""
    counts: dict[str, int] = {}
    for (name, *_), compiled in found.variants.items():
        narrow = len(re.findall(r"\b(?:ld|st)(?:\.volatile)?\.global\S*\.b16\s", compiled.asm["ptx"]))
        counts[str(name)] = max(counts.get(str(name), 0), narrow)
    return counts


@pytest.mark.slow
def test_sums_over_ranks_copy_whole_words() -> None:
    with absent_gpu(HOPPER) as found:
        for dtype in (BF16, FP16):
            sum_over_two_ranks(dtype)
    check(found)
    assert narrow_copies(found) == {"sum_over_ranks": 0, "sum_by_shares": 0, "sum_own_share": 0}


@pytest.mark.slow
def test_every_kernel_passes_the_compilers_front_end() -> None:
    with absent_gpu(HOPPER, whole=False) as found:
        launch_every_kernel(("head 128", "head 128, rule", "int8 cache", "576/512"))
    check(found)
    assert found.kernels == launched_kernels()
    assert len(found.kernels) == 58, "the number of kernels when this was written"


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability",
    [pytest.param(each, marks=() if each == HOPPER else pytest.mark.soak) for each in SHARED_MEMORY],
    ids="{0[0]}.{0[1]}".format,
)
def test_every_kernel_compiles(capability: Capability) -> None:
    with absent_gpu(capability) as found:
        launch_every_kernel()
    check(found)
    assert found.kernels == launched_kernels() - ({"quantize_rows"} if capability < FP8_CAPABILITY else set())
    assert all(found.variants.values())


@pytest.mark.slow
@pytest.mark.sampled(4, 1, then="soak")
@pytest.mark.parametrize("vocab_size", [512, 50_257, 128_256, 151_936])
def test_the_choice_of_tokens_compiles(vocab_size: int) -> None:
    with absent_gpu(HOPPER) as found:
        for dtype in (BF16, FP16, FP32):
            choose_tokens(vocab_size, dtype)
    check(found)


@pytest.mark.slow
@pytest.mark.sampled(3, 1, then="soak")
@pytest.mark.parametrize(("slots", "rank", "dtype"), [(8, 16, BF16), (1, 64, FP16), (64, 512, BF16), (2, 8, FP32)], ids=str)
@pytest.mark.parametrize("capability", [ADA, HOPPER], ids="{0[0]}.{0[1]}".format)
def test_what_adapters_add_compiles(capability: Capability, slots: int, rank: int, dtype: torch.dtype) -> None:
    with absent_gpu(capability) as found:
        run_adapted(shipped("llama-3-8b"), dtype, slots, rank)
    check(found)
    if dtype != FP32:
        added = {name: count for name, count in narrow_copies(found).items() if name.startswith(("expand", "shrink"))}
        assert added
        assert not any(added.values()), added


@pytest.mark.slow
@pytest.mark.sampled(4, 2, then="soak")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("capability", [ADA, HOPPER], ids="{0[0]}.{0[1]}".format)
def test_products_over_quantised_weights_compile(capability: Capability, dtype: torch.dtype) -> None:
    with absent_gpu(capability) as found:
        multiply_quantized((4096, 4096), dtype, (12, 40))
    check(found)


def test_tiles_of_a_weights_rows_compile_to_products_of_warpgroups() -> None:
    """W as the first operand, 64 rows of it by 16 of x."""
    with absent_gpu(HOPPER) as found:
        weight = torch.empty(5120, 2880, dtype=BF16, device=GPU)
        Tiles(spec_of(weight, BF16, GPU)).compute(torch.empty(16, 2880, dtype=BF16, device=GPU), Operand.of(weight, None))
    check(found)
    (compiled,) = found.variants.values()
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in compiled.asm["ptx"]


MANY_EXPERTS = {"deepseek_v3", "qwen3_next", "qwen3_5_moe_text", "kimi_linear", "gpt_oss"}


@pytest.mark.slow
@pytest.mark.sampled(9, then="soak")
@pytest.mark.parametrize("model", FAMILIES)
def test_what_stands_between_attentions_compiles(model: str) -> None:
    with absent_gpu(HOPPER) as found:
        run_model(family(model), BF16, FEW_ROWS if model in MANY_EXPERTS else ROWS)
    check(found)


@pytest.mark.slow
@pytest.mark.sampled(13, then="soak")
@pytest.mark.parametrize("capability", SHARED_MEMORY, ids="{0[0]}.{0[1]}".format)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_compiles(name: str, capability: Capability) -> None:
    with absent_gpu(capability) as found:
        attend(*ATTENTION[name])
    if ATTENTION[name][0].kv_dtype == FP8 and capability < FP8_CAPABILITY:
        assert not found.variants
        return
    check(found)
    if capability != HOPPER:  # whose tiles were measured
        for variant, compiled in found.variants.items():
            assert most_local_bytes(compiled.asm["cubin"]) <= 256, variant


@pytest.mark.parametrize("head_dim", [256, *(pytest.param(each, marks=pytest.mark.slow) for each in (64, 128))])
def test_verification_of_32_rows_does_not_spill(head_dim: int) -> None:
    """With twice the partial results per merge step, Triton 3.6 spills for each of these heads, and Triton 3.9 for 256."""
    with absent_gpu(HOPPER) as found:
        layer = AttentionLayer(AttentionSpec(32, 8, head_dim, head_dim**-0.5, BF16, GPU), NHD, 16, LIMITS)
        layer.step([8], [8000], [7])
    check(found)
    (compiled,) = (each for (name, *_), each in found.variants.items() if name == "split_kv_decode")
    assert most_local_bytes(compiled.asm["cubin"]) == 0


@pytest.mark.slow
@pytest.mark.sampled(5, then="soak")
@pytest.mark.parametrize("capability", [ADA, HOPPER], ids="{0[0]}.{0[1]}".format)
@pytest.mark.parametrize("name", STATES)
def test_layers_with_a_state_compile(name: str, capability: Capability, monkeypatch: pytest.MonkeyPatch) -> None:
    with absent_gpu(capability) as found:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            fits = TritonStates.supports(*STATES[name], Phase.PREFILL)
        assert fits or (name, capability) == ("kda, float32", ADA), fits.brief
        run_states(*STATES[name], steps=STEPS if fits else STEPS[:3])
    check(found)
    for variant, compiled in found.variants.items():
        assert most_local_bytes(compiled.asm["cubin"]) < 4096, variant  # 4 KB of each thread that an H100 holds are 1.1 GB


@pytest.mark.slow
@pytest.mark.sampled(11, then="soak")
@pytest.mark.parametrize("name", ATTENTION)
def test_all_that_attention_chooses_from_passes_the_front_end(name: str) -> None:
    with absent_gpu(HOPPER, whole=False) as found:
        attend(*ATTENTION[name], every=True)
    check(found)


@triton.jit
def changing(y, count):
    total = 0
    for _ in range(count):
        total = total + 0.5
    tl.store(y, total)


@triton.jit
def unassembled(y, count):
    number = tl.inline_asm_elementwise("nonsense $0, $1;", "=r,r", [count], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(y, number)


@triton.jit
def spacious(y, count, SIZE: tl.constexpr):
    tile = tl.zeros((SIZE, SIZE), tl.float16) + count
    tl.store(y, tl.sum(tl.sum(tl.dot(tile, tl.trans(tile)), 0), 0))


@pytest.mark.parametrize(
    ("kernel", "constants", "said"),
    [
        (changing, {}, "Loop-carried variable total has initial type int32 but is re-assigned to fp32"),
        (unassembled, {}, "Not a name of any known instruction: 'nonsense'"),
        pytest.param(spacious, {"SIZE": 256}, "bytes of shared memory, of 101376", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_that_a_gpu_would_refuse_is_told_in_a_line(kernel, constants, said, capfd: pytest.CaptureFixture[str]) -> None:
    with absent_gpu((8, 9)) as found:
        Launcher(kernel)("key", (1, 1, 1), (torch.empty(1, dtype=torch.float16, device=GPU), 3), constants, num_warps=4)
    (fault,) = [*found.faults, *found.too_large.get(kernel.__name__, [])]
    assert fault.startswith(f"{kernel.__name__} for 8.9 (")
    assert said in fault
    assert "\n" not in fault
    assert len(fault) < 500
    assert capfd.readouterr() == ("", "")
