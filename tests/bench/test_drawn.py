"""What the pictures say: titles, axes and units, ties, and what has no number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.bench.crossover import plot as curves
from headway.bench.crossover.report import view
from headway.bench.diff import results as report
from headway.bench.diff.results import DiffReport
from headway.core.contract.errors import ConfigError
from tables import a_cell, a_table

pytest.importorskip("matplotlib", reason="the extra plot is not installed")
ROOT = Path(__file__).resolve().parents[2]


def texts(figure: Any) -> list[str]:
    from matplotlib.text import Text

    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def lines(axis: Any) -> list[tuple[list[float], list[float]]]:
    """Coordinates of the lines of more than one point."""
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines if len(line.get_xdata()) > 1]


def test_a_curve_for_each_backend_has_its_times_at_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "png", lambda figure: figure)
    figure: Any = curves.to_curves(view(a_table()))
    (axis, *_) = figure.axes
    assert lines(axis) == [([64, 4096], [10.0, 200.0]), ([64, 4096], [30.0, 100.0])]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    said = texts(figure)
    for word in ("time of one layer (us)", "cached tokens of each sequence", "1 sequence", "a", "b", "tie: cannot be told apart"):
        assert word in said
    assert any("measured 2026-11-21" in text and "kv_layout nhd, block_size 16" in text for text in said)


def test_a_tie_is_shaded_and_a_rough_time_is_hollow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "png", lambda figure: figure)
    cells = [
        a_cell(us, kernel=name, case=f"1q1s{kv_len}", kv_len=kv_len, status=status, reason="slow" * (status == "dropped"))
        for kv_len, times in ((64, ((10.0, "ok"), (10.05, "tie"))), (4096, ((20.0, "ok"), (100.0, "dropped"))))
        for name, (us, status) in zip("ab", times, strict=True)
    ]
    figure: Any = curves.to_curves(view(a_table(*cells)))
    assert len(figure.axes[0].patches) == 1
    assert "a slower candidate, few runs" in texts(figure)
    faces = [line.get_markerfacecolor() for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert faces.count("white") == 1


def test_a_table_of_single_lengths_has_no_curves() -> None:
    with pytest.raises(ConfigError, match="at several lengths"):
        curves.to_curves(view(a_table(a_cell())))


@pytest.mark.slow
def test_a_comparison_is_drawn_with_its_tolerance_and_what_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "png", lambda figure: figure)
    found = json.loads((ROOT / "bench/results/cpu/diff-fp8.json").read_text())
    found["phases"][2]["layers"][3] |= {"relative_error": None, "heads": [None] * 9}
    figure: Any = report.to_png(DiffReport.model_validate(found))
    said = texts(figure)
    assert any(text.startswith("sdpa with a fp8_e4m3 cache against sdpa: beyond the declared tolerance") for text in said)
    assert sum(text == "relative error" for text in said) == 3
    assert any("no number in layers 3" in text for text in said)
    whole = found["phases"][0]["layers"]
    assert ([layer["layer"] for layer in whole], [layer["relative_error"] for layer in whole]) in lines(figure.axes[0])
    assert ([0, 1], [4e-6, 4e-6]) in lines(figure.axes[0])
