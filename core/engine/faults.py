"""What follows from a step that did not run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from headway.core.engine.schedule import ScheduledSequence

log = logging.getLogger("headway")


def smaller_budget(step: Sequence[ScheduledSequence], error: Exception, chunked: bool) -> int | None:
    """Most tokens of a step from now on, after one for which memory was too small; None: nothing smaller would help.

    chunked: whether a prompt may be cut.
    """
    tokens = sum(scheduled.num_new_tokens for scheduled in step)
    smallest = 1 if chunked else max(scheduled.num_new_tokens for scheduled in step)
    if not isinstance(error, torch.OutOfMemoryError) or tokens <= smallest:
        return None
    torch.cuda.empty_cache()
    smaller = max(tokens // 2, smallest)
    log.warning(
        "out of memory in a step of %d tokens: steps have at most %d from now on; a lower max_num_batched_tokens or "
        "gpu_memory_utilization leaves room from the start",
        tokens,
        smaller,
    )
    return smaller
