"""The second product of a single token's experts, as far as no GPU is needed: leave, cuts, and that sources compile."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from cubin_registers import blocks_that_fit, most_local_bytes, most_registers
from headway.backends.nvrtc.compiler import find_compiler
from headway.backends.probe import UNTRIED
from headway.models.experts.config import ExpertsConfig
from headway.models.experts.cuda_rows import computes_token
from headway.models.experts.cuda_variant import ExpertVariant, expert_rows_cut, expert_variant
from headway.models.experts.token_variant import TokenVariant, expert_token_cut
from headway.models.fused.cuda_arranged import ArrangedWeight
from host_experts import GPT_OSS, PUBLISHED, QWEN3, described

MULTIPROCESSORS = 132
"""Of an H100."""
SHARED_BYTES, RESERVED_BYTES, REGISTERS = 228 * 1024, 1024, 64 * 1024
"""Of a multiprocessor; what it takes of shared memory for each block of threads besides."""
SHAPES = {
    **PUBLISHED,
    "mixtral": (ExpertsConfig(8, 2, 14336), 4096),
    "deepseek": (dataclasses.replace(QWEN3, num_experts=256, intermediate_size=2048, shared_intermediate_size=2048), 7168),
    "llama4": (ExpertsConfig(16, 1, 8192, shared_intermediate_size=8192), 5120),
    "qwen3_next": (ExpertsConfig(512, 10, 512, shared_intermediate_size=512), 2048),
}
FORMS = "fp8 blocks", "fp8 rows", "mxfp4", "int4"
ABLE = [(form, shape) for form, shape in product(FORMS, SHAPES) if form != "fp8 blocks" or shape not in ("rank", "gpt_oss")]
"""Blocks of 128 columns fill no row of 96 or 2,880."""
EVERYDAY = ("fp8 blocks", "qwen3"), ("mxfp4", "gpt_oss")


def variants(form: str, shape: str) -> tuple[ExpertVariant, ExpertVariant]:
    """The first product of a token, and the second, as launches make them."""
    config, hidden = SHAPES[shape]

    def variant(columns: int, rows: int, first: bool) -> ExpertVariant:
        weight, scales = described(form, columns)
        codes = torch.empty(config.num_all * rows, 1, dtype=torch.uint8, device="meta")
        read = ArrangedWeight(weight, codes, torch.empty(1, dtype=scales, device="meta"))
        how = (expert_rows_cut, ExpertVariant) if first else (expert_token_cut, TokenVariant)
        return expert_variant(config, read, torch.bfloat16, 1, first, config.biases, MULTIPROCESSORS, *how)

    return variant(hidden, config.up_size, True), variant(config.intermediate_size, hidden, False)


@pytest.mark.parametrize(("form", "shape"), ABLE)
def test_a_block_has_room_beside_one_of_the_first_product_and_beside_one_of_its_own(form: str, shape: str) -> None:
    first, second = variants(form, shape)
    each, sharing = second.shared_bytes + RESERVED_BYTES, second.cluster[1]
    assert first.shared_bytes + RESERVED_BYTES + each * sharing <= SHARED_BYTES
    assert (sharing + 1) * each <= SHARED_BYTES, "of halves three"


@pytest.mark.parametrize(("form", "shape"), ABLE)
def test_each_row_has_a_block_of_threads_and_each_slice_a_warp(form: str, shape: str) -> None:
    second, (config, hidden) = variants(form, shape)[1], SHAPES[shape]
    cut, (tiles, sharing, _) = second.each.cut, second.grid(MULTIPROCESSORS)
    assert hidden <= tiles * 16 * cut.tiles < hidden + 16 * cut.tiles
    assert tiles * sharing <= (3 if sharing > 1 else 2) * MULTIPROCESSORS, "all blocks of threads are resident at once"
    slices = config.num_slots * -(-second.each.weight.row // 64)
    run = -(-slices // (sharing * cut.warps))
    assert run * sharing * cut.warps <= max(2, 1.1 * slices), "few warps wait for others"
    deeper = second.shared_bytes * (cut.stages + 1) / cut.stages
    assert cut.stages == run or deeper > (74 if sharing > 1 else 112) * 1024, "rings are as deep as there is room"


def test_all_codes_of_published_experts_are_asked_for_before_the_first_product_has_ended() -> None:
    for form, shape in (("fp8 blocks", "qwen3"), ("mxfp4", "gpt_oss"), ("fp8 blocks", "qwen3_next")):
        second = variants(form, shape)[1]
        slices = second.slots * -(-second.each.weight.row // 64)
        assert second.cluster[1] * second.each.cut.warps * second.each.cut.stages >= slices


@pytest.mark.parametrize(
    ("form", "shape"), [pair if pair in EVERYDAY else pytest.param(*pair, marks=pytest.mark.slow) for pair in ABLE]
)
def test_sources_compile_and_keep_to_registers(form: str, shape: str) -> None:
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    first, second = variants(form, shape)
    cubin = second.source.compile("sm_90a", compiler)
    assert most_local_bytes(cubin) == 0
    assert blocks_that_fit(cubin, second.threads) >= second.resident >= (3 if second.cluster[1] > 1 else 2)
    beside = most_registers(first.source.compile("sm_90a", compiler)) * first.threads
    assert beside + most_registers(cubin) * second.threads <= REGISTERS, "beside a block of the first product"


def test_it_takes_part_with_leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNTRIED, raising=False)
    cpu = torch.device("cpu")
    assert f"{UNTRIED}=1 lets it take part" in str(computes_token(GPT_OSS, cpu))
    monkeypatch.setenv(UNTRIED, "1")
    told = str(computes_token(dataclasses.replace(QWEN3, top_k=32), cpu))
    assert UNTRIED not in told
    assert "device: needs a GPU of compute capability 9.0 or newer with 112 KiB of shared memory" in told
    assert "experts of a token: needs up to 31, got 32" in told
