"""Kinds of operations: for each of them kernels are registered, checked, measured and chosen in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headway.core.contract.backend import AttentionBackend, BackendInfo
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.errors import ConfigError
from headway.core.contract.experts import ExpertsCapabilities, ExpertsKernel, ExpertsKernelInfo
from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.linear import LinearCapabilities, LinearKernel, LinearKernelInfo
from headway.core.contract.ranks import AllReduceCapabilities, AllReduceKernel, AllReduceKernelInfo
from headway.core.contract.state import StateBackend, StateBackendInfo, StateCapabilities
from headway.core.contract.support import YES, Support


@dataclass(frozen=True, slots=True)
class OperationKind:
    """One kind of operation, and the names under which plugins and users know its kernels."""

    name: str
    word: str
    """The users' name for one of its kernels."""
    kernel: type[Kernel]
    """Base class of its kernels."""
    info: type[KernelInfo]
    """Type of a kernel's registration by a plugin."""
    claims: type
    """Type of a kernel's capabilities."""
    oldest: int
    """Oldest api_version that is served. What later ones brought, a kernel does without: a layer that needs it is refused."""
    kernels: str
    """The field of `Brought` with the kernels' names; with a hook headway_register_... of that name, where there is one."""
    layouts: str = ""
    """Likewise, the layouts of what the kernels keep from step to step; empty: they keep nothing."""
    rank_hook: str = ""
    """The hook that orders kernels which nobody has measured; empty: the order of registration does."""


ATTENTION: Final = OperationKind(
    "attention",
    "backend",
    AttentionBackend,
    BackendInfo,
    Capabilities,
    oldest=2,
    kernels="backends",
    layouts="layouts",
    rank_hook="headway_rank_backends",
)
STATE: Final = OperationKind(
    "state",
    "state backend",
    StateBackend,
    StateBackendInfo,
    StateCapabilities,
    oldest=3,
    kernels="state_backends",
    layouts="state_layouts",
    rank_hook="headway_rank_state_backends",
)
LINEAR: Final = OperationKind(
    "linear", "linear kernel", LinearKernel, LinearKernelInfo, LinearCapabilities, oldest=3, kernels="linear_kernels"
)
EXPERTS: Final = OperationKind(
    "experts", "experts kernel", ExpertsKernel, ExpertsKernelInfo, ExpertsCapabilities, oldest=3, kernels="experts_kernels"
)
ALL_REDUCE: Final = OperationKind(
    "all_reduce",
    "all-reduce kernel",
    AllReduceKernel,
    AllReduceKernelInfo,
    AllReduceCapabilities,
    oldest=3,
    kernels="all_reduce_kernels",
)
KINDS: Final = (ATTENTION, STATE, LINEAR, EXPERTS)
"""The kinds whose kernels third parties bring, and the kit checks in one process."""
ALL_KINDS: Final = (*KINDS, ALL_REDUCE)
"""The kinds that have a registry."""


def batch_invariance(claims: LinearCapabilities | ExpertsCapabilities) -> Support:
    """Return whether deterministic mode may take a third party's kernel: one for any number of rows, whose bits do not depend on
    that."""
    most = claims.max_rows if isinstance(claims, LinearCapabilities) else claims.max_tokens
    if not claims.batch_invariant:
        return Support.no("batch_invariant", "a kernel that declares it, in deterministic mode", "one that does not")
    need = "a kernel for any number of rows, in deterministic mode"
    return YES if most is None else Support.no("batch_invariant", need, f"one for up to {most}")


def kind_of(name: str, option: str = "kind") -> OperationKind:
    """Return a kind by its name.

    :raises ConfigError: there is no such kind.
    """
    for kind in KINDS:
        if kind.name == name:
            return kind
    raise ConfigError(option, f"one of {', '.join(kind.name for kind in KINDS)}", repr(name))


def kind_of_class(kernel: type[Kernel]) -> OperationKind:
    """Return the kind of operation that a class of a kernel computes."""
    return next(kind for kind in KINDS if issubclass(kernel, kind.kernel))
