"""`python -m headway.backends.vllm_library.child PATH`: load vLLM's library, say in a line of JSON what was found.

A library built for another torch may crash the process that loads it: this one is there to be crashed. What its products compute
is held to the dequantised weight's at each start of an engine.
"""

from __future__ import annotations

import os
import sys

import torch

from headway.backends.vllm_library.library import NAMESPACE, registered
from headway.core.system.child import open_replies, reply


def examine(path: str) -> dict[str, str]:
    """{"namespace": ...} of a library that loads and holds products, else {"error": why not}."""
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        return {"error": f"does not load: {' '.join(str(error.__cause__ or error).split())}"}
    names = registered()
    if not names:
        return {"error": f"registers no operator of {NAMESPACE} that multiplies over quantised weights"}
    return {"namespace": NAMESPACE}


if __name__ == "__main__":
    reply(open_replies(), examine(sys.argv[1]))
    os._exit(0)  # what crashes while the process ends has nothing to say about the library
