"""The benchmark of experts away from a GPU: shapes, the table, and what is said beside the peers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from expert_layers import CONFIGS, Layer
from headway.bench.studies.command import study_app
from headway.bench.studies.experts import experts, print_report, ratios
from headway.bench.studies.experts_layer import ExpertsCell, ExpertsReport, grouped_mm, installed
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin
from headway.tuning.measure.device import identify_device
from headway.tuning.table.schema import DeviceInfo


def cell(way: str, tokens: int, us: float | None, peer: bool = False, reason: str = "") -> ExpertsCell:
    return ExpertsCell(
        way=way, peer=peer, shape="s", tokens=tokens, touched=7, median_us=us, layer_us=None if peer else us, reason=reason,
        relative_error=1e-3, bytes_share=None if us is None else 0.5, operations_share=None if us is None else 0.1,
    )  # fmt: skip


CELLS = [
    cell("a", 1, 10.0),
    cell("b", 1, 20.0),
    cell("lib", 1, 20.0, peer=True),
    cell("a", 64, 50.0),
    cell("b", 64, 40.0),
    cell("lib", 64, 20.0, peer=True),
    cell("other", 64, None, peer=True, reason="wrong answer"),
]


def test_ratios_are_of_the_best_of_ours() -> None:
    assert ratios(CELLS) == ["beside lib: 1.00 times as fast in the geometric mean, 0.50 at worst"]


def test_a_report_is_written_read_and_shown(tmp_path: Path) -> None:
    identity = identify_device(torch.device("cpu")).model_dump()
    device = DeviceInfo(**identity, copy_gbps=1.0, matrix_tflops=2.0, matrix_dtype="bfloat16")
    report = ExpertsReport(
        command="...", origin=Origin.here(), date="2026-11-22", dtype="bfloat16", device=device, read_gbps=3.0,
        libraries={"lib": "1.2"}, chosen={"s": "a from 1 tokens on"}, cells=CELLS,
    )  # fmt: skip
    write_json(report, tmp_path / "experts.json")
    console = Console(width=160, record=True)
    print_report(ExpertsReport.read(tmp_path / "experts.json"), console)
    shown = console.export_text()
    for text in ("10.0 (10.0) · 50%", "other, s, 64 tokens: wrong answer", "auto: a from 1 tokens on", "lib 1.2"):
        assert text in shown


def test_without_a_gpu_the_study_is_refused() -> None:
    done = CliRunner().invoke(study_app(experts), ["--device", "cpu"])
    assert isinstance(done.exception, ConfigError)
    assert "needs a GPU" in str(done.exception)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_the_peer_that_is_torch_alone_is_right(name: str) -> None:
    pytest.importorskip("triton")
    from headway.kernels.experts.plain import PlainExperts, route
    from headway.kernels.experts.route_kernels import Routed

    peers, versions = installed()
    assert set(versions) == {"torch", "vllm", "flashinfer"}
    if not any(peer.name.startswith("torch") for peer in peers):
        pytest.skip("torch has no grouped product")
    layer = Layer(CONFIGS[name], torch.bfloat16)
    weights, x = layer.weights(torch.bfloat16), layer.draw(9, 48).bfloat16()
    routing = route(torch.nn.functional.linear(x, weights.router), CONFIGS[name])
    found = grouped_mm().make(CONFIGS[name], weights)(Routed(x, routing.experts, routing.weights, None, 0))
    expected = PlainExperts(CONFIGS[name], weights).apply(x, routing, lambda rows, of: of(rows))
    assert (found - expected).float().norm() / expected.float().norm() < 2e-2
