"""FlashAttention 3 without FlashAttention 3: its operators under the schemas of three homes, computed in float64 on a CPU."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor

from fake_libraries import rows_of

ARGUMENTS = {
    "vllm": (
        "Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
        "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
        "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
        "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
        "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
        "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
    ),
    "upstream": (
        "Tensor q, Tensor k, Tensor v, Tensor? k_new = None, Tensor? v_new = None, Tensor? q_v = None, Tensor(a!)? out = None, "
        "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
        "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, Tensor? page_table = None, "
        "Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, Tensor? rotary_sin = None, "
        "Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, "
        "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
        "int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, "
        "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0"
    ),
    "sgl": (
        "Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
        "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
        "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
        "float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
        "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? sinks"
    ),
}
_SCHEDULE = (
    "int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, int headdim_v, "
    "ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, "
    "Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, int window_size_left, "
    "int window_size_right, {chunk}bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin"
)
HOMES = tuple(ARGUMENTS)
_NUMBERS = count()


class FlashAttn3:
    """One package's operators in a separate namespace; `calls` holds the named arguments of each call."""

    def __init__(self, home: str = "vllm", leave_out: str = "") -> None:
        """leave_out: an argument that the forward operator of this build does not have."""
        self.namespace = f"fake_fa3_{next(_NUMBERS)}"
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._library = torch.library.Library(self.namespace, "DEF")
        arguments = [each.strip() for each in ARGUMENTS[home].split(",")]
        kept = [each for each in arguments if not leave_out or each.split("=")[0].split()[-1] != leave_out]
        self._define("fwd", ", ".join(kept), "Tensor[]", self._fwd)
        if home != "sgl":
            chunk = "int attention_chunk, " if home == "upstream" else ""
            self._define("get_scheduler_metadata", _SCHEDULE.format(chunk=chunk), "Tensor", self._schedule)

    @property
    def names(self) -> list[str]:
        """The operators called, in order."""
        return [name for name, _ in self.calls]

    def _define(self, name: str, arguments: str, returns: str, function: Any) -> None:
        self._library.define(f"{name}({arguments}) -> {returns}")
        overload = getattr(getattr(torch.ops, self.namespace), name).default
        names = [argument.name for argument in overload._schema.arguments]

        def call(*values: Any) -> Any:
            defaults = [argument.default_value for argument in overload._schema.arguments]  # torch leaves trailing defaults out
            given = dict(zip(names, [*values, *defaults[len(values) :]], strict=True))
            self.calls.append((name, given))
            return function(given)

        self._library.impl(name, call, "CompositeExplicitAutograd")

    def _schedule(self, given: dict[str, Any]) -> Tensor:
        """The lengths at the time of the call, so that a stale plan is detected."""
        assert given["seqused_k"].dtype == torch.int32
        assert given["seqused_k"].shape == (given["batch_size"],)
        return torch.cat([given["seqused_k"], _common(given)])

    def _fwd(self, given: dict[str, Any]) -> list[Tensor]:
        q, k, v, out, starts = (given[name] for name in ("q", "k", "v", "out", "cu_seqlens_q"))
        at_rest = ("k_new", "v_new", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos", "q_descale")
        assert all(given[name] is None for name in at_rest)
        assert given.get("cp_world_size", 1) == 1
        assert given.get("attention_chunk", 0) == given["sm_margin"] == 0
        assert starts.dtype == torch.int32
        assert given["max_seqlen_q"] == (starts[1:] - starts[:-1]).max()
        assert all(rows.stride(-1) == 1 for rows in (q, k, v, out))
        assert out.shape == (*q.shape[:2], v.shape[-1])
        table, used, plan = given["page_table"], given["seqused_k"], given["scheduler_metadata"]
        if table is not None:
            assert given["cu_seqlens_k"] is None
            assert table.dtype == used.dtype == torch.int32
        if plan is not None:
            assert plan.tolist() == [*used.tolist(), *_common({**given, "page_size": k.shape[1]}).tolist()], "a stale plan"
        sinks = given.get("s_aux", given.get("sinks"))
        assert sinks is None or sinks.dtype == torch.bfloat16
        lse = torch.full((q.shape[1], len(q)), torch.inf)
        for row in range(len(starts) - 1):
            tokens = slice(int(starts[row]), int(starts[row + 1]))
            if table is None:
                keys, values = (rows[tokens] for rows in (k, v))
            else:
                size, length = k.shape[1], int(used[row])
                assert length <= given["max_seqlen_k"]
                keys, values = (rows_of(rows, table[row], -(-length // size) * size) for rows in (k, v))
            q_v = None if given.get("q_v") is None else given["q_v"][tokens]
            length = len(keys) if table is None else int(used[row])
            out[tokens], lse[:, tokens] = _attend(q[tokens], q_v, keys, values, length, given, sinks)
        return [out, lse, torch.empty(0), torch.empty(0)]


def _common(given: dict[str, Any]) -> Tensor:
    """Arguments that a plan was made with, and must be used with."""
    softcap = given["has_softcap"] if "has_softcap" in given else given["softcap"] > 0
    names = ("max_seqlen_q", "max_seqlen_k", "page_size", "is_causal", "window_size_left", "window_size_right", "num_splits")
    return torch.tensor([*(int(given[name]) for name in names), int(softcap)], dtype=torch.int32)


def _attend(
    q: Tensor, q_v: Tensor | None, keys: Tensor, values: Tensor, length: int, given: dict[str, Any], sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One sequence: out [n, heads, d_v] and lse [heads, n]; rows of keys and values past `length` are loaded and masked."""
    n, repeat = len(q), q.shape[1] // keys.shape[1]
    if length == 0:
        return torch.zeros_like(q[..., :1]).expand(-1, -1, values.shape[-1]), torch.full((q.shape[1], n), torch.inf)
    keys, values = (rows.double().repeat_interleave(repeat, 1).transpose(0, 1) for rows in (keys, values))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2)
    if q_v is not None:
        scores = scores + q_v.double().transpose(0, 1) @ values.transpose(1, 2)
    scores = scores * given["softmax_scale"]
    if given["softcap"]:
        scores = given["softcap"] * torch.tanh(scores / given["softcap"])
    at, columns = torch.arange(length - n, length)[:, None], torch.arange(keys.shape[1])[None]
    hidden = columns >= length
    right = 0 if given["is_causal"] else given["window_size_right"]
    if right >= 0:
        hidden = hidden | (columns > at + right)
    if given["window_size_left"] >= 0:
        hidden = hidden | (columns < at - given["window_size_left"])
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
        values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
    return (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype), scores.logsumexp(-1).float()
