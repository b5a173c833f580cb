"""Tuning while an engine is idle: what is measured first, when the child process is held, and when faster kernels are taken."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headway import LLM, AsyncLLM, SamplingParams
from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.system.child import Child, ChildDied, python_command
from headway.core.system.files import cache_folder, clean
from headway.core.system.json_files import write_json
from headway.engine_args import EngineArgs
from headway.registry import Registry
from headway.tuning import idle
from headway.tuning.idle import IdleTuner
from headway.tuning.isolated.measure_in_child import measure_in_child
from headway.tuning.measure.points import Point, grid
from headway.tuning.measure.run import CrossoverOptions, run_kernel_level
from headway.tuning.table.files import read_table, stored_tables
from headway.tuning.table.schema import CrossoverTable
from sandbox import save_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5 + n] * (20 + 9 * n)} for n in range(3)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a cache whose table says, as if it were derived, that `sdpa.math` is the fastest backend everywhere."""
    folder = tmp_path_factory.mktemp("idle")
    (folder / "cache").mkdir()
    (folder / "cache" / "kernels").symlink_to(cache_folder() / "kernels")  # which take seconds to compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_CACHE", str(folder / "cache"))
        LLM(save_tiny_model(folder / "model"), tune="start", autotune_budget=0.5, skip_tokenizer_init=True)
        path = stored_tables()[0]
        write_json(pretended(read_table(path)), path)
    return folder


