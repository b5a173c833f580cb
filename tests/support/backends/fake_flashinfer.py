"""Stand-ins for FlashInfer's wrappers: plain attention with the parameters of release 0.6.4 and its checks."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class _Wrapper:
    made: list[_Wrapper]

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", **options: Any) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        self.kv_layout, self.options = kv_layout, options
        self.made.append(self)

    def _plan(
        self, starts: Tensor, scale: float, window: int = -1, softcap: float | None = 0.0, *lists: Tensor, causal: bool = True
    ) -> None:
        assert {each.dtype for each in (starts, *lists)} == {torch.int32}
        assert {each.device.type for each in (starts, *lists)} == {"cpu"}, "the library asks for them on the host"
        assert causal
        self.starts, self.scale, self.window, self.softcap = starts.tolist(), scale, window, softcap

    def _pages(self, ends: Tensor, pages: Tensor, last: Tensor, page_size: int) -> None:
        assert len(ends) == len(self.starts) == len(last) + 1
        assert int(ends[-1]) == len(pages)
        assert ((last >= 1) & (last <= page_size)).all(), "entries of the last page"
        bounds = list(pairwise(ends.tolist()))
        self.pages = [pages[first:end] for first, end in bounds]
        self.lens = [(end - first - 1) * page_size + rest for (first, end), rest in zip(bounds, last.tolist(), strict=True)]

    def _attend(self, q: Tensor, row: int, k: Tensor, v: Tensor, out: Tensor) -> None:
        """k: [length, kv_heads, head_dim]; q and out: the step's."""
        tokens = slice(self.starts[row], self.starts[row + 1])
        k, v = (each.double().repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[tokens].double(), k) * self.scale
        scores = self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
        n, length = tokens.stop - tokens.start, len(k)
        left = torch.arange(length - n, length)[:, None] - torch.arange(length)
        hidden = (left < 0) | (left > self.window if self.window >= 0 else False)
        out[tokens] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).to(out.dtype)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal, window_left, logits_soft_cap,
        sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert qo_indptr.tolist() == kv_indptr.tolist()
        self._plan(qo_indptr, sm_scale, window_left, logits_soft_cap, causal=causal)

    def run(self, q, k, v, out):
        for row, (first, end) in enumerate(pairwise(self.starts)):
            self._attend(q, row, k[first:end], v[first:end], out)


class _Paged(_Wrapper):
    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        assert len(q) == len(out) == self.starts[-1], "as many rows as were planned"
        for row, length in enumerate(self.lens):
            rows = (cache[self.pages[row]] for cache in paged_kv_cache)
            rows = (each.transpose(1, 2) if self.kv_layout == "HND" else each for each in rows)
            self._attend(q, row, *(each.flatten(0, 1)[:length] for each in rows), out)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
        page_size, causal, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        lists = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan(qo_indptr, sm_scale, window_left, logits_soft_cap, *lists, causal=causal)
        self._pages(*lists, page_size)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap,
        sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        lists = indptr, indices, last_page_len
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._plan(starts, sm_scale, window_left, logits_soft_cap, *lists)
        self._pages(*lists, page_size)


class BatchMLAPagedAttentionWrapper(_Wrapper):
    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale,
        q_data_type, kv_data_type,
    ):  # fmt: skip
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        self._plan(qo_indptr, sm_scale, -1, 0.0, kv_indptr, kv_indices, kv_len_arr, causal=causal)
        self.pages = [kv_indices[first:end] for first, end in pairwise(kv_indptr.tolist())]
        self.lens = kv_len_arr.tolist()

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: Tensor) -> None:
        for part in (q_nope, q_pe):  # the library's kernels take strides, and load 16 bytes at a time
            assert part.stride(-1) == 1
            assert all(stride * part.element_size() % 16 == 0 for stride in part.stride()[:-1])
        for row, length in enumerate(self.lens):
            key = torch.cat([ckv_cache, kpe_cache], -1)[self.pages[row]].flatten(0, 1)[:length, None]
            self._attend(torch.cat([q_nope, q_pe], -1), row, key, key[..., : ckv_cache.shape[-1]], out)


def modules() -> dict[str, ModuleType]:
    """Entries for sys.modules; `modules()["flashinfer"].made` lists the wrappers as they are made."""
    library, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    made: list[_Wrapper] = []
    for each in (BatchPrefillWithRaggedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        setattr(library, each.__name__, type(each.__name__, (each,), {"made": made}))
    mla.BatchMLAPagedAttentionWrapper = type("BatchMLAPagedAttentionWrapper", (BatchMLAPagedAttentionWrapper,), {"made": made})  # type: ignore[attr-defined]
    library.made = made  # type: ignore[attr-defined]
    return {"flashinfer": library, "flashinfer.mla": mla}
