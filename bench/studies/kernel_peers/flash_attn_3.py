"""FlashAttention 3 called bare: the operator of whichever library holds it, with nothing of Headway's around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.backends.flash_attn_3_library import find_library
from headway.bench.kernel.contenders import Call, KernelPeer
from headway.core.contract.support import Support
from headway.core.oracle.cases import Case


class FlashAttn3(KernelPeer):
    """One `fwd` for all phases, over blocks of 128 where there is a context; the library splits, and plans that in the call."""

    name, distribution, package, block_size, uniform_query_len = "flash_attn_3.bare", "flash-attn-3", "flash_attn_3", 128, 8
    extends = True

    @property
    def version(self) -> str:
        """The package that brought the library, which has no version of its own."""
        library = find_library()[0]
        return library.home if library is not None else ""

    def available(self, device: torch.device) -> Support:
        """Whether the backend finds a library that works; nothing is on a CPU."""
        if device.type != "cuda":
            return Support.no("device", "cuda", device.type)
        return find_library()[1]

    def probe(self) -> None:
        """Nothing more than `available`."""

    def decode(self, case: Case) -> Call:
        """Paged."""
        return self._paged(case)

    def prefill(self, case: Case) -> Call:
        """Dense varlen, or paged where there is a context."""
        if case.metadata.kv_lens != case.metadata.query_lens:
            return self._paged(case)
        starts, longest = case.metadata.query_start_loc, case.metadata.max_query_len
        return _call(case, k=case.k, v=case.v, cu_seqlens_k=starts, max_seqlen_k=longest)

    def _paged(self, case: Case) -> Call:
        step = case.metadata
        keys = {"seqused_k": step.seq_lens, "page_table": step.block_table, "max_seqlen_k": step.max_seq_len}
        return _call(case, k=case.cache.key, v=case.cache.value, **keys)


def _call(case: Case, **keys: Any) -> Call:
    library = find_library()[0]
    assert library is not None, "asked for where it is not available"
    forward, step = library.operators.forward, case.metadata
    arguments = forward.arguments(
        q=case.q,
        out=torch.empty_like(case.q),
        cu_seqlens_q=step.query_start_loc,
        max_seqlen_q=step.max_query_len,
        softmax_scale=case.spec.scale,
        is_causal=True,
        **keys,
    )

    def call() -> Tensor:
        out: Tensor = forward.call(*arguments)[0]
        return out

    return call
