"""FlashAttention 3 libraries in other packages: search, test in a child process, loading, and binding of operators by name.

A library built for a different release of torch may crash the process that loads it. `python -m
headway.backends.flash_attn_3_library PATH` loads a library, calls it once, and prints the result as one line of JSON.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from headway.core.contract.errors import BackendError
from headway.core.contract.support import Support
from headway.core.system.child import open_replies, reply
from headway.kernels.runtime.compiled_library import BoundOperator, Home, LibraryCandidate, LibrarySearch
from headway.kernels.runtime.probe import has_gpu

FORWARD: Final = "fwd"
SCHEDULE: Final = "get_scheduler_metadata"
NEEDED: Final = frozenset(
    (
        *("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table"),
        *("softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap", "scheduler_metadata", "num_splits"),
    )
)
"""Names of the arguments that the forward operator must have."""
GIVEN: Final = NEEDED | {"batch_size", "num_heads", "num_heads_k", "headdim", "headdim_v", "qkv_dtype"}
"""Names of the arguments that this backend always passes if the operator has them."""
OTHER_NAMES: Final = {"qv": "q_v", "sinks": "s_aux", "learnable_sink": "s_aux", "causal": "is_causal"}
"""Name of an argument in some packages -> its name in this backend."""
AT_REST: Final = {
    "attention_chunk": 0,
    "cp_rank": 0,
    "cp_world_size": 1,
    "has_softcap": False,
    "is_causal": False,
    "is_rotary_interleaved": False,
    "max_seqlen_k_new": 0,
    "num_splits": 0,
    "sm_margin": 0,
    "softcap": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
}
"""Argument without a default in the operator's schema -> neutral value. Optional arguments are set to None."""


@dataclass(frozen=True)
class Operators:
    """Operators of one library."""

    forward: BoundOperator
    schedule: BoundOperator | None
    """Operator that plans a step's split once for all layers. None if the library does not expose it."""

    @classmethod
    def of(cls, namespace: str) -> Operators:
        """Bind the operators of a torch namespace. :raises BackendError: if the forward operator has an unsupported signature."""
        space = getattr(torch.ops, namespace)
        schedule = getattr(space, SCHEDULE, None)
        return cls(
            _bound(getattr(space, FORWARD).default, NEEDED),
            None if schedule is None else _bound(schedule.default, frozenset({"seqused_k", "page_size"})),
        )

    @property
    def sinks(self) -> bool:
        """True if the forward operator supports attention sinks."""
        return "s_aux" in self.forward.place

    @property
    def latent(self) -> bool:
        """True if the forward operator supports absorbed MLA, that is, has an argument q_v for the part of the query that is
        multiplied by the value."""
        return "q_v" in self.forward.place


def _bound(overload: Any, needed: frozenset[str]) -> BoundOperator:
    return BoundOperator.of(overload, needed, GIVEN, AT_REST, OTHER_NAMES)


def registered(before: frozenset[str] = frozenset()) -> list[str]:
    """Return the torch namespaces whose operator `fwd` has a page table argument, except those in `before`."""
    schemas = torch._C._jit_get_all_schemas()
    suffix = f"::{FORWARD}"
    found = {
        schema.name.removesuffix(suffix)
        for schema in schemas
        if schema.name.endswith(suffix) and any(argument.name == "page_table" for argument in schema.arguments)
    }
    return sorted(found - before)


TOLERANCE = 2e-2
"""Maximum accepted relative error of the trial call in bfloat16: ||out - reference|| / ||reference||."""


def examine(path: str) -> dict[str, str]:
    """Load and test a library. Return {"namespace": ...} if its results are correct, otherwise {"error": reason}."""
    before = frozenset(registered())
    try:
        torch.ops.load_library(path)
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
    """Return the relative error of a small extend over a paged cache: 5 queries after 40 cached tokens, blocks of 16."""
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
    os._exit(0)  # a crash at process exit does not count against the library


SEARCH = LibrarySearch(
    "flash_attn_3",
    "HEADWAY_FA3_LIBRARY",
    (
        Home("flash-attn-3", "flash_attn_3", "_C*.so"),
        Home("vllm", "vllm", "vllm_flash_attn/_vllm_fa3_C*.so"),
        Home("sgl-kernel", "sgl_kernel", "**/flash_ops*.so"),
    ),
    "headway.backends.flash_attn_3_library",
)
"""Search for the library. torch is not listed, because its `activate_flash_attention_impl("FA3")` imports the first package."""
GENERATION = 9
"""Major compute capability of the supported GPUs."""


@dataclass(frozen=True)
class Library:
    """A library that works on this machine."""

    home: str
    """Name of the package that contains the library."""
    path: Path
    operators: Operators


@cache
def find_library() -> tuple[Library | None, Support]:
    """Load the first library that works into this process. Return (library, support), or (None, a reason for each candidate)."""
    here = has_gpu()
    if here:
        major, minor = torch.cuda.get_device_capability()
        if major != GENERATION:
            here = Support.no("compute capability", f"{GENERATION}.x (Hopper)", f"{major}.{minor}")
    if not here:
        return None, here
    return SEARCH.first("FlashAttention 3", "a library that holds it", load)


def load(candidate: LibraryCandidate, namespace: str) -> Library:
    """Load a library that the child process has tested, unless it is already loaded.

    :raises OSError or BackendError: if loading fails.
    """
    if namespace not in registered():
        torch.ops.load_library(str(candidate.path))
    return Library(candidate.home, candidate.path, Operators.of(namespace))
