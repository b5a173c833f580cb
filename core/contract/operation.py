"""Kinds of operations: for each of them kernels are registered, measured and chosen in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headway.core.contract.backend import AttentionBackend, BackendInfo
from headway.core.contract.state_backend import StateBackend, StateBackendInfo


@dataclass(frozen=True, slots=True)
class OperationKind:
    """One kind of operation, and the names under which plugins and users know its kernels."""

    name: str
    word: str
    """What users call one of its kernels."""
    kernel: type
    """Base class of its kernels."""
    info: type
    """What a plugin registers of a kernel."""
    kernels: str
    """The kernels in the name of the hook headway_register_..., and the field of `Brought`."""
    layouts: str
    """Likewise, the layouts of what the kernels keep from step to step."""
    rank_hook: str
    """The hook that orders kernels which nobody has measured."""


ATTENTION: Final = OperationKind(
    "attention", "backend", AttentionBackend, BackendInfo, "backends", "layouts", "headway_rank_backends"
)
STATE: Final = OperationKind(
    "state", "state backend", StateBackend, StateBackendInfo, "state_backends", "state_layouts", "headway_rank_state_backends"
)
