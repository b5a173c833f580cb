"""What the backends over other people's libraries share: probing without trusting a version, and one step's arguments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from headway.core.metadata import AttentionMetadata, Phase
from headway.core.support import YES, Support

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""What tensor-core attention libraries take."""


@dataclass(frozen=True, slots=True)
class Step:
    """The arguments of one step's calls. Tensors are the metadata's own, so that a captured graph sees them updated in place."""

    starts: Tensor
    """int32 [num_seqs + 1]: first packed token of each sequence."""
    kv_lens: Tensor
    """int32 [num_seqs]: keys of each sequence, 0 in a padding row."""
    block_table: Tensor
    """int32 [num_seqs, max_blocks]."""
    num_seqs: int
    max_query_len: int
    max_kv_len: int
    paged: bool
    """Whether keys come from the cache; else this step's k and v are all the keys there are."""
    uniform: bool
    """Whether every sequence has `max_query_len` new tokens."""

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> Step:
        """Read off one view of a step; no device work."""
        return cls(
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.num_seqs,
            metadata.max_query_len,
            metadata.max_seq_len,
            paged=metadata.phase is not Phase.PREFILL,
            uniform=metadata.num_tokens == metadata.num_seqs * metadata.max_query_len,
        )


def find(module: str, name: str, hint: str, parameters: Collection[str] = ()) -> tuple[Any, Support]:
    """Import one function and look at its signature; (None, why not) if it is not there.

    The function itself, not the package: a package without its compiled part still lists as installed, and flash-attn-4 leaves a
    folder `flash_attn` that is no flash-attn 2.
    """
    try:
        found = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # a library may raise anything while it loads
        text = " ".join(str(error).split())
        return None, Support.no(f"{module}.{name}", "to be importable", f"{type(error).__name__}: {text}", hint)
    missing = sorted(set(parameters) - set(signature(found).parameters)) if parameters else []
    if missing:
        return None, Support.no(f"{module}.{name}", f"the parameters {', '.join(missing)}", "a function without them", hint)
    return found, YES


def has_gpu() -> Support:
    """Whether torch sees a CUDA device."""
    if torch.cuda.is_available():
        return YES
    return Support.no("device", "a CUDA GPU", "none")


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None where there is none to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def at_least(needed: tuple[int, int], device: torch.device) -> Support:
    """Whether the device's compute capability is new enough."""
    found = capability(device)
    if found is None or found >= needed:
        return YES
    return Support.no("compute capability", "{}.{} or newer".format(*needed), "{}.{}".format(*found))
