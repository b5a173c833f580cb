"""The disk tier knows exactly the pages that the disk holds."""

from __future__ import annotations

import contextlib
from random import Random

from headway.core.engine.data.page_mover import KeptPage, PageName
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.offload.costs import OffloadFailures
from headway.core.engine.offload.disk_tier import DiskTier
from headway.core.engine.offload.host_tier import HostTiers
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
