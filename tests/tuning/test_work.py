"""Cells of the kernel benchmark: what is in their caches, how much work they are, and what one timed call consists of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backend_cases import LAYOUTS, spec
from headway.backends.sdpa import SDPA
from headway.core.contract.layout import HND, NHD, VLLM_5D, LayerCache, write_rows
from headway.core.oracle.cases import make_case, parse_case, reference, relative_error, run_backend
from headway.registry import Registry
from headway.tuning.measure.contender import backend_contender, checked, writer_contender
from headway.tuning.measure.workloads import Geometry, build_case, build_write
from tiny_bench import CPU, cell_of


@pytest.mark.parametrize("layout", [NHD, HND, VLLM_5D], ids=lambda layout: layout.name)
def test_a_writer_that_forgets_or_strays_is_wrong(registry: Registry, layout: object) -> None:
    right = registry.layout(layout.name).load_writer(CPU)

    def forgets(k, v, cache, slots):
        right(k[1:], v[1:], cache, slots[1:])

    def strays(k, v, cache, slots):
        right(k, v, cache, slots)
        cache.logical_value[slots[0] // cache.block_size - 1, 15] = 1

    case = build_write(cell_of("write", "1q20_3q1s17"), layout, 16, seed=0)
    for writer, wrong in ((right, False), (forgets, True), (strays, True)):
        contender = writer_contender(writer, case)
        contender.poison()
        assert (contender.error(contender.call()) > contender.tolerance) is wrong


@pytest.mark.parametrize("case", ["3q1s40_1q1s7", "2q4s21"])
@pytest.mark.parametrize("layout", [HND, VLLM_5D], ids=lambda layout: layout.name)
def test_every_layout_and_block_size_holds_the_same_numbers(registry: Registry, case: str, layout: object) -> None:
    cell = cell_of("decode", case)
    first, second = build_case(cell, NHD, 16, seed=3), build_case(cell, layout, 8, seed=3)
    assert torch.equal(first.q, second.q)
    assert torch.equal(first.k, second.k)
    assert torch.equal(reference(first), reference(second))
    k, v = first.cache.gather(first.metadata.slot_mapping)
    assert torch.equal(k, first.k)
    assert torch.equal(v, first.v)
    out = run_backend(registry.backend("sdpa")(cell.spec, layout, 8), second)
    assert relative_error(out, reference(first), first) < 1e-6
    assert not torch.equal(first.q, build_case(cell, NHD, 16, seed=4).q)


def test_bytes_and_operations_by_hand() -> None:
    big = Geometry(32, 8, 128)
    decode = cell_of("decode", "256q1s8k", big, dtype=torch.bfloat16)
    assert decode.kv_bytes == 8_589_934_592  # 256 * 8192 tokens of 2 * 8 * 128 * 2 bytes
    assert cell_of("decode", "1q1s3_2q1s5", dtype=torch.float32).kv_bytes == 13 * 512
    assert cell_of("decode", "1q1s3", dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn).kv_bytes == 3 * 128
    assert cell_of("prefill", "1q1").flops == 4 * 32 * 4  # one query sees one key
    assert cell_of("prefill", "1q3").flops == 4 * 32 * 4 * (1 + 2 + 3)
    assert cell_of("prefill", "2q2s5").flops == 4 * 32 * 4 * 2 * (4 + 5)
    assert cell_of("prefill", "1q8k", big).flops == 549_822_922_752  # 4 * 128 * 32 * 8192 * 8193 / 2
    write = cell_of("write", "64q1s1k", big, dtype=torch.bfloat16)
    assert write.write_bytes == 64 * 2 * 8 * 128 * 2 * 2
    assert cell_of("write", "8q1s9", dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn).write_bytes == 8 * 128 * (2 + 1)


@pytest.mark.parametrize(("n", "kv_len", "window"), [(1, 9, 4), (6, 6, 4), (3, 9, 4), (5, 9, 7), (2, 3, 8)])
def test_keys_outside_the_window_are_no_work(n: int, kv_len: int, window: int) -> None:
    step = cell_of("prefill" if n > 1 else "decode", f"1q{n}s{kv_len}" if n < kv_len else f"1q{n}", dtype=torch.float32)
    spec = replace(step.spec, sliding_window=window)
    ago = [[query - key for key in range(kv_len)] for query in range(kv_len - n, kv_len)]
    assert replace(step, spec=spec).flops == 4 * 32 * 4 * sum(0 <= each < window for row in ago for each in row)
    assert replace(step, spec=spec).kv_bytes == 512 * sum(any(0 <= row[key] < window for row in ago) for key in range(kv_len))
    if n == kv_len:
        both = replace(step, spec=replace(spec, dense=True, causal=False))
        assert both.flops == 4 * 32 * 4 * sum(abs(each) < window for row in ago for each in row)


def test_an_fp8_cell_keeps_what_a_dense_prefill_sees() -> None:
    """k and v of the step are the rounded values, so that a dense and a paged prefill have one right answer."""
    cell = cell_of("prefill", "1q20", dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    case = build_case(cell, NHD, 32, seed=0)
    (block,) = case.metadata.block_table_cpu[0].tolist()
    assert case.cache.key.dtype == torch.float8_e4m3fn
    assert cell.spec.k_scale != cell.spec.v_scale
    assert torch.equal(case.cache.key[block, :20].float() * cell.spec.k_scale, case.k.float())
    assert torch.equal(case.cache.value[block, :20].float() * cell.spec.v_scale, case.v.float())


class Writes(SDPA):
    """Writes in decode; not as fast as it might."""

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: object, out: Tensor) -> None:
        self.writes += 1
        self.decode(q, cache, plan, out)


@pytest.mark.parametrize("decode_writes", [False, True])
@pytest.mark.parametrize(
    ("text", "most", "written"), [("3q1s20", 1, True), ("2q4s20", 4, False), ("2q9", 1, False), ("2q4s20", 1, False)]
)
def test_a_backend_that_writes_in_decode_does_so_where_the_write_counts(
    text: str, most: int, written: bool, decode_writes: bool
) -> None:
    case = make_case(parse_case(text, most), spec(), LAYOUTS[0], 16, write_rows, decode_query_len=most)
    expected = reference(case)
    backend = Writes(case.spec, LAYOUTS[0], 16)
    backend.decode_writes, backend.writes = decode_writes, 0
    calls = []
    for writer in (None, lambda *_: calls.append("write")):
        contender = backend_contender(backend, case, lambda out: relative_error(out, expected, case), writer)
        assert checked(contender) < 1e-5
    assert (backend.writes, len(calls)) == ((1, 0) if written and decode_writes else (0, 1))
    assert not torch.isnan(contender.call()).any()
