"""How many compiled products of matrices a CPU keeps: as many as a server's steps need, and not all that it has ever met."""

from __future__ import annotations

import logging
import os
from typing import Final

log = logging.getLogger("headway")

VARIABLES: Final = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Of torch's cache before oneDNN, one for each thread, and of oneDNN's own; both hold 1,024 products if nobody says otherwise."""

CAPACITY: Final = 256
"""Products, each of which is code of some 200 KiB for one number of rows and one weight's shape: a decoder's four or five
shapes at 50 numbers of rows."""


def bound_kernel_caches() -> None:
    """Have torch and oneDNN keep at most CAPACITY compiled products, unless the environment says how many.

    They are compiled for each number of rows, and a step has any number, so at 1,024 in each of two caches resident memory
    grows by hundreds of MiB in the first minutes (docs/reliability.md has figures). A product that is no longer kept is compiled
    again in less than a millisecond. Both libraries read their variable at their first product: in a process that has multiplied
    before, this changes nothing.
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(CAPACITY))
    log.info("compiled products kept: %s", ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES))
