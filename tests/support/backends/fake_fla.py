"""Stand-ins for fla-core's chunked functions: the signatures of 0.6.0 and its checks, computed in float64 token by token."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import softplus

CALLS: list[list[int]] = []
"""The lengths of the sequences of each call."""
_DELTA_GATES = {"use_gate_in_kernel", "A_log", "dt_bias"}


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    chunk_indices=None, cp_context=None, **gates,
):  # fmt: skip
    assert g.shape == beta.shape == v.shape[:3]
    assert chunk_indices is None or chunk_indices.tolist() == [
        [row, chunk] for row, length in enumerate(_lens(cu_seqlens)) for chunk in range(-(-length // 64))
    ]
    assert use_beta_sigmoid_in_kernel, "raw gates were handed in"
    states = scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu
    return _delta(q, k, v, g, beta, gates, use_qk_l2norm_in_kernel, allow_neg_eigval, states)


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None,
    disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    cp_context=None, use_graph=False, max_num_seqs=None, **gates,
):  # fmt: skip
    assert g.shape == (*v.shape[:3], q.shape[3])
    assert beta.shape == v.shape[:3]
    assert use_beta_sigmoid_in_kernel, "raw gates were handed in"
    states = scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu
    gates = {"use_gate_in_kernel": use_gate_in_kernel, **gates}
    return _delta(q, k, v, g, beta, gates, use_qk_l2norm_in_kernel, allow_neg_eigval, states)


def chunk_simple_gla(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False,
    cu_seqlens=None, cu_seqlens_cpu=None, **others,
):  # fmt: skip
    assert not others
    assert (g is None) != (g_gamma is None), "only one of them"
    assert q.shape[2] == v.shape[2], "no grouped heads"
    decays = (g if g is not None else g_gamma.expand(v.shape[:3])).double()[..., None]
    beta = torch.ones(v.shape[:3], dtype=torch.float64)
    states = scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu
    return _over(q, k, v, decays, beta, *states, delta=False)


def _delta(q, k, v, g, beta, gates, qk_norm, allow_neg_eigval, states):
    assert set(gates) == _DELTA_GATES, "what the real functions do not know they pass over in silence"
    assert gates["use_gate_in_kernel"]
    heads, per_channel = v.shape[2], g.dim() == 4
    assert gates["A_log"].shape == (heads,)
    assert gates["dt_bias"].shape == (heads * (q.shape[3] if per_channel else 1),)
    g = g.double() if per_channel else g.double()[..., None]
    g = -gates["A_log"].double().exp()[:, None] * softplus(g + gates["dt_bias"].double().view(heads, -1))
    if qk_norm:
        q, k = (each.double() / (each.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    q, k = (each.repeat_interleave(heads // each.shape[2], 2) for each in (q, k))
    beta = beta.double().sigmoid() * (2 if allow_neg_eigval else 1)
    return _over(q, k, v, g, beta, *states, delta=True)


def _over(
    q, k, v, g, beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu, *, delta
):  # fmt: skip
    """g: float64 [1, T, heads, K or 1]; q, k, v: [1, T, heads, dim]; beta: [1, T, heads]."""
    assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
    assert cu_seqlens_cpu.device.type == "cpu"
    assert cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.int64
    assert len(q) == 1, "sequences are packed"
    assert int(cu_seqlens[-1]) == q.shape[1]
    assert output_final_state
    assert scale is not None
    assert initial_state.dtype == torch.float32
    lens, dims = _lens(cu_seqlens), (q.shape[3], v.shape[3])
    assert min(lens) > 0
    assert initial_state.shape == (len(lens), v.shape[2], *(reversed(dims) if state_v_first else dims))
    CALLS.append(lens)
    states = (initial_state.transpose(2, 3) if state_v_first else initial_state).double().clone()
    out = torch.empty(v.shape, dtype=torch.float64)
    for row, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        for token in range(first, end):
            state = states[row] * g[0, token].exp()[..., None]
            value, key = v[0, token].double(), k[0, token].double()
            if delta:
                value = (value - torch.einsum("hkv,hk->hv", state, key)) * beta[0, token][:, None]
            states[row] = state + key[..., None] * value[:, None]
            out[0, token] = scale * torch.einsum("hkv,hk->hv", states[row], q[0, token].double())
    return out.to(v.dtype), (states.transpose(2, 3) if state_v_first else states).float().contiguous()


def _lens(starts: Tensor | None) -> list[int]:
    return [end - first for first, end in pairwise(starts.tolist())]


def modules() -> dict[str, ModuleType]:
    """The library's modules, by the names under which they are imported."""
    found = {name: ModuleType(name) for name in ("fla", "fla.ops")}
    for name, function in (("gated_delta_rule", chunk_gated_delta_rule), ("kda", chunk_kda), ("simple_gla", chunk_simple_gla)):
        module = found[f"fla.ops.{name}"] = ModuleType(f"fla.ops.{name}")
        setattr(module, function.__name__, function)
    return found
