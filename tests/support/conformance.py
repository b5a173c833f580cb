"""The conformance grid: every available backend against float64, on the device of the module that imports these tests.

A module takes part with `DEVICE = "cpu"` or `"cuda"` and an import of `pytest_generate_tests` and the tests:
tests/gpu/test_grid.py and tests/backends/test_conformance.py run the same checks. `cover` says which cells, and why those.
"""

from __future__ import annotations

import dataclasses
from itertools import permutations

import pytest
import torch

import cover
from conformance_cases import FP8, OPTIONS, make_grid_case, make_spec
from cover import Cell, registry
from gridlog import GridLog
from headway.core.contract.backend import AttentionBackend, GraphLevel
from headway.core.contract.layout import CacheGeometry
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.testing.cases import Case
from headway.testing.reference import reference, relative_error, run_backend

CHANGE = 1e-3
"""Smallest relative change of the output that an accepted option must make."""
GRAPH_ROWS = 6
GRAPH_LONGEST = 2048


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill each test's argument with the cells of the module's device."""
    device = metafunc.module.DEVICE
    if device == "cuda" and not torch.cuda.is_available():  # one skipped test a function says so
        names = [name for name in ("cell", "pair", "name", "rows") if name in metafunc.fixturenames]
        if names:
            metafunc.parametrize(names[0], [None])
        return
    backends, mine = cover.backends(device), cover.chosen(device)
    if "cell" in metafunc.fixturenames:
        source = {
            "test_answer": cover.answers,
            "test_a_value_that_is_not_claimed_is_refused": cover.refusals,
            "test_an_accepted_option_changes_the_output": _option_cells,
            "test_a_graph_captured_at_the_longest_is_right_at_any_length": _graph_cells,
        }[metafunc.function.__name__]
        cells = [cell for name in mine for cell in source(name, device)]
        metafunc.parametrize("cell", cells, ids=str)
    elif "pair" in metafunc.fixturenames:
        pairs = [(*pair, layout) for pair in permutations(backends, 2) for layout in registry().layouts]
        pairs = [pair for pair in pairs if pair[0] in mine and _common_block(*pair, device)]
        metafunc.parametrize("pair", pairs, ids=lambda pair: "-".join(pair))
    elif "name" in metafunc.fixturenames:
        metafunc.parametrize("name", list(registry().backends))
    elif "rows" in metafunc.fixturenames:
        rows = [(layout, dtype) for layout in registry().layouts for dtype in (*cover.DTYPES, "float8_e4m3fn")]
        metafunc.parametrize("rows", rows, ids="-".join)


def test_availability_is_yes_or_has_reasons(request: pytest.FixtureRequest, grid_log: GridLog, name: str) -> None:
    device = request.module.DEVICE
    support = registry().availability(name)
    with grid_log.cell(device, check="available", backend=name) as outcome:
        if support and name not in cover.backends(device):
            claims = registry().backend(name).capabilities
            support = Support.no("device", " or ".join(claims.devices), device)
        _refused_with_reasons(support)
        assert not support or cover.answers(name, device), "it is available, and serves nothing of the grid"
        if not support:
            outcome.refuse(support)


def test_answer(request: pytest.FixtureRequest, grid_log: GridLog, cell: Cell) -> None:
    with grid_log.cell(request.module.DEVICE, check="answer", backend=cell.backend, **cell.axes) as outcome:
        case = case_of(cell, request.module.DEVICE)
        backend = backend_of(cell.backend, case)
        before = case.cache.key.clone(), case.cache.value.clone()
        out = run_backend(backend, case)
        outcome.compare(relative_error(out, reference(case), case), backend.tolerance[case.spec.dtype])
        for ours, theirs in zip(before, (case.cache.key, case.cache.value), strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), "a backend must not write to the cache"


def test_a_value_that_is_not_claimed_is_refused(request: pytest.FixtureRequest, grid_log: GridLog, cell: Cell) -> None:
    device = request.module.DEVICE
    with grid_log.cell(device, check="claim", backend=cell.backend, about=cell.about, **cell.axes) as outcome:
        support = Support()
        for phase in cover.PHASES[cell.phase]:
            support &= supports(cell.backend, spec_of(cell, device), cell, phase)
        assert not support, f"{cell.about}={getattr(cell, cell.about)} is accepted"
        _refused_with_reasons(support)
        outcome.refuse(support)


def test_an_accepted_option_changes_the_output(request: pytest.FixtureRequest, grid_log: GridLog, cell: Cell) -> None:
    device = request.module.DEVICE
    with grid_log.cell(device, check="option", backend=cell.backend, **cell.axes):
        plain = dataclasses.replace(cell, feature="none")
        first, second = (case_of(some, device) for some in (plain, cell))
        outs = [run_backend(backend_of(cell.backend, case), case) for case in (first, second)]
        error = relative_error(outs[1], outs[0].double(), second)
        assert error > CHANGE, f"{cell.feature} changes the output by {error:.3g} only"


def test_two_backends_take_turns_on_one_cache(
    request: pytest.FixtureRequest, grid_log: GridLog, pair: tuple[str, str, str]
) -> None:
    device, (one, other, layout) = request.module.DEVICE, pair
    block_size = _common_block(one, other, layout, device)
    cell = _shared_cell(one, other, layout, device)
    axes = {**cell.axes, "phase": "mixed", "block_size": block_size}
    with grid_log.cell(device, check="alternate", backend=f"{one} > {other}", **axes) as outcome:
        shared = dataclasses.replace(cell, phase="mixed", block_size=block_size)
        case = case_of(shared, device, any(_reads_whole_blocks(name) for name in (one, other)))
        expected, served = reference(case), 0
        for prefill, decode in ((one, other), (other, one), (one, one)):
            wanted = ((prefill, case.metadata.prefill), (decode, case.metadata.decode))
            if not all(view is None or supports(name, case.spec, shared, view.phase) for name, view in wanted):
                continue
            parts = [registry().backend(name)(case.spec, case.cache.layout, block_size) for name in (prefill, decode)]
            limit = max(part.tolerance[case.spec.dtype] for part in parts)
            outcome.compare(relative_error(run_pair(*parts, case), expected, case), limit, f"with {prefill}, {decode}")
            served += 1
        if not served:
            outcome.refuse(Support.no("phase", "one to prefill and one to decode", f"{one} and {other}"))


def test_a_graph_captured_at_the_longest_is_right_at_any_length(
    request: pytest.FixtureRequest, grid_log: GridLog, cell: Cell
) -> None:
    """The plan is made once, on metadata whose tensors are refreshed in place: lengths and block tables, as an engine does it."""
    device = request.module.DEVICE
    with grid_log.cell(device, check="graph", backend=cell.backend, **cell.axes) as outcome:
        level = registry().backend(cell.backend).graph_level
        need = GraphLevel.DECODE if cell.phase == "decode" else GraphLevel.UNIFORM
        if level < need:
            outcome.refuse(Support.no("graph_level", need.name, level.name))
            return
        tokens = 1 if cell.phase == "decode" else 4
        case = case_of(cell, device, lens=[(tokens, GRAPH_LONGEST)] * GRAPH_ROWS, decode_query_len=tokens)
        backend, static, out = backend_of(cell.backend, case), case.metadata, torch.empty_like(case.q)
        plan = backend.plan(static)
        backend.decode(case.q, case.cache, plan, out)  # compiles, and allocates what is allocated once
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backend.decode(case.q, case.cache, plan, out)
        tables = static.block_table_cpu.tolist()
        for turn, lens in enumerate(_graph_lengths(tokens)):
            rotated = tables[turn:] + tables[:turn]  # a row's blocks are another sequence's now
            contexts = [length - tokens for length in lens]
            now = AttentionMetadata.build([tokens] * len(lens), contexts, rotated, cell.block_size, case.spec.device, tokens)
            for name in ("seq_lens", "context_lens", "block_table", "query_start_loc"):
                getattr(static, name).copy_(getattr(now, name))
            out.fill_(torch.nan)
            graph.replay()
            replayed = dataclasses.replace(case, metadata=now)
            error = relative_error(out, reference(replayed), replayed)
            outcome.compare(error, backend.tolerance[case.spec.dtype], f"at lengths {lens}")


@pytest.mark.parametrize("head_dim", [80, 128])
def test_written_rows_read_back_exactly(
    request: pytest.FixtureRequest, grid_log: GridLog, rows: tuple[str, str], head_dim: int
) -> None:
    device, (layout_name, dtype_name) = request.module.DEVICE, rows
    axes = {"layout": layout_name, "dtype": dtype_name, "block_size": 16, "head_dim": head_dim}
    with grid_log.cell(device, check="writer", backend="writer", **axes):
        for tokens in (1, 300, 5000):
            _write_and_read(layout_name, getattr(torch, dtype_name), head_dim, tokens, cover.device_of(device))


def _write_and_read(layout: str, dtype: torch.dtype, head_dim: int, tokens: int, device: torch.device) -> None:
    """Write `tokens` rows and a skipped one to shuffled slots of a zeroed cache; look at these slots and at all others."""
    info, num_slots = registry().layout(layout), 400 * 16
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(num_slots, generator=generator)[: tokens + 1].to(device)
    slots[tokens // 2] = -1
    source = torch.bfloat16 if dtype == FP8 else dtype
    scales = (0.5, 2.0) if dtype == FP8 else (1.0, 1.0)
    k, v = (torch.randn(tokens + 1, 2, head_dim, generator=generator).to(device, source) for _ in range(2))
    cache = info.layout.allocate(CacheGeometry(400, 16, 2, head_dim, dtype, device), *scales)
    info.load_writer(device)(k, v, cache, slots)
    kept = slots >= 0
    others = torch.ones(num_slots, dtype=torch.bool)
    others[slots[kept].cpu()] = False
    for given, read, scale in zip((k, v), cache.gather(slots[kept]), scales, strict=True):
        expected = (given[kept].float() / scale).to(dtype)
        assert torch.equal(read.float(), expected.float()), f"{tokens} rows come back changed"
    untouched = cache.gather(others.nonzero().flatten().to(device))
    assert not any(rest.float().any() for rest in untouched), "a slot that was not named is written"


def spec_of(cell: Cell, device: str) -> AttentionSpec:
    """The layer of a cell."""
    claims = registry().backend(cell.backend).capabilities.features
    return make_spec(cell.head_dim, cell.group, cell.dtype, cell.feature, device, claims)


def case_of(cell: Cell, device: str, whole_blocks: bool | None = None, **changes: object) -> Case:
    """The cache and the step of a cell; whole_blocks as the cell's backend declares it."""
    layout, spec = registry().layout(cell.layout), spec_of(cell, device)
    finite = _reads_whole_blocks(cell.backend) if whole_blocks is None else whole_blocks
    return make_grid_case(cell.phase, spec, layout.layout, cell.block_size, layout.load_writer(spec.device), finite, **changes)


