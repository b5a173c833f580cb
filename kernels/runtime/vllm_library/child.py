"""`python -m headway.kernels.runtime.vllm_library.child PATH`: load vLLM's library, call it once, and print a line of JSON.

A library built for another torch may crash the process that loads it: this one is there to be crashed. The trial is a
product whose answer no layout changes; each start of an engine holds the ways that serve to the dequantised weight.
"""

from __future__ import annotations

import os
import sys

import torch

from headway.core.system.child import open_replies, reply
from headway.kernels.runtime.vllm_library.library import NAMESPACE, bind, registered
from headway.kernels.runtime.vllm_library.scalar_types import INT4_LESS_8


def examine(path: str) -> dict[str, str]:
    """{"namespace": ...} of a library that loads and holds products, else {"error": why not}."""
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        return {"error": f"does not load: {' '.join(str(error.__cause__ or error).split())}"}
    names = registered()
    if not names:
        return {"error": f"registers no operator of {NAMESPACE} that multiplies over quantised weights"}
    try:
        right = trial(torch.device("cuda"))
    except RuntimeError as error:
        return {"error": " ".join(str(error).split())[:300]}
    return {"namespace": NAMESPACE} if right else {"error": "computes something else in a trial call"}


def trial(device: torch.device) -> bool:
    """Whether ones times a weight of 128 x 128, all -8 and in whatever order, are right; True where Marlin cannot be called."""
    operators, support = bind("marlin_gemm", "gptq_marlin_repack")
    if not support:
        return True
    repack, size = operators["gptq_marlin_repack"], 128
    given = {"perm": torch.empty(0, dtype=torch.int32, device=device)} if "perm" in repack.place else {}
    words = torch.zeros(size // 8, size, dtype=torch.int32, device=device)
    x = torch.ones(1, size, dtype=torch.bfloat16, device=device)
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    y = operators["marlin_gemm"](
        a=x,
        b_q_weight=repack(b_q_weight=words, size_k=size, size_n=size, num_bits=4, **given),
        b_scales=torch.ones_like(x),
        workspace=torch.zeros(count, dtype=torch.int32, device=device),
        b_type_id=INT4_LESS_8,
        size_m=1,
        size_n=size,
        size_k=size,
    )
    return bool((y == -8 * size).all())


if __name__ == "__main__":
    reply(open_replies(), examine(sys.argv[1]))
    os._exit(0)  # what crashes while the process ends has nothing to say about the library
