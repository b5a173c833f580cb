"""The folders of compiled kernels, and the obstacles to writing there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.core.system.files import kernel_folders, obstacle


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
