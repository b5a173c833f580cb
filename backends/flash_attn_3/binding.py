"""The library's operators, called by argument name: each home declares its own list, in its own order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from headway.kernels.runtime.compiled_library import BoundOperator

FORWARD: Final = "fwd"
SCHEDULE: Final = "get_scheduler_metadata"
NEEDED: Final = frozenset(
    {
        "q",
        "k",
        "v",
        "out",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "page_table",
        "softmax_scale",
        "is_causal",
        "window_size_left",
        "window_size_right",
        "softcap",
        "scheduler_metadata",
        "num_splits",
    }
)
"""Arguments of the forward operator without which this backend cannot work."""
GIVEN: Final = NEEDED | {"batch_size", "num_heads", "num_heads_k", "headdim", "headdim_v", "qkv_dtype"}
"""Arguments that this backend always gives to the operator that has them."""
OTHER_NAMES: Final = {"qv": "q_v", "sinks": "s_aux", "learnable_sink": "s_aux", "causal": "is_causal"}
"""What some homes call an argument -> what this backend calls it."""
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
"""Values that leave out what an argument is for, where the operator declares no default. An optional one is left out by None."""


@dataclass(frozen=True)
class Operators:
    """The operators of one library."""

    forward: BoundOperator
    schedule: BoundOperator | None
    """Plans the split of a step once for all layers; None where the library keeps it to itself."""

    @classmethod
    def of(cls, namespace: str) -> Operators:
        """Bind the operators that torch has registered under a namespace.

        :raises BackendError: the forward operator is not what this backend calls.
        """
        space = getattr(torch.ops, namespace)
        schedule = getattr(space, SCHEDULE, None)
        return cls(
            _bound(getattr(space, FORWARD).default, NEEDED),
            None if schedule is None else _bound(schedule.default, frozenset({"seqused_k", "page_size"})),
        )

    @property
    def sinks(self) -> bool:
        """Whether the forward operator takes a logit for each head that joins the softmax's denominator."""
        return "s_aux" in self.forward.place

    @property
    def latent(self) -> bool:
        """Whether the forward operator takes the part of the query that meets the value's half of a latent key."""
        return "q_v" in self.forward.place


def _bound(overload: Any, needed: frozenset[str]) -> BoundOperator:
    return BoundOperator.of(overload, needed, GIVEN, AT_REST, OTHER_NAMES)


def registered(before: frozenset[str] = frozenset()) -> list[str]:
    """Namespaces whose `fwd` reads a page table, without those of `before`."""
    schemas = torch._C._jit_get_all_schemas()
    suffix = f"::{FORWARD}"
    found = {
        schema.name.removesuffix(suffix)
        for schema in schemas
        if schema.name.endswith(suffix) and any(argument.name == "page_table" for argument in schema.arguments)
    }
    return sorted(found - before)