def backend_of(name: str, case: Case) -> AttentionBackend:
    """An instance, after the claim was asked."""
    for view in (case.metadata.prefill, case.metadata.decode):
        if view is not None:
            support = registry().supports(name, case.spec, case.cache.layout, case.cache.block_size, view.phase)
            assert support, str(support)
    return registry().backend(name)(case.spec, case.cache.layout, case.cache.block_size)


def run_pair(prefill: AttentionBackend, decode: AttentionBackend, case: Case) -> torch.Tensor:
    """One mixed step through two backends, as the engine splits it."""
    metadata, out, n = case.metadata, torch.full_like(case.q, torch.nan), case.metadata.num_prefill_tokens
    assert metadata.prefill is not None
    assert metadata.decode is not None
    prefill.prefill(case.q[:n], case.k[:n], case.v[:n], case.cache, prefill.plan(metadata.prefill), out[:n])
    decode.decode(case.q[n:], case.cache, decode.plan(metadata.decode), out[n:])
    return out


def supports(name: str, spec: AttentionSpec, cell: Cell, phase: Phase) -> Support:
    """The claim for a layer at a cell's layout and block size."""
    return registry().supports(name, spec, registry().layout(cell.layout).layout, cell.block_size, phase)


def _refused_with_reasons(support: Support) -> None:
    for reason in support.reasons:
        assert reason.what, reason
        assert reason.need, reason
        assert reason.got, reason


