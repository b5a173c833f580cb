"""Random work with a host tier and a disk: nothing leaks, nobody reads what is not his, every request finishes."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from random import Random

import pytest

from headway.core.contract.errors import ConfigError
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.page_mover import PageName, StoredPage
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.offload.costs import OffloadCosts, OffloadFailures
from headway.core.engine.offload.disk_tier import DiskStore, DiskTier
from headway.core.engine.offload.host_tier import HostTiers
from headway.core.engine.offload.offloader import Offloader
from headway.core.engine.offload.page_copier import CopyEvents, CopyInFlight
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.system import files
from page_copier_stub import Later, Moving
from random_schedules import Cache, finish, sequence

PAGE_BYTES = 1000


class Tiers:
    """One group, pages of four tokens, and the host's memory behind them."""

    def __init__(
        self, num_pages: int, num_slots: int, mode: str = "auto", lookahead: int = 0, rate: float = 1e12, max_stored: int = 0
    ) -> None:
        blocks = BlockManager(num_pages, 4)
        self.cache, self.stats = Cache(blocks), EngineStats()
        self.mover = Moving(self.cache, num_slots, Random(0), max_stored, rate=rate)
        costs = OffloadCosts(self.mover.rates, PAGE_BYTES, 64)
        costs.note_step(64, 0, 0.064)
        self.offloader = Offloader(blocks, self.mover, costs, self.stats, mode, lookahead)
        self.scheduler = Scheduler(blocks, 64, 4, offloader=self.offloader, stats=self.stats)

    def finish(self, *seqs: Sequence) -> list[int]:
        """Run sequences to their ends; returns how many were in each step."""
        return list(map(len, finish(self.scheduler, *seqs, cache=self.cache)))

    def settle(self) -> None:
        """Let copies and the disk come to their ends."""
        for _ in range(10):
            self.offloader.flush(idle=True)
            self.mover.finish()
        self.offloader.tier.check_integrity(idle=True)


def test_an_evicted_prefix_comes_back_and_counts_as_a_hit() -> None:
    tiers = Tiers(num_pages=8, num_slots=16)
    tiers.finish(sequence("first", [1] * 24, 1))
    tiers.finish(sequence("second", [2] * 30, 1))
    again, other = sequence("again", [1] * 25, 4), sequence("other", [0], 6)
    counts = tiers.finish(again, other)
    assert (again.num_cached_tokens, tiers.mover.moved_back) == (24, 6)
    assert counts[0] == 1, "the other one did not wait"


@pytest.mark.parametrize(
    ("mode", "rate", "kind"),
    [("auto", 1e12, "swap"), ("auto", 1e3, "recompute"), ("swap", 1e3, "swap"), ("recompute", 1e12, "recompute")],
)
def test_preemption_swaps_or_recomputes_by_cost_or_by_option(mode: str, rate: float, kind: str) -> None:
    tiers = Tiers(num_pages=10, num_slots=16, mode=mode, rate=rate)
    tiers.finish(*(sequence(str(n), [n] * 16, 20) for n in range(2)))
    assert set(tiers.stats.preemptions_by_kind) == {kind}
    assert (tiers.mover.moved_back > 0) == (kind == "swap")
    tiers.offloader.tier.check_integrity(idle=True)


@pytest.mark.parametrize("broken", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("max_stored", [0, 50])
def test_failed_copies_are_recomputed_and_logged_once(broken: float, max_stored: int, caplog: pytest.LogCaptureFixture) -> None:
    tiers = Tiers(num_pages=8, num_slots=16, mode="swap", max_stored=max_stored)
    tiers.finish(sequence("kept", [1] * 24, 1), sequence("in its place", [2] * 30, 1))
    tiers.settle()
    tiers.mover.broken = broken
    for turn in range(6):  # what a failed copy should have brought is read by nobody: `Cache` would see it
        prompts = [[1] * 25, [2] * 29, [turn] * 21]
        seqs = [sequence(f"{turn} {number}", prompt, 4) for number, prompt in enumerate(prompts)]
        assert len(tiers.finish(*seqs)) < 60
    tiers.mover.broken = 0.0
    tiers.settle()
    lost = tiers.mover.num_not_out
    assert tiers.stats.offload_failures["not copied out"] == lost
    assert lost or broken < 0.5
    told = [record for record in caplog.records if "not copied out (RuntimeError: a copy has failed)" in record.message]
    assert len(told) == bool(lost)


def test_page_whose_copy_failed_late_is_not_found() -> None:
    tiers = Tiers(num_pages=8, num_slots=16, max_stored=50)
    tiers.finish(sequence("first", [1] * 24, 1))
    real = tiers.mover.move_out
    tiers.mover.move_out = lambda *moves: real(*moves) and Later(None, 2, RuntimeError("an event has failed"))
    tiers.finish(sequence("lost", [2] * 30, 1))
    tiers.settle()
    lost = tiers.stats.offload_failures["not copied out"]
    assert lost > 0
    assert len(tiers.offloader.tier) == tiers.stats.blocks_offloaded - lost
    tiers.mover.move_out = real
    tiers.finish(sequence("third", [3] * 30, 1))
    tiers.finish(sequence("again", [2] * 30, 1))
    assert tiers.stats.offload_failures["not copied out"] == lost


@pytest.mark.parametrize("asked", [0, 9], ids=["has failed", "under way"])
def test_failed_copy_back_is_counted_when_its_restore_is_cancelled(asked: int) -> None:
    tiers = Tiers(num_pages=8, num_slots=16)
    tiers.finish(sequence("first", [1] * 24, 1), sequence("in its place", [2] * 30, 1))
    tiers.settle()
    tiers.mover.move_back = lambda *moves: Later(None, asked, RuntimeError("an event has failed"))
    again, restores = sequence("again", [1] * 25, 1), tiers.offloader.restores
    assert tiers.offloader.restore(again)
    assert len(restores.move(tiers.mover)) == 6
    assert restores.give_up()
    failed = asked == 0
    assert tiers.stats.offload_failures["not copied back"] == 6 * failed
    assert (again in restores.failed) == failed
    assert restores.take_returned() == [again]
    assert not restores.pending
    tiers.offloader.tier.check_integrity(idle=True)


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
        disk.keep(StoredPage(name, b"", slot))
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
        assert store.store([StoredPage((0, bytes(16)), b"tokens", 0)]).result() == frozenset()
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
