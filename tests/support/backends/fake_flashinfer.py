"""Stand-ins for FlashInfer's wrappers: plain attention behind the parameters of release 0.6.4, with its checks."""

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
        """k: [length, kv_heads, head_dim]; q and out are those of the step."""
        tokens = slice(self.starts[row], self.starts[row + 1])
        k, v = (each.double().repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[tokens].double(), k) * self.scale
        scores = self.softcap * torch.tanh(scores / self.softcap) if self.softcap else scores
        n, length = tokens.stop - tokens.start, len(k)
        left = torch.arange(length - n, length)[:, None] - torch.arange(length)
        hidden = (left < 0) | (left > self.window if self.window >= 0 else False)
        out[tokens] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).to(out.dtype)

    def _over_pages(self, q: Tensor, caches: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        assert len(q) == len(out) == self.starts[-1], "as many rows as were planned"
        for row, length in enumerate(self.lens):
            rows = (cache[self.pages[row]] for cache in caches)
            rows = (each.transpose(1, 2) if self.kv_layout == "HND" else each for each in rows)
            self._attend(q, row, *(each.flatten(0, 1)[:length] for each in rows), out)
        return out


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        logits_soft_cap: float,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert qo_indptr.tolist() == kv_indptr.tolist()
        self._plan(qo_indptr, sm_scale, window_left, logits_soft_cap, causal=causal)

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        for row, (first, end) in enumerate(pairwise(self.starts)):
            self._attend(q, row, k[first:end], v[first:end], out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        window_left: int,
        logits_soft_cap: float,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        lists = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan(qo_indptr, sm_scale, window_left, logits_soft_cap, *lists, causal=causal)
        self._pages(*lists, page_size)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        return self._over_pages(q, paged_kv_cache, out)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int,
        logits_soft_cap: float,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        lists = indptr, indices, last_page_len
        starts = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._plan(starts, sm_scale, window_left, logits_soft_cap, *lists)
        self._pages(*lists, page_size)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        return self._over_pages(q, paged_kv_cache, out)


class BatchMLAPagedAttentionWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
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
    """What stands in sys.modules; `modules()["flashinfer"].made` lists the wrappers as they are made."""
    library, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    made: list[_Wrapper] = []
    for each in (BatchPrefillWithRaggedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        setattr(library, each.__name__, type(each.__name__, (each,), {"made": made}))
    mla.BatchMLAPagedAttentionWrapper = type("BatchMLAPagedAttentionWrapper", (BatchMLAPagedAttentionWrapper,), {"made": made})  # type: ignore[attr-defined]
    library.made = made  # type: ignore[attr-defined]
    return {"flashinfer": library, "flashinfer.mla": mla}
