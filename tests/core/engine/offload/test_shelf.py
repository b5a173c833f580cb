"""What the disk holds is what its shelf knows of."""

from __future__ import annotations

import contextlib
from random import Random

from headway.core.engine.offload.failures import Failures
from headway.core.engine.offload.mover import KeptPage
from headway.core.engine.offload.shelf import Shelf
from headway.core.engine.offload.tier import HostTier, PageName
from headway.core.engine.stats import EngineStats
from moving import Moving


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


def test_a_page_that_was_written_after_an_attempt_that_failed_late_does_not_stay_unknown() -> None:
    stats, tier = EngineStats(), HostTier(8)
    mover = Moving(Pool(), 8, Slow(0), max_stored=1, latest=2)
    shelf = Shelf(mover, tier, stats, Failures(stats))

    def keep(name: PageName, comes: bool = True) -> None:
        slot = tier.put(name)
        assert slot is not None
        mover.broken = 0.0 if comes else 1.0
        with contextlib.suppress(RuntimeError):
            mover.move_out([(0, slot)])
        mover.broken = 0.0
        shelf.kept(KeptPage(name, b"", slot))
        shelf.flush(idle=True)

    first, other = (0, b"first"), (0, b"other")
    keep(first, comes=False)  # so it cannot be written
    keep(other)  # there is room for one page, so the first is given up before anybody knows how it went
    tier.drop(first)
    keep(first)
    for _ in range(3):
        mover.finish()
        shelf.flush(idle=True)
    assert set(mover.disk) == {name for name in (first, other) if name in shelf}
    assert stats.offload_failures["not written to disk"] == 1
