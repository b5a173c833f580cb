"""The disk tier knows exactly the pages that the disk holds."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from random import Random

import pytest

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.page_mover import KeptPage, PageName
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.offload.costs import OffloadFailures
from headway.core.engine.offload.disk_tier import DiskStore, DiskTier
from headway.core.engine.offload.host_tier import HostTiers
from headway.core.engine.offload.page_copier import CopyEvents, CopyInFlight
from headway.core.system import files
from page_copier_stub import Moving


class Slow(Random):
    """Whatever takes a time takes the longest."""

    def randint(self, a: int, b: int) -> int:
        return b


class Pool:
    """One page."""

    def read_page(self, page: int) -> str:
        return "content"

    def write_page(self, page: int, content: str) -> None:
        pass


def test_page_written_again_after_a_late_failure_is_known() -> None:
    stats, tier = EngineStats(), HostTiers(8)
    mover = Moving(Pool(), 8, Slow(0), max_stored=1, latest=2)
    disk = DiskTier(mover, tier, stats, OffloadFailures(stats))

    def keep(name: PageName, comes: bool = True) -> None:
        slot = tier.put(name)
        assert slot is not None
        mover.broken = 0.0 if comes else 1.0
        with contextlib.suppress(RuntimeError):
            mover.move_out([(0, slot)])
        mover.broken = 0.0
        disk.keep(KeptPage(name, b"", slot))
        disk.flush(idle=True)

    first, other = (0, b"first"), (0, b"other")
    keep(first, comes=False)  # so it cannot be written
    keep(other)  # there is room for one page, so the first is given up before anybody knows how it went
    tier.drop(first)
    keep(first)
    for _ in range(3):
        mover.finish()
        disk.flush(idle=True)
    assert set(mover.disk) == {name for name in (first, other) if name in disk}
    assert stats.offload_failures["not written to disk"] == 1


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


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "salt").mkdir()
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"kv_offload_dir: .*belongs to another user"):
        new_store(tmp_path)
    assert ("belongs to another user" in caplog.text) == (os.getuid() != 0)


class Event:
    """Stands for one of the device's, whose copies are made, under way, or have failed."""

    def __init__(self, state: bool | Exception) -> None:
        self.state = state

    def query(self) -> bool:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def synchronize(self) -> None:
        self.query()


def test_failed_copy_is_raised_where_its_slot_is_waited_for_and_holds_up_no_step() -> None:
    made, under_way, failed = Event(True), Event(False), Event(RuntimeError("CUDA error: uncorrectable ECC error"))
    events = CopyEvents()
    for number, event in enumerate((made, under_way, failed)):
        events.add(event, [number], [number])  # type: ignore[arg-type]
    events.forget_done()
    assert events.of_pages(range(3)) == [under_way], "a step would wait for a copy that has ended"
    assert events.of_copies([], range(3)) == [under_way, failed]
    events.wait_for_slot(0)
    with pytest.raises(RuntimeError, match="ECC"):
        events.wait_for_slot(2)


def test_copies_of_one_event_are_waited_for_once() -> None:
    events, event = CopyEvents(), Event(False)
    events.add(event, [3, 4], [0, 1])  # type: ignore[arg-type]
    assert events.of_copies([3, 4, 5], [0, 1]) == [event]


def test_copy_in_flight_reports_its_end_and_its_failure() -> None:
    assert CopyInFlight(None).done()
    assert not CopyInFlight(Event(False)).done()  # type: ignore[arg-type]
    failed = CopyInFlight(Event(RuntimeError("CUDA error: uncorrectable ECC error")))  # type: ignore[arg-type]
    assert failed.done()
    with pytest.raises(RuntimeError, match="ECC"):
        failed.result()
