"""Backends of plugins that crash, hang or exit at some shape: measuring and the default start go on without them."""

from __future__ import annotations

import base64
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headway.core.system.child import ChildDied
from headway.core.system.json_files import write_json
from headway.registry import create_registry
from headway.tuning.isolated import measure_in_child as apart
from headway.tuning.isolated.measure_in_child import CRASHED, HUNG, measure_in_child, third_party_files
from headway.tuning.measure.points import Point
from headway.tuning.measure.run import CrossoverOptions
from headway.tuning.table.files import read_table
from hostile_plugins import LATE, install_hostile
from tables import QUICK, SPEC, a_table

GRID = [Point("prefill", 1, 16, 16, 0), Point("prefill", 1, 64, 64, 0), Point("decode", 1, 1, 32, 0)]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    for name in LATE:  # of the test before
        sys.modules.pop(name.replace("-", "_"), None)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LATE)
def test_a_shape_that_crashes_the_process_excludes_that_backend_alone(
    plugins: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "ANSWER_SECONDS", {"cpu": 5.0})
    install_hostile(plugins, name)
    registry = create_registry()
    names = ["sdpa", "sdpa.math", name]
    assert third_party_files(registry, names) == {name: str(plugins / f"{name.replace('-', '_')}.py")}
    table = tmp_path / "table.json"
    options = CrossoverOptions(
        SPEC, names, ["nhd"], block_sizes=(16,), grid=GRID, refine=0, turns=QUICK, budget=60, output=table, interruptible=False
    )
    found = measure_in_child(options, registry)
    assert found == read_table(table)
    assert found.complete
    assert not found.cut_short
    records = {record.name: record for record in found.kernels}
    timed = {cell.point: cell.kernel for cell in found.cells if cell.median_us is not None and cell.kernel == "sdpa"}
    assert len(timed) == len(GRID)
    reasons = [records[name].reason, *(cell.reason for cell in found.cells if cell.kernel == name)]
    assert any(LATE[name][2] in reason for reason in reasons)
    if name != "exits-at-a-shape":  # which is an exception like another
        assert not records[name].usable
        assert not any(cell.kernel == name for cell in found.cells)
    again = measure_in_child(replace(options, excluded={name: records[name].reason} if records[name].reason else {}), registry)
    assert again.complete


class _Measuring:
    """In place of the process that measures: it dies as a test says, then writes a table and is done."""

    deaths: list[ChildDied]
    asked: list[CrossoverOptions]

    def __init__(self, command: object) -> None:
        pass

    def __enter__(self) -> _Measuring:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, request: dict[str, dict[str, str]], timeout: float) -> dict[str, object]:
        options: CrossoverOptions = pickle.loads(base64.b64decode(request["measure"]["options"]))
        self.asked.append(options)
        if self.deaths:
            raise self.deaths.pop(0)
        write_json(a_table(), options.output)
        return {"done": True}


@pytest.mark.parametrize(
    ("died", "said"),
    [
        (
            ChildDied("no answer within 15 s", "Fatal Python error: Aborted", timed_out=True),
            f"{HUNG} in its self-test: no answer",
        ),
        (ChildDied("the process was killed by SIGSEGV", "Fatal Python error: Segmentation fault"), f"{CRASHED} in its self-test"),
    ],
)
def test_a_hang_is_called_one_and_told_once(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, died: ChildDied, said: str
) -> None:
    monkeypatch.setattr(apart, "Child", _Measuring)
    _Measuring.deaths, _Measuring.asked = [died], []
    install_hostile(plugins, "hangs-at-a-shape")
    table = tmp_path / "table.json"
    write_json(a_table(command="of another version"), table)
    measure_in_child(CrossoverOptions(SPEC, ["sdpa", "hangs-at-a-shape"], output=table), create_registry())
    first, second = _Measuring.asked
    (why,) = second.excluded.values()
    assert why.startswith(said)
    assert "Aborted" not in why
    assert caplog.text == "", "the start tells of it, once, when it reads the table"
    assert not first.resume
    assert not second.resume, "nothing was written by this run: what lies there is another's"
