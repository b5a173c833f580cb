"""`headway bench serve`: what it prints, writes, draws and refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.bench.serve.results import ServeReport
from ruled_server import ruled_server
from sandbox import Result


@pytest.fixture
def url() -> Iterator[str]:
    with ruled_server() as found:
        yield found


def test_the_command_writes_what_it_shows_in_80_columns(url: str, headway: Callable[..., Result], tmp_path: Path) -> None:
    options = ("--num-requests", "4", "--num-naive", "2", "--mix", "5/2:3,9/3", "--rate", "20,50")
    written = ("--goodput", "ttft:500,tpot:100", "--output", str(tmp_path / "r.json"))
    result = headway("bench", "serve", "--url", url, *options, *written)
    assert result.code == 0, result
    assert max(map(len, result.out.splitlines())) <= 80
    report = ServeReport.read(tmp_path / "r.json")
    assert [cell.label for cell in report.cells] == ["20/s", "50/s", "offline", "naive"]
    assert [cell.completed for cell in report.cells] == [4, 4, 4, 2]
    assert (report.model, report.limits_ms) == ("ruled", {"ttft": 500, "tpot": 100})


@pytest.mark.slow
def test_pictures_are_drawn_of_times_and_rates(url: str, headway: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--num-requests", "3", "--mix", "5/3", "--modes", "online,offline", "--plots", str(tmp_path))
    assert headway("bench", "serve", "--url", url, *options).code == 0
    names = {"time_to_first_token.png", "time_per_output_token.png", "tokens_per_second.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == names


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("--url", "http://127.0.0.1:9"), "a server with /v1/models"),
        (("--url", "ftp://x"), "a URL such as"),
        (("--modes", "sideways"), "--modes"),
        (("--rate", "fast"), "--rate"),
        (("--goodput", "speed:5"), "--goodput"),
        (("--endpoint", "talk"), "--endpoint"),
        (("--mix", "many"), "--mix"),
    ],
)
def test_what_cannot_be_run_is_told(headway: Callable[..., Result], options: tuple[str, ...], match: str) -> None:
    result = headway("bench", "serve", *options)
    assert result.code == 2
    assert match in result.err
