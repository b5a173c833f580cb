"""The float64 answer to a case, which every answer is compared with before it counts or is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.oracle.cases import Case
from headway.core.oracle.oracle import attend


def reference(case: Case) -> Tensor:
    """The step's output, float64 [num_tokens, num_heads, v_head_dim]; rows of padding sequences are zero."""
    return reference_with_lse(case)[0]


def reference_with_lse(case: Case) -> tuple[Tensor, Tensor]:
    """`reference`, and float64 [num_heads, num_tokens]: the logarithm of each softmax's denominator, sinks included."""
    spec, metadata = case.spec, case.metadata
    out = torch.zeros((*case.q.shape[:2], spec.v_head_dim), dtype=torch.float64, device=case.q.device)
    lse = torch.zeros((spec.num_heads, len(case.q)), dtype=torch.float64, device=case.q.device)
    token = 0
    for row, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        if kv_len:
            positions = torch.arange(kv_len, device=out.device)
            blocks = metadata.block_table[row].long()[positions // metadata.block_size]
            k, v = case.cache.gather(blocks * metadata.block_size + positions % metadata.block_size)
            keys, values = k.double() * spec.k_scale, v.double() * spec.v_scale
            tokens = slice(token, token + query_len)
            out[tokens], lse[:, tokens] = attend(spec, case.q[tokens], keys, values, kv_len - query_len)
        token += query_len
    return out, lse


def run_backend(backend: AttentionBackend, case: Case, lse: Tensor | None = None) -> Tensor:
    """One step through one backend, as the engine calls it, into an output filled with NaN so that a missed row shows.

    lse: float32 [num_heads, num_tokens], which a backend that declares it fills.
    """
    more = [{} if lse is None else {"lse": part} for part in _parts(lse, case)]
    metadata, n = case.metadata, case.metadata.num_prefill_tokens
    out = case.q.new_full((*case.q.shape[:2], case.spec.v_head_dim), torch.nan)
    if metadata.prefill is not None:
        backend.prefill(case.q[:n], case.k[:n], case.v[:n], case.cache, backend.plan(metadata.prefill), out[:n], **more[0])
    if metadata.decode is not None:
        backend.decode(case.q[n:], case.cache, backend.plan(metadata.decode), out[n:], **more[1])
    return out


def _parts(lse: Tensor | None, case: Case) -> tuple[Tensor | None, Tensor | None]:
    n = case.metadata.num_prefill_tokens
    return (None, None) if lse is None else (lse[:, :n], lse[:, n:])


def relative_error(out: Tensor, expected: Tensor, case: Case) -> float:
    """||out - expected|| / ||expected|| over the rows that are not padding; NaN if any element there is."""
    lens = torch.tensor(case.metadata.query_lens)
    real = torch.repeat_interleave(torch.tensor(case.metadata.kv_lens) > 0, lens).to(out.device)
    return float((out[real].double() - expected[real]).norm() / expected[real].norm())
