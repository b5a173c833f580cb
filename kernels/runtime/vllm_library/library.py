"""vLLM's library of kernels, `_C_stable_libtorch`: found, tried in a process of its own, loaded, and its operators bound.

It is built on torch's stable interface, so that it loads without vLLM and into other releases of torch than its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from headway.core.contract.errors import BackendError
from headway.core.contract.support import YES, Support
from headway.kernels.runtime.bound_operator import BoundOperator
from headway.kernels.runtime.compiled_library import Home, LibrarySearch
from headway.kernels.runtime.probe import has_gpu

SEARCH: Final = LibrarySearch(
    "vllm_library",
    "HEADWAY_VLLM_LIBRARY",
    (Home("vllm", "vllm", "_C_stable_libtorch*.so"),),
    "headway.kernels.runtime.vllm_library.child",
)
NAMESPACE: Final = "_C"
"""Namespace of torch's operators that the library registers."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What is known of one operator's arguments; see `BoundOperator.of`."""

    needed: frozenset[str]
    given: frozenset[str] = frozenset()
    at_rest: Mapping[str, Any] | None = None


SIGNATURES: Final = {
    "marlin_gemm": Signature(
        frozenset({"a", "c", "b_q_weight", "b_bias", "b_scales", "b_zeros", "workspace"})
        | frozenset({"b_type_id", "size_m", "size_n", "size_k"}),
        at_rest={"is_k_full": True, "use_atomic_add": False, "use_fp32_reduce": True, "is_zp_float": False},
    ),
    "gptq_marlin_repack": Signature(
        frozenset({"b_q_weight", "size_k", "size_n", "num_bits"}), frozenset({"perm"}), {"is_a_8bit": False}
    ),
    "cutlass_scaled_mm": Signature(frozenset({"out", "a", "b", "a_scales", "b_scales", "bias"})),
    "cutlass_scaled_mm_supports_fp8": Signature(frozenset({"cuda_device_capability"})),
    "cutlass_scaled_mm_supports_block_fp8": Signature(frozenset({"cuda_device_capability"})),
}
"""The operators that are used. An argument that is unknown and must be given is a reason to leave an operator alone."""
_SUFFIX: Final = "_or_none"
"""Some releases end the names of optional arguments so."""


@cache
def find_library() -> Support:
    """Whether vLLM's library is loaded into this process; loads the first that works, and says why not."""
    if registered():  # by vLLM itself, whose process this is
        return YES
    here = has_gpu()
    if not here:
        return here
    refused = YES
    for candidate in SEARCH.candidates():
        what = f"vLLM's library of {candidate.home}"
        found = SEARCH.verdict(candidate)
        if "error" in found:
            refused &= Support.no(what, "to work here", f"{found['error']} ({candidate.path})", SEARCH.hint)
            continue
        try:
            torch.ops.load_library(str(candidate.path))  # type: ignore[no-untyped-call]
        except OSError as error:  # worked in the child: this process holds another build of the same name
            refused &= Support.no(what, "to load", f"{error} ({candidate.path})", SEARCH.hint)
            continue
        return YES
    return refused if not refused else Support.no("vLLM's library", "a compiled library that holds it", "none", SEARCH.hint)


def registered() -> list[str]:
    """Names of the used operators that torch has."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return [name for name in SIGNATURES if f"{NAMESPACE}::{name}" in names]


def bind(*names: str) -> tuple[dict[str, BoundOperator], Support]:
    """Bind operators of the library; ({}, why not) where one is missing or its schema is not what Headway calls."""
    support = find_library()
    if not support:
        return {}, support
    bound = {}
    for name in names:
        packet = getattr(getattr(torch.ops, NAMESPACE), name, None)
        if packet is None:
            support &= Support.no(f"{NAMESPACE}.{name}", "to be in vLLM's library", "a library without it", SEARCH.hint)
            continue
        overload, signature = packet.default, SIGNATURES[name]
        names_here = [argument.name for argument in overload._schema.arguments]
        other = {each: each.removesuffix(_SUFFIX) for each in names_here if each.endswith(_SUFFIX)}
        try:
            bound[name] = BoundOperator.of(overload, signature.needed, signature.given, signature.at_rest, other)
        except BackendError as error:
            support &= Support.no(f"{NAMESPACE}.{name}", "arguments that Headway knows", f"{error}: {overload._schema}")
    return (bound, support) if support else ({}, support)
