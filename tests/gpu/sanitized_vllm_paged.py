"""A small case of every CUDA kernel, to be run under compute-sanitizer by test_vllm_paged.py."""

from __future__ import annotations

import torch

from headway.backends.vllm_paged import backend as writer
from headway.backends.vllm_paged.backend import VllmPagedAttention
from headway.core.contract.layout import VLLM_5D, CacheGeometry
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec


def main() -> None:
    device = torch.device("cuda", 0)
    for dtype, kv_dtype, partitions in (
        (torch.bfloat16, torch.bfloat16, "1"),
        (torch.bfloat16, torch.bfloat16, "3"),
        (torch.bfloat16, torch.float8_e4m3fn, "2"),
        (torch.float32, torch.float32, "2"),
    ):
        layer = AttentionSpec(8, 2, 64, 0.125, dtype, device, kv_dtype=None if kv_dtype == dtype else kv_dtype)
        contexts = [0, 16, 69, 199, -1]
        tables = [[0], [1, 2], [3, 4, 5, 6, 7], list(range(8, 21)), []]
        step = AttentionMetadata.build([1] * 5, contexts, tables, 16, device, decode_query_len=1)
        cache = VLLM_5D.allocate(CacheGeometry(24, 16, 2, 64, kv_dtype, device))
        k, v = (torch.ones(24 * 16, 2, 64, device=device).to(dtype) for _ in range(2))
        writer.write_rows(k, v, cache, torch.arange(24 * 16, device=device))
        writer.write_rows(k[:5], v[:5], cache, step.slot_mapping)
        writer.copy_blocks(cache.key, cache.value, torch.tensor([[0, 22], [1, 23]], device=device))
        backend = VllmPagedAttention(layer, VLLM_5D, 16, {"num_partitions": partitions, "num_warps": "2"})
        q = torch.ones(5, 8, 64, device=device).to(dtype)
        out = torch.zeros_like(q)
        view = step.decode
        assert view is not None
        backend.decode(q[-view.num_decode_tokens :], cache, backend.plan(view), out[-view.num_decode_tokens :])
        torch.cuda.synchronize()
        rows = out[-view.num_decode_tokens : -1].float()
        assert torch.allclose(rows, torch.ones_like(rows), atol=1e-2), rows


if __name__ == "__main__":
    main()
