"""The tables in the documentation are what their result files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.bench.pages import render
from headway.core.contract.errors import ConfigError
from headway.tuning.json_files import write_json
from tables import a_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_documents_tables_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert text.count("<!-- kernel ") >= 6
    assert render(text) == text


def test_a_stale_table_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert render(text.replace("| 1q1s512 | ", "| 1q1s512 | 1.0 (9999) ")) == text


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        render("<!-- kernel nowhere.json decode 32/8/128 -->\n<!-- end -->")


def test_a_throughput_table_is_made_anew_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr("headway.bench.pages.read_offline", lambda path: read.append(path) or "the report")
    monkeypatch.setattr("headway.bench.pages.read_peers", lambda path: read.append(path) or "the peers")
    monkeypatch.setattr("headway.bench.pages.markdown", lambda report, peers: f"{report} beside {peers}")
    text = "a\n<!-- throughput x.json p.json -->\nold\n<!-- end -->\nb\n<!-- throughput y.json -->\n<!-- end -->\n"
    assert render(text) == (
        "a\n<!-- throughput x.json p.json -->\n\nthe report beside the peers\n<!-- end -->\n"
        "b\n<!-- throughput y.json -->\n\nthe report beside None\n<!-- end -->\n"
    )
    assert sorted(map(str, read)) == ["p.json", "x.json", "y.json"]
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        render("<!-- throughput nowhere.json -->\n<!-- end -->")


def test_a_crossover_table_is_made_anew_between_its_markers(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_json(a_table(), path)
    text = render(f"a\n<!-- crossover {path} -->\nold\n<!-- end -->\nb\n")
    assert "old" not in text
    assert "| 4096 | 200.0 | **100.0** | b | 2.00x |" in text
    assert text.endswith("<!-- end -->\nb\n")
    assert render(text) == text