@pytest.fixture
def model(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model, and a copy of its cache. Measurements run in this process, unless a test says otherwise."""
    monkeypatch.setenv("HEADWAY_CACHE", str(shutil.copytree(made / "cache", tmp_path / "cache", symlinks=True)))
    monkeypatch.setattr(idle, "QUIET", 0.0)
    monkeypatch.setattr(idle, "measure_in_child", lambda options, registry, _: run_kernel_level(options, registry))
    return made / "model"


def pretended(table: CrossoverTable) -> CrossoverTable:
    """Return the table with times that were not measured: `sdpa.math` takes 1 us, the others 100 us."""
    cells = []
    for cell in table.cells:
        us = 1.0 if cell.kernel == "sdpa.math" else 100.0
        times = {"median_us": us, "p20_us": us, "p80_us": us, "host_us": None, "plan_us": 0.1, "drift": None}
        cells.append(cell.model_copy(update={"source": "prior", "status": "ok", "reason": "", **times}))
    kernels = [each.model_copy(update={"reason": ""}) for each in table.kernels]
    return table.model_copy(update={"cells": cells, "kernels": kernels, "cut_short": False, "complete": True, "noise": 0.0})


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, tune="idle", tune_share=1.0, skip_tokenizer_init=True, dtype="float32", **options)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_a_faster_kernel_is_measured_while_idle_and_taken(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway")
    llm = engine(model)
    assert llm.engine.selection.names[Phase.DECODE] == "sdpa.math"
    before = tokens(llm)
    llm.tune(90)
    stats = llm.engine.stats
    assert stats.tuned_points > 0
    assert stats.tuning_changes == 1
    assert 0 < stats.tuning_saved_seconds < 1
    assert llm.engine.selection.names[Phase.DECODE] != "sdpa.math"
    assert "auto: took other kernels in" in caplog.text
    assert f"auto: tune() measured {stats.tuned_points} points and saved the times" in caplog.text
    assert tokens(llm) == before
    stored = read_table(stored_tables()[0])
    assert {cell.source for cell in stored.cells if cell.point in _tried(llm)} == {"measured"}
    assert not list(stored_tables()[0].parent.glob("*.idle"))
    again = engine(model)
    assert again.engine.selection.names[Phase.DECODE] == llm.engine.selection.names[Phase.DECODE], "a start uses measured times"
    assert again.driver.assembly.tuner.num_unmeasured == 0
    llm.tune(5)
    assert stats.tuning_changes == 1, "nothing is left to gain"


def test_the_file_of_a_measurement_that_a_kill_interrupts_is_removed_by_the_next_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner, outputs = engine(model).driver.assembly.tuner, []
    folder = stored_tables()[0].parent

    def measured(options: CrossoverOptions, *_: object) -> CrossoverTable:
        write_json(read_table(stored_tables()[0]), options.output)
        assert clean(folder) == [], "the process lives"
        outputs.append(options.output)
        raise ConfigError("measurement", "to end", "an end")

    monkeypatch.setattr(idle, "measure_in_child", measured)
    for _ in range(2):
        tuner.measure(*tuner.next_slice())
    assert len({*outputs}) == 2, "two processes do not share a file"
    assert [*folder.iterdir()] == stored_tables()
    outputs[0].parent.mkdir()
    write_json(read_table(stored_tables()[0]), outputs[0])  # as a killed process leaves it
    engine(model)
    assert [*folder.iterdir()] == stored_tables()


def _tried(llm: LLM) -> set[object]:
    return {key for _, key in llm.driver.assembly.tuner.tried}


def test_points_around_the_steps_that_ran_come_first(model: Path) -> None:
    llm = engine(model, max_num_seqs=4)
    tuner = llm.driver.assembly.tuner
    llm.engine.executor.selector.steps.clear()
    for _ in range(50):
        llm.engine.executor.selector.count(Phase.DECODE, 6, 1, 700)
    _, first = tuner.next_slice()
    assert {(point.phase, point.batch, point.kv_len) for point in first[:3]} == {
        ("decode", 4, 512), ("decode", 4, 2048), ("decode", 16, 512)
    }  # fmt: skip


def test_corners_are_the_nearest_values_on_each_axis() -> None:
    points = [Point("decode", batch, 1, kv_len) for batch in (1, 4, 16) for kv_len in (32, 128) if batch * kv_len < 2000]
    found = idle.corners(points, (4, 1, 60))
    assert {(point.batch, point.kv_len) for point in found} == {(4, 32), (4, 128)}
    assert {(point.batch, point.kv_len) for point in idle.corners(points, (99, 1, 9999))} == {(16, 32)}


def an_echo() -> Child:
    code = "import sys, time\nfor line in sys.stdin: time.sleep(0.2); print('{}', flush=True)"
    return Child([*python_command("x")[:1], "-c", code])


def test_a_held_child_stands_still_and_its_limits_do_not_count() -> None:
    with an_echo() as child:
        child.ask({}, 20)
        child.send({})
        child.hold(True)
        time.sleep(0.1)
        assert psutil.Process(child.process.pid).status() == psutil.STATUS_STOPPED
        Timer(1.0, child.hold, [False]).start()
        began = time.monotonic()
        assert child.answer(0.6) == {}
        assert time.monotonic() - began > 0.9
        child.send({})
        with pytest.raises(ChildDied, match="no answer within 0.05 s"):
            child.answer(0.05)


class FakeChild:
    def __init__(self) -> None:
        self.held: list[bool] = []

    def hold(self, held: bool) -> None:
        self.held.append(held)


@pytest.fixture
def tuner(model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[IdleTuner, FakeChild]:
    """A tuner whose child process measures forever."""
    llm = engine(model)
    made, child = llm.driver.assembly.tuner, FakeChild()
    monkeypatch.setattr(made, "measure", lambda *_: setattr(made, "child", child))
    return made, child


def test_a_request_holds_the_child_at_once_and_quiet_lets_it_go_on(
    tuner: tuple[IdleTuner, FakeChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, child = tuner
    monkeypatch.setattr(idle, "QUIET", 2.0)
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(idle.time, "monotonic", lambda: clock.now)
    made.busy()
    assert made.idle() == 2.0
    clock.now += 2.0
    made.idle()
    made.thread.join()
    made.busy()
    assert child.held[-1] is True
    clock.now += 60
    assert made.idle() == 2.0, "measuring waits for a pause"
    assert child.held[-1] is True
    clock.now += 2.0
    made.idle()
    assert child.held[-1] is False


def test_a_share_of_the_idle_time_is_used(tuner: tuple[IdleTuner, FakeChild], monkeypatch: pytest.MonkeyPatch) -> None:
    made, child = tuner
    made.share = 0.25
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(idle.time, "monotonic", lambda: clock.now)
    made.busy()
    made.idle()
    made.thread.join()
    ran, last = 0.0, False
    while clock.now < 1020:
        pause = made.idle()
        last = child.held[-1]
        ran += 0.0 if last else pause
        clock.now += pause
    assert ran == pytest.approx(5.0, rel=0.05)


def test_a_server_under_load_says_that_it_measures_nothing(
    tuner: tuple[IdleTuner, FakeChild], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway")
    made, _ = tuner
    made.busy()
    later = time.monotonic() + 601
    monkeypatch.setattr(idle.time, "monotonic", lambda: later)
    for _ in range(3):
        made.busy()
    assert caplog.text.count("because requests left no idle time") == 1


def test_a_server_measures_between_requests(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "measure_in_child", measure_in_child)

    async def serve() -> tuple[int, int]:
        llm = AsyncLLM.from_engine_args(
            EngineArgs(str(model), tune="idle", tune_share=1.0, skip_tokenizer_init=True, dtype="float32")
        )
        try:
            for _ in range(2):
                async for _ in llm.generate(PROMPTS[0], GREEDY, request_id=os.urandom(4).hex()):
                    pass
            until = time.monotonic() + 90
            while time.monotonic() < until and not (await llm.stats()).totals.tuning_changes:
                await asyncio.sleep(0.2)
            totals = (await llm.stats()).totals
            return totals.tuned_points, totals.tuning_changes
        finally:
            llm.shutdown()

    points, changes = asyncio.run(serve())
    assert points > 0
    assert changes == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tune": "often"}, "tune: needs idle or start or never, got 'often'"),
        ({"tune": "never", "autotune_budget": 5.0}, "tune=never: needs autotune_budget 0, or none, got 5.0"),
        ({"deterministic": True, "autotune_budget": 3.0}, "deterministic: needs autotune_budget 0, or none, got 3.0"),
        ({"tune": "start", "tune_share": 0.3}, "tune=start: needs no tune_share, got 0.3 .tune=idle uses it"),
        ({"tune_share": 0.0}, "tune_share: needs a number above 0 and at most 1, got 0.0"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineArgs(**options)


def test_an_engine_that_does_not_tune_while_idle_says_so(model: Path) -> None:
    llm = LLM(model, tune="never", skip_tokenizer_init=True, dtype="float32")
    assert llm.driver.assembly.tuner is None
    with pytest.raises(ConfigError, match="needs tune='idle'"):
        llm.tune(1)
    for seconds in (-1, float("nan"), "5", True):
        with pytest.raises(ConfigError, match="needs a number of seconds of at least 0"):
            llm.tune(seconds)


def test_an_engine_without_a_table_makes_one(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored_tables()[0].unlink()
    llm = engine(model, autotune_budget=0.0)
    before = tokens(llm)
    llm.tune(90)
    table = read_table(stored_tables()[0])
    assert {cell.source for cell in table.cells} == {"measured"}
    assert {cell.point for cell in table.cells} == {point.key for point in grid("cpu")}
    assert tokens(llm) == before
    assert engine(model, attn_backend="sdpa").driver.assembly.tuner is None
    assert "tune=idle: nothing to measure" in caplog.text


def test_a_kernel_that_turns_out_wrong_is_left_out_with_its_numbers(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pretended winner gives a wrong result at every point that is measured: the next one serves."""

    def wrong(options: CrossoverOptions, registry: Registry, started: object) -> CrossoverTable:
        table = run_kernel_level(options, registry)
        refused = {"status": "incorrect", "reason": "relative error 0.5 exceeds 2e-05", "median_us": None, "p20_us": None}
        refused |= {"p80_us": None, "plan_us": None, "host_us": None, "drift": None}
        cells = [cell.model_copy(update=refused) if cell.kernel == "sdpa.math" else cell for cell in table.cells]
        return table.model_copy(update={"cells": cells})

    monkeypatch.setattr(idle, "measure_in_child", wrong)
    llm = engine(model)
    before = tokens(llm)
    llm.tune(60)
    assert "auto: sdpa.math has no time at points where it failed, such as " in caplog.text
    assert "relative error 0.5 exceeds 2e-05" in caplog.text
    assert llm.engine.selection.names[Phase.DECODE] == "sdpa"
    assert tokens(llm) == before


def test_kernels_that_cannot_be_taken_leave_the_engine_as_it_was(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = engine(model)
    before, chosen = tokens(llm), llm.engine.selection.names
    retune, calls = llm.engine.retune, list[object]()

    def fails_once(costs: object) -> None:
        calls.append(costs)
        if len(calls) == 1:
            raise ConfigError("a graph", "memory", "none")
        retune(costs)

    monkeypatch.setattr(llm.engine, "retune", fails_once)
    llm.tune(90)
    assert len(calls) == 2
    assert "other kernels cannot be taken before the next start: a graph: needs memory, got none" in caplog.text
    assert llm.engine.selection.names == chosen
    assert tokens(llm) == before
    assert llm.engine.stats.tuning_changes == 0
