"""`python -m headway.backends.flash_attn_3.child PATH`: load a library, call it once, say in one line of JSON what was found.

A library built for another torch may crash the process that loads it: this one is there to be crashed.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from headway.backends.flash_attn_3.binding import Operators, registered
from headway.core.contract.errors import BackendError
from headway.core.system.child import open_replies, reply

TOLERANCE = 2e-2
"""Largest accepted ||out - right|| / ||right|| of the trial call, whose numbers are bfloat16."""


def examine(path: str) -> dict[str, str]:
    """{"namespace": ...} of a library that loads and computes right, else {"error": why not}."""
    before = frozenset(registered())
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        return {"error": f"does not load: {' '.join(str(error.__cause__ or error).split())}"}
    spaces = registered(before)
    if not spaces:
        return {"error": "registers no operator `fwd` that reads a page table"}
    try:
        apart = trial(Operators.of(spaces[0]), torch.device("cuda"))
    except (BackendError, RuntimeError) as error:
        return {"error": f"{' '.join(str(error).split())[:300]}"}
    if not apart <= TOLERANCE:
        return {"error": f"computes something else: relative error {apart:.2g} in a trial call"}
    return {"namespace": spaces[0]}


def trial(operators: Operators, device: torch.device) -> float:
    """Relative error of one small extension over a paged cache: 5 queries after 40 cached tokens, blocks of 16."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, key, value, table = draw(5, 4, 128), draw(5, 16, 2, 128), draw(5, 16, 2, 128), ints(3, 0, 4).view(1, 3)
    out = torch.zeros_like(q)
    operators.forward.call(
        *operators.forward.arguments(
            q=q,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=ints(0, 5),
            seqused_k=ints(45),
            max_seqlen_q=5,
            max_seqlen_k=45,
            page_table=table,
            softmax_scale=0.1,
            is_causal=True,
        )
    )
    rows = [cache[table[0].long()].flatten(0, 1)[:45].double().repeat_interleave(2, 1).transpose(0, 1) for cache in (key, value)]
    scores = q.double().transpose(0, 1) @ rows[0].transpose(1, 2) * 0.1
    hidden = torch.arange(45, device=device) > torch.arange(40, 45, device=device)[:, None]
    right = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ rows[1]).transpose(0, 1)
    return float((out.double() - right).norm() / right.norm())


if __name__ == "__main__":
    reply(open_replies(), examine(sys.argv[1]))
    os._exit(0)  # what crashes while the process ends has nothing to say about the library
