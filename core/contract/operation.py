"""Kinds of operations with registered, checked and measured kernels: attention, state, linear, experts and all-reduce."""

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
    """A kind of operation, and the names that plugins and users use for its kernels."""

    name: str
    word: str
    """Term for a kernel of this kind in messages, such as "state backend"."""
    kernel: type[Kernel]
    """Base class of the kernels of this kind."""
    info: type[KernelInfo]
    """Type of a plugin's registration of a kernel."""
    claims: type
    """Type of a kernel's capabilities."""
    oldest: int
    """Oldest supported api_version. A kernel of an older version than a layer's features need is refused for this layer."""
    kernels: str
    """Field of `Brought` that lists the kernels' names. Plugins register kernels through the hook `headway_register_` plus this
    name if that hook exists, otherwise through `headway_register_kernels`."""
    layouts: str = ""
    """Field of `Brought` that lists cache or state layouts, and suffix of the hook that registers them. Empty if the kernels
    cache nothing."""
    rank_hook: str = ""
    """Hook that ranks kernels without measurements. Empty means that the order of registration ranks them."""


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
"""Kinds whose kernels plugins can provide and the conformance kit can check in one process."""
ALL_KINDS: Final = (*KINDS, ALL_REDUCE)
"""All kinds that have a registry."""


def batch_invariance(claims: LinearCapabilities | ExpertsCapabilities) -> Support:
    """Return whether deterministic mode may use a plugin's kernel: it must be batch-invariant and accept any number of rows."""
    most = claims.max_rows if isinstance(claims, LinearCapabilities) else claims.max_tokens
    if not claims.batch_invariant:
        return Support.no("batch_invariant", "a kernel that declares it, in deterministic mode", "one that does not")
    need = "a kernel for any number of rows, in deterministic mode"
    return YES if most is None else Support.no("batch_invariant", need, f"one for up to {most}")


def kind_of(name: str, option: str = "kind") -> OperationKind:
    """Return a kind by its name.

    :raises ConfigError: if the name is unknown.
    """
    for kind in KINDS:
        if kind.name == name:
            return kind
    raise ConfigError(option, f"one of {', '.join(kind.name for kind in KINDS)}", repr(name))


def kind_of_class(kernel: type[Kernel]) -> OperationKind:
    """Return the kind of operation that a kernel class computes."""
    return next(kind for kind in ALL_KINDS if issubclass(kernel, kind.kernel))
