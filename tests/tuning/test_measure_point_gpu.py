"""The kernel level on a GPU: decode is timed as a graph's replay, and right."""

from __future__ import annotations

import pytest
import torch

from headway.core.contract.layout import NHD
from headway.core.oracle.cases import reference, relative_error
from headway.registry import Registry
from headway.tuning.measure.contender import captures, checked, graph_contender
from headway.tuning.measure.points import Point
from headway.tuning.measure.run import run_kernel_level
from headway.tuning.measure.timing import InterleavedTimer
from headway.tuning.measure.workloads import Geometry, build_case, make_spec, make_work
from tables import quick

pytestmark = pytest.mark.gpu
GEOMETRY = Geometry(8, 2, 64)
POINTS = [Point("decode", 4, 1, 100), Point("verify", 2, 4, 70), Point("prefill", 2, 50, 50), Point("extend", 2, 9, 60)]


def test_the_table_of_a_gpu_has_graphs_and_host_times(registry: Registry) -> None:
    spec = make_spec(GEOMETRY, torch.bfloat16, None, torch.device("cuda"))
    table = run_kernel_level(
        quick(spec=spec, backends=["triton", "sdpa"], grid=POINTS, timer=InterleavedTimer(1, 0.1), graph_len=512), registry
    )
    assert table.complete
    assert table.graph_len == 512
    for cell in table.cells:
        assert cell.median_us is not None, cell.reason
        assert cell.relative_error <= cell.tolerance
        assert cell.graph == (cell.kernel == "triton" and cell.phase in ("decode", "verify"))
        assert cell.graph or cell.status == "dropped" or cell.host_us > 0


@pytest.mark.parametrize("text", ["4q1s100", "2q4s70", "1q1s3_1q1s500"])
def test_a_replay_is_right_at_lengths_other_than_the_captured_one(registry: Registry, text: str) -> None:
    spec = make_spec(GEOMETRY, torch.bfloat16, None, torch.device("cuda"))
    case = build_case(make_work("decode", text, GEOMETRY, spec), NHD, 16, seed=0)
    expected = reference(case)
    backend = registry.backend("triton")(spec, NHD, 16)
    assert captures(backend, case)
    contender = graph_contender(backend, case, lambda out: relative_error(out, expected, case), graph_len=1024)
    assert checked(contender) <= contender.tolerance
    assert checked(contender) <= contender.tolerance  # a second replay into poison


def test_a_backend_is_captured_and_replayed_by_the_calls_that_the_engine_makes(registry: Registry) -> None:
    spec = make_spec(GEOMETRY, torch.bfloat16, None, torch.device("cuda"))
    case = build_case(make_work("decode", "4q1s100", GEOMETRY, spec), NHD, 16, seed=0)
    seen = []

    class Recording(registry.backend("triton")):
        def plan_for_capture(self, metadata):
            seen.append((metadata, metadata.seq_lens.clone(), metadata.slot_mapping.clone()))
            return super().plan_for_capture(metadata)

        def plan_for_replay(self, plan, metadata):
            seen.append((metadata, metadata.seq_lens.clone(), metadata.slot_mapping.clone()))
            super().plan_for_replay(plan, metadata)

    graph_contender(Recording(spec, NHD, 16), case, lambda out: 0.0, graph_len=1024)
    (captured, lens, slots), (replayed, new_lens, new_slots) = seen
    assert captured.seq_lens_cpu.tolist() == [1024] * 4
    assert replayed.seq_lens_cpu.tolist() == [100] * 4
    assert (captured.max_seq_len, replayed.max_seq_len) == (1024, 1024)
    assert (lens.tolist(), slots.tolist()) == ([0] * 4, [-1] * 4)  # padding rows, as in an engine's first run
    assert (new_lens.tolist(), new_slots.tolist()) == ([100] * 4, case.metadata.slot_mapping.tolist())
    for name in ("seq_lens", "context_lens", "block_table", "slot_mapping"):
        assert getattr(captured, name).data_ptr() == getattr(replayed, name).data_ptr()
