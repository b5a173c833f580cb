"""vLLM's kernel library `_C_stable_libtorch`: search, trial in a child process, loading, and binding of its operators.

The library uses torch's stable ABI, so it loads without vLLM and with different releases of torch. A library built for a
different release may still crash the process that loads it. `python -m headway.kernels.runtime.vllm_library PATH` therefore loads
a library, calls it once, and prints one line of JSON. The call is a GEMM whose result does not depend on the weight's layout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from headway.core.contract.errors import BackendError
from headway.core.contract.support import YES, Support
from headway.core.system.child import open_replies, reply
from headway.kernels.runtime.compiled_library import BoundOperator, Home, LibraryCandidate, LibrarySearch
from headway.kernels.runtime.probe import has_gpu


def scalar_type(exponent: int, mantissa: int, signed: bool, bias: int = 0, finite: bool = False, nan: int = 1) -> int:
    """Return vLLM's integer ID of an element type: bit fields of 8, 8, 1, 32, 1 and 8 bits, starting at the lowest bit.

    nan: encoding of NaN. 0 means no NaN, 1 means as in IEEE 754, 2 means all bits set.
    """
    return exponent | mantissa << 8 | int(signed) << 16 | bias << 17 | int(finite) << 49 | nan << 50


INT4: Final = scalar_type(0, 4, signed=False)
"""Type ID of 4-bit unsigned integers with zero points."""
INT4_LESS_8: Final = scalar_type(0, 4, signed=False, bias=8)
"""Type ID of 4-bit unsigned integers from which 8 is subtracted."""
FLOAT8: Final = scalar_type(4, 3, signed=True, finite=True, nan=2)
FLOAT4: Final = scalar_type(2, 1, signed=True, finite=True, nan=0)


SEARCH: Final = LibrarySearch(
    "vllm_library",
    "HEADWAY_VLLM_LIBRARY",
    (Home("vllm", "vllm", "_C_stable_libtorch*.so"),),
    "headway.kernels.runtime.vllm_library",
)
NAMESPACE: Final = "_C"
"""Namespace in torch.ops in which the library registers its operators."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Known arguments of one operator. The fields have the same meaning as the arguments of `BoundOperator.of`."""

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
"""Name of each operator that Headway calls -> its signature. An operator that requires any other argument is not used."""
_SUFFIX: Final = "_or_none"
"""Suffix that some releases of vLLM append to the names of optional arguments."""


@cache
def find_library() -> Support:
    """Load the first library that works, unless a library is already loaded. Return whether a library is loaded."""
    if registered():  # by vLLM itself, which runs in this process
        return YES
    here = has_gpu()
    if not here:
        return here

    def load(candidate: LibraryCandidate, namespace: str) -> None:
        torch.ops.load_library(str(candidate.path))

    return SEARCH.first("vLLM's library", "a compiled library that holds it", load)[1]


def registered() -> list[str]:
    """Return the names of the operators in SIGNATURES that are registered in torch."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return [name for name in SIGNATURES if f"{NAMESPACE}::{name}" in names]


def bind(*names: str) -> tuple[dict[str, BoundOperator], Support]:
    """Bind operators of the library. Return ({}, the reason) if an operator is missing or its schema is unknown."""
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


def examine(path: str) -> dict[str, str]:
    """Try a library. Return {"namespace": ...} if it loads and its GEMM is correct, else {"error": the reason}."""
    try:
        torch.ops.load_library(path)
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
    """Return whether the GEMM of a matrix of ones with a 128 x 128 weight of -8 is correct. Return True if Marlin cannot be
    called."""
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
    os._exit(0)  # ignore crashes during interpreter shutdown: they do not concern the library