def _reads_whole_blocks(name: str) -> bool:
    return registry().backend(name).capabilities.reads_whole_blocks


def _option_cells(name: str, device: str) -> list[Cell]:
    cells = [cover.first(name, device, phase=phase, feature=option) for option in OPTIONS for phase in ("prefill", "decode")]
    return [cell for cell in cells if cell is not None]


def _graph_cells(name: str, device: str) -> list[Cell]:
    """For what the level allows every value of every axis; for what it does not, one cell to say so."""
    cells: list[Cell] = []
    for phase, need in (("decode", GraphLevel.DECODE), ("verify", GraphLevel.UNIFORM)):
        able = registry().backend(name).graph_level >= need
        some = cover.each_value(name, device, phase) if able else [cover.first(name, device, phase=phase)]
        cells += [cell for cell in some if cell is not None]
    return cells


def _graph_lengths(tokens: int) -> list[list[int]]:
    longest = [GRAPH_LONGEST] * GRAPH_ROWS
    ragged = [tokens + 1, 17, 64, 65, 129, GRAPH_LONGEST - 1]
    return [longest, ragged, [0, 100, 0, 1000, 33, 0], [GRAPH_LONGEST] + [tokens + 1] * (GRAPH_ROWS - 1)]


def _shared_cell(one: str, other: str, layout: str, device: str) -> Cell:
    found = [cover.first(name, device, layout=layout, feature="none") for name in (one, other)]
    assert found[0] is not None
    return found[0]


def _common_block(one: str, other: str, layout: str, device: str) -> int:
    """The smallest block size at which both read a cache of this layout; 0 where there is none."""
    blocks = [
        {
            int(block)
            for block in cover.values(name)["block_size"]
            for phase in ("mixed", "extend", "decode")
            if cover.first(name, device, phase=phase, layout=layout, block_size=block)
        }
        for name in (one, other)
    ]
    return min(blocks[0] & blocks[1], default=0)
