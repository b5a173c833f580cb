"""The library that will be used: found, tried in a process of its own, then loaded into this one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from headway.backends.flash_attn_3.binding import Operators, registered
from headway.core.contract.errors import BackendError
from headway.core.contract.support import YES, Support
from headway.kernels.runtime.compiled_library import Home, LibraryCandidate, LibrarySearch
from headway.kernels.runtime.probe import has_gpu

SEARCH = LibrarySearch(
    "flash_attn_3",
    "HEADWAY_FA3_LIBRARY",
    (
        Home("flash-attn-3", "flash_attn_3", "_C*.so"),
        Home("vllm", "vllm", "vllm_flash_attn/_vllm_fa3_C*.so"),
        Home("sgl-kernel", "sgl_kernel", "**/flash_ops*.so"),
    ),
    "headway.backends.flash_attn_3.child",
)
"""torch is not among the homes: its `activate_flash_attention_impl("FA3")` imports the first."""
GENERATION = 9
"""Major compute capability of the GPUs that it was written for."""


@dataclass(frozen=True)
class Library:
    """A library that loads here and computes right."""

    home: str
    """Who brought it."""
    path: Path
    operators: Operators


@cache
def find_library() -> tuple[Library | None, Support]:
    """The first library that works, loaded into this process; (None, why not), with a reason for each that was found."""
    here = has_gpu()
    if here:
        major, minor = torch.cuda.get_device_capability()
        if major != GENERATION:
            here = Support.no("compute capability", f"{GENERATION}.x (Hopper)", f"{major}.{minor}")
    if not here:
        return None, here
    refused = YES
    for candidate in SEARCH.candidates():
        found = SEARCH.verdict(candidate)
        if "error" in found:
            refused &= Support.no(
                f"FlashAttention 3 of {candidate.home}", "to work here", f"{found['error']} ({candidate.path})", SEARCH.hint
            )
            continue
        try:
            return load(candidate, found["namespace"]), YES
        except (OSError, BackendError) as error:  # worked in the child: this process holds another build of the same name
            refused &= Support.no(f"FlashAttention 3 of {candidate.home}", "to load", f"{error} ({candidate.path})", SEARCH.hint)
    return None, refused if not refused else Support.no("FlashAttention 3", "a library that holds it", "none", SEARCH.hint)


def load(candidate: LibraryCandidate, namespace: str) -> Library:
    """Load a library that the child has tried. One that somebody else has loaded already is used as it is.

    :raises OSError or BackendError: it does not load into this process, or not with the operators it should have.
    """
    if namespace not in registered():
        torch.ops.load_library(str(candidate.path))  # type: ignore[no-untyped-call]
    return Library(candidate.home, candidate.path, Operators.of(namespace))
