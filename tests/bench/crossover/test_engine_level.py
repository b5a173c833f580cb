"""Whole generations, one process a backend: a crash, an error or an OOM costs its cell and no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from headway.bench.crossover import engine_level, worker_protocol
from headway.bench.crossover.engine_level import EngineOptions, cases, run_engine_level
from headway.core.contract.errors import ConfigError, UnknownBackendError, UnsupportedError
from headway.core.system.child import Child, ChildDied
from headway.registry import Registry
from headway.tuning.table.files import read_table
from sandbox import install, save_tiny_model
from tiny_bench import CPU

FAULTY = '''
"""A plugin whose backends decode like sdpa, until a batch of two comes."""

import os
import time

import torch

from headway.backends.sdpa import SDPA
from headway.core.contract.backend import BackendInfo
from headway.registry import hookimpl


class Dies(SDPA):
    name = "dies"

    def decode(self, q, cache, plan, out):
        if len(q) == 2:
            os._exit(7)
        super().decode(q, cache, plan, out)


class Hangs(SDPA):
    name = "hangs"

    def decode(self, q, cache, plan, out):
        if len(q) == 2:
            time.sleep(600)
        super().decode(q, cache, plan, out)


@hookimpl
def headway_register_backends():
    return [BackendInfo(b.name, "for a test", lambda b=b: b, api_version=2) for b in (Dies, Hangs)]
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def options(model: Path, **changes: object) -> EngineOptions:
    llm = {"model": str(model), "device": "cpu", "num_threads": 1, "kv_cache_memory": "16MiB"}
    return replace(EngineOptions(CPU, llm, cases([1, 2], [4]), ["sdpa"]), **changes)


@pytest.mark.slow
def test_generations_are_timed_through_each_backend(model: Path, registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    table = run_engine_level(options(model, backends=["sdpa", "sdpa.math", "auto"], output=path), registry)
    assert table.complete
    assert (table.level, table.model) == ("engine", str(model))
    assert (table.spec.num_heads, table.spec.head_dim) == (4, 8)
    assert {(cell.kernel, cell.case) for cell in table.cells} == {
        (name, case) for name in ("sdpa", "sdpa.math", "auto") for case in ("1q4s8", "2q4s8")
    }
    for cell in table.cells:
        assert cell.status in ("ok", "tie"), cell.reason
        assert cell.tokens_per_second == pytest.approx(cell.batch * 4 / cell.median_us * 1e6)
        assert "sdpa" in cell.variant
    assert read_table(path) == table


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    from headway.registry import create_registry

    install(tmp_path, "faulty", FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return create_registry()


@pytest.mark.slow
def test_a_process_that_dies_costs_its_cell_and_the_next_one_goes_on(model: Path, faulty: Registry) -> None:
    table = run_engine_level(options(model, cases=["2q4s8", "1q4s8"], backends=["dies", "sdpa"]), faulty)
    found = {(cell.kernel, cell.batch): cell for cell in table.cells}
    assert found["dies", 2].status == "error"
    assert "exited with code 7" in found["dies", 2].reason
    assert found["dies", 1].status in ("ok", "tie")  # with sdpa, which does the same work
    assert found["sdpa", 2].status == "ok"
    assert table.complete


@pytest.mark.slow
def test_a_generation_that_takes_too_long_is_given_up_with_all_larger_ones(
    model: Path, faulty: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_protocol, "COMPILING_SECONDS", 0.0)
    chosen = options(model, cases=cases([1, 2], [4, 5]), backends=["hangs"], cell_limit=8.0)
    found = {cell.case: cell for cell in run_engine_level(chosen, faulty).cells}
    assert [found[case].status for case in ("1q4s8", "1q5s10")] == ["ok", "ok"]
    assert [found[case].status for case in ("2q4s8", "2q5s10")] == ["dropped", "dropped"]
    assert "2q4s8 took longer than 8 s" in found["2q5s10"].reason


def test_the_limit_is_that_of_one_generation_and_the_first_pass_has_more() -> None:
    waits: list[float | None] = []

    class Talking:
        said: ClassVar = ["begin", "pass", "pass", "done"]

        def send(self, request: object) -> None:
            pass

        def answer(self, timeout: float | None) -> dict[str, str]:
            waits.append(timeout)
            if len(waits) > len(self.said):
                raise ChildDied("the process exited with code 0")
            return {"event": self.said[len(waits) - 1]}

    assert [event["event"] for event in worker_protocol.events(Talking(), {}, 5.0)] == ["begin", "pass", "pass", "done", "ended"]
    assert waits == [None, 5.0 + worker_protocol.COMPILING_SECONDS, 5.0, 5.0, None]


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_done_and_a_later_run_goes_on(
    model: Path, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "engine.json", engine_level.save
    wanted = options(model, backends=["sdpa", "sdpa.math"], output=path)
    with pytest.raises(ConfigError, match="--resume: needs the file to go on with"):
        run_engine_level(replace(wanted, output=None, resume=True), registry)

    def interrupting(table: object, path: object) -> None:
        real(table, path)
        monkeypatch.setattr(engine_level, "save", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_level, "save", interrupting)
    first = run_engine_level(wanted, registry)
    assert [(cell.kernel, cell.case) for cell in first.cells] == [("sdpa", "1q4s8")]
    assert not first.complete
    asked: list[list[str]] = []

    def noted(child: Child, request: dict, cell_limit: float) -> Iterator[dict]:
        asked.append(request["cases"])
        return worker_protocol.events(child, request, cell_limit)

    monkeypatch.setattr(engine_level, "events", noted)
    later = replace(wanted, resume=True)
    whole = run_engine_level(later, registry)
    assert asked == [["2q4s8"], ["1q4s8", "2q4s8"]]
    assert (whole.complete, len(whole.cells)) == (True, 4)
    assert first.cells[0].median_us in {cell.median_us for cell in whole.cells}
    run_engine_level(later, registry)
    assert len(asked) == 2, "nothing was left to do"
    with pytest.raises(UnsupportedError, match="model: needs .*, got another"):
        run_engine_level(replace(later, llm={**later.llm, "model": "another"}), registry)


def test_what_cannot_be_generated_is_refused(model: Path, registry: Registry) -> None:
    with pytest.raises(ConfigError, match="512 tokens in, 512 out"):
        run_engine_level(options(model, cases=["2q8"]), registry)
    with pytest.raises(UnknownBackendError):
        run_engine_level(options(model, backends=["nope"]), registry)
