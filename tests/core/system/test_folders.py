"""The folders of compiled kernels, the obstacles to writing there, and blocks that one process runs at a time."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from headway.core.system.files import kernel_folders, obstacle, one_process


def test_cache_folders_are_the_users_or_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert kernel_folders() == (tmp_path / "kernels", tmp_path / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert kernel_folders() == (tmp_path / "kernels", tmp_path / "other")


def test_a_folder_that_can_be_made_has_no_obstacle(tmp_path: Path) -> None:
    assert obstacle(tmp_path) == obstacle(tmp_path / "new" / "deeper") == ""


def test_obstacles_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert obstacle(tmp_path / "file" / "kernels") == f"{tmp_path / 'file'} is not a folder"
    with monkeypatch.context() as changed:
        changed.setattr(os, "access", lambda path, mode: False)
        assert obstacle(tmp_path / "kernels") == "cannot be written"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**20))
    assert obstacle(tmp_path) == "3 MiB free"


def _hold(path: Path, held: Event) -> None:
    with one_process(path):
        held.set()
        time.sleep(60)


def test_a_block_waits_for_the_other_process_and_for_no_dead_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "kernel", held), daemon=True)
    other.start()
    assert held.wait(60)
    ran: list[str] = []

    def run() -> None:
        with one_process(tmp_path / "kernel"):
            ran.append("after it")

    waiting = Thread(target=run)
    waiting.start()
    waiting.join(0.2)
    assert not ran
    with one_process(tmp_path / "another"):
        ran.append("another path")
    with one_process(tmp_path / "kernel", seconds=0.1):
        ran.append("no longer")
    other.kill()
    waiting.join(60)
    assert ran == ["another path", "no longer", "after it"]
    assert list(tmp_path.iterdir()) == []


def test_of_three_processes_only_one_runs_the_block(tmp_path: Path) -> None:
    running, most = list[int](), list[int]()

    def run(number: int) -> None:
        with one_process(tmp_path / "kernel"):
            running.append(number)
            most.append(len(running))
            time.sleep(0.05)
            running.remove(number)

    threads = [Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert most == [1] * 12


def test_a_block_runs_where_no_lock_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with one_process(tmp_path / "file" / "kernel"):
        assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    with pytest.raises(ValueError, match="as it is"), one_process(tmp_path / "kernel"):
        raise ValueError("as it is")
    assert not (tmp_path / ".kernel.lock").exists()
