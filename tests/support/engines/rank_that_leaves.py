"""Process of a rank that is killed before the rendezvous, after it has announced that it joins."""

from __future__ import annotations

import os
import signal

from headway.core.engine.ranks import torch_ranks
from headway.hosting.rank_child import main


def leave(*_: object) -> None:
    """Stand in for the call in which ranks meet."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch_ranks.TorchRanks = leave  # type: ignore[assignment,misc]
    main()
