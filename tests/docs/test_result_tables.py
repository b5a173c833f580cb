"""The tables in the documentation are what their result files say."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.bench.generate.results import OfflineReport, PeersFile
from headway.bench.kernel.results import KernelCell
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin
from result_tables import render, shares_of_fastest
from tables import a_table

ROOT = Path(__file__).resolve().parents[2]


REPORT = SimpleNamespace(date="2026-01-02T00:00:00+00:00", origin=None)
PAGES = [ROOT / "docs" / "benchmarks.md", *sorted((ROOT / "docs" / "benchmarks").glob("*.md"))]


def test_the_documents_tables_are_those_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    texts = {page.name: page.read_text() for page in PAGES}
    assert sum(text.count("<!-- kernel ") for text in texts.values()) >= 6
    for name, text in texts.items():
        assert render(text) == text, name


def test_a_stale_table_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "benchmarks" / "kernels.md").read_text()
    changed = text.replace("| 1q1s512 | ", "| 1q1s512 | 1.0 (9999) ")
    assert changed != text
    assert render(changed) == text


def test_a_page_that_shows_older_figures_says_so(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    write_json(a_table(date="2026-01-01T00:00:00+00:00", origin=Origin(version="1", commit="aaa")), old)
    write_json(a_table(date="2026-02-01T00:00:00+00:00", origin=Origin(version="1", commit="bbb")), new)
    first, second = render("".join(f"<!-- crossover {path} -->\n<!-- end -->\n" for path in (old, new))).split("<!-- end -->")[:2]
    assert "Measured by Headway 1 at commit aaa on 2026-01-01. **Older than the newest results on this page**" in first
    assert "Measured by Headway 1 at commit bbb on 2026-02-01." in second
    assert "Older" not in second


def test_the_page_a_person_reads_is_short_and_its_pictures_and_links_exist() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(text.splitlines()) <= 300
    links = re.findall(r"\]\(([^)#]+)", text)
    assert sum(link.endswith(".png") for link in links) >= 3
    for link in links:
        assert link.startswith("http") or (ROOT / "docs" / link).exists(), link


@pytest.mark.parametrize("device", ["H100", "H200"])
def test_rates_of_quantised_weights_are_those_of_the_files(device: str) -> None:
    known: dict[str, set[int]] = {}
    for path in (ROOT / "bench" / "results" / device.lower()).glob("weights-llama-3-8b-*.json"):
        report = json.loads(path.read_text())
        rates = {f"{cell['batch_size']} x": cell["tokens_per_second"] for cell in report.get("cells", ())}
        for peer in report.get("peers", ()):
            rates |= peer["tokens_per_second"]
        for name, rate in rates.items():
            known.setdefault(name.split(" x")[0], set()).add(round(rate))
    page = (ROOT / "docs" / "notes" / "kernel-measurements.md").read_text()
    table = page.partition("### Measured so far")[2].partition(f"One {device},")[2]
    rows = [
        [cell.strip().replace(",", "") for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| \d.*", table, re.MULTILINE)
    ][:4]
    assert [row[0] for row in rows] == ["1", "16", "64", "256"]
    for requests, plain, *others in rows:
        assert {int(cell) for cell in (plain, *others) if cell.isdigit()} <= known[requests]
        for rate, ratio in [pair for pair in pairwise(others) if "." in pair[1]][:2]:  # FP8, W4A16
            assert float(ratio) == pytest.approx(int(rate) / int(plain), abs=0.01)


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _numbers(child)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield abs(float(value))  # a table may show a sign


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_each_figure_in_the_tables_is_found_in_a_result_file(page: str) -> None:
    known = sorted({number for path in ROOT.glob("bench/results/*/*.json") for number in _numbers(json.loads(path.read_text()))})
    figures = 0
    for line in (ROOT / page).read_text().splitlines():
        if not line.startswith("|") or set(line) <= set("|-: "):
            continue
        for cell in line.strip("| ").split("|")[1:]:
            for text in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*[a-z])", cell):
                figures += 1
                digits = len(text.partition(".")[2])
                shown, half = float(text.replace(",", "")), 0.5 * 10**-digits
                at = bisect_left(known, shown - half - 1e-9)
                found = at < len(known) and known[at] <= shown + half + 1e-9
                assert found, f"{text} of {line!r} is in no file of bench/results"
    assert figures >= 10


def a_cell(name: str, owner: str, geometry: str, median_us: float | None) -> KernelCell:
    status, reason = ("error", "it failed") if median_us is None else ("ok", "")
    about = {"phase": "decode", "case": "1q1s512", "layout": "nhd", "block_size": 16, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return KernelCell.model_validate(
        {
            **about,
            "backend": name,
            "owner": owner,
            "geometry": geometry,
            "median_us": median_us,
            "status": status,
            "reason": reason,
        }
    )


def test_shares_are_geometric_means_against_the_fastest_library_of_each_cell() -> None:
    cells = [
        *(a_cell("mine", "backend", "8/1/64", 5.0), a_cell("one", "peer", "8/1/64", 20.0), a_cell("two", "peer", "8/1/64", 10.0)),
        *(
            a_cell("mine", "backend", "8/8/64", 20.0),
            a_cell("one", "peer", "8/8/64", 10.0),
            a_cell("two", "peer", "8/8/64", None),
        ),
    ]
    assert shares_of_fastest(cells).splitlines() == [
        "| kernel | 8/1/64 | 8/8/64 | all | lowest | cells |",
        "|---|---|---|---|---|---|",
        "| mine nhd 16 | 2.000 | 0.500 | 1.000 | 0.50 | 2 |",
        "| one (bare) 16 | 0.500 | 1.000 | 0.707 | 0.50 | 2 |",
        "| two (bare) 16 | 1.000 |  | 1.000 | 1.00 | 1 |",
    ]


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        render("<!-- kernel nowhere.json decode 32/8/128 -->\n<!-- end -->")


def test_a_throughput_table_is_made_anew_between_its_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(OfflineReport, "read", lambda path: read.append(path) or REPORT)
    monkeypatch.setattr(PeersFile, "read", lambda path: read.append(path) or "the peers")
    monkeypatch.setattr("result_tables.markdown", lambda report, peers: f"the report beside {peers}")
    made = "Measured on 2026-01-02, before result files recorded their commit."
    text = "a\n<!-- throughput x.json p.json -->\nold\n<!-- end -->\nb\n<!-- throughput y.json -->\n<!-- end -->\n"
    assert render(text) == (
        f"a\n<!-- throughput x.json p.json -->\n\n{made}\n\nthe report beside the peers\n<!-- end -->\n"
        f"b\n<!-- throughput y.json -->\n\n{made}\n\nthe report beside None\n<!-- end -->\n"
    )
    assert {str(path) for path in read} == {"p.json", "x.json", "y.json"}
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
