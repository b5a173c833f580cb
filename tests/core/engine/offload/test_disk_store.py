"""The files of pages on disk: whose they are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.page_mover import KeptPage
from headway.core.engine.offload.disk_tier import DiskStore
from headway.core.system import files


def new_store(folder: Path) -> DiskStore:
    return DiskStore(folder, "salt", 8, 2**20, lambda slot: [memoryview(bytearray(8))], lambda slot: None)


def modes(folder: Path) -> dict[str, int]:
    return {each.name: stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_nobody_else_can_read_the_pages(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "kv"
    before = os.umask(umask)
    try:
        store = new_store(folder)
        assert store.store([KeptPage((0, bytes(16)), b"tokens", 0)]).result() == frozenset()
    finally:
        os.umask(before)
    assert modes(folder) == {"kv": 0o700, "salt": 0o700, f"0-{'00' * 16}.page": 0o600}


def test_a_readable_folder_of_an_earlier_version_is_closed(tmp_path: Path) -> None:
    (tmp_path / "salt").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    new_store(tmp_path)
    assert modes(tmp_path) == {tmp_path.name: 0o755, "salt": 0o700}  # the outer one is the user's own


def test_pages_in_a_folder_of_another_user_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "salt").mkdir()
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"kv_offload_dir: .*belongs to another user"):
        new_store(tmp_path)
    assert ("belongs to another user" in caplog.text) == (os.getuid() != 0)
