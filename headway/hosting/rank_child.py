"""The process of a rank that follows rank 0; `headway.hosting.rank_assembly` starts it."""

from __future__ import annotations

import sys
import time

from headway.core.engine.ranks.rank_loop import run_rank
from headway.machine.process import TRIM_INTERVAL, freeze_heap, trim_memory


class GiveBackNowAndThen:
    """Gives freed memory back to the system after a step, as rank 0's driver does, where activations lie in this process's."""

    def __init__(self) -> None:
        self._next = time.monotonic() + TRIM_INTERVAL

    def __call__(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + TRIM_INTERVAL
            trim_memory()


def main() -> None:
    """Run the process. Its arguments are file descriptors; see `run_rank`."""
    wire, memory, wake = map(int, sys.argv[1:])
    run_rank(wire, memory, wake, ready=freeze_heap, stepped=GiveBackNowAndThen())


if __name__ == "__main__":
    main()
