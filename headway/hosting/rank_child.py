"""The process of a rank that follows rank 0; `headway.hosting.rank_assembly` starts it."""

from __future__ import annotations

import sys

from headway.core.engine.ranks.rank_loop import run_rank


def main() -> None:
    """Run the process. Its arguments are file descriptors; see `run_rank`."""
    from headway.machine.memory import freeze_heap

    run_rank(*map(int, sys.argv[1:4]), ready=freeze_heap)


if __name__ == "__main__":
    main()
