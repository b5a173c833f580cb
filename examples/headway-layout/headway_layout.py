"""A cache layout with its writer, and a backend that reads it: tokens lie innermost, so that one load fetches many of them."""

import torch

from headway import hookimpl
from headway.contract import AttentionBackend, BackendInfo, CacheLayout, Capabilities, LayoutInfo, Phase

AXES = ("block", "head", "dim", "slot")
TRANSPOSED = CacheLayout("transposed", {"key": AXES, "value": AXES})


def write(k, v, cache, slot_mapping):
    """k, v: [num_tokens, num_kv_heads, head_dim]; slot_mapping: [num_tokens], where -1 marks a token that is not stored."""
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    block, offset = slots // cache.block_size, slots % cache.block_size
    for name, rows, scale in (("key", k, cache.k_scale), ("value", v, cache.v_scale)):
        rows, tensor = rows[stored], cache.tensors[name]  # [num_blocks, num_kv_heads, head_dim, block_size]
        if tensor.dtype != rows.dtype:  # an fp8 cache holds row / scale, and nothing beyond its range, where NaN lies
            limit = torch.finfo(tensor.dtype).max
            rows = (rows.float() / scale).clamp(-limit, limit).to(tensor.dtype)
        if tensor.itemsize == 1:  # torch indexes no fp8: its bytes are moved
            rows, tensor = rows.view(torch.uint8), tensor.view(torch.uint8)
        tensor[block, :, :, offset] = rows


class Transposed(AttentionBackend):
    """Decode alone, over this layout alone: prompts go to any other backend that reads it."""

    name = "transposed"
    capabilities = Capabilities(
        phases=frozenset({Phase.DECODE}), layouts=(TRANSPOSED,), devices=("cpu", "cuda"), exact_host_lengths=True
    )

    def plan(self, metadata):
        """Of each sequence: its query tokens, its blocks, its length."""
        ends, size = metadata.query_start_loc_cpu[1:].tolist(), metadata.block_size
        rows = zip(ends, metadata.query_lens, metadata.kv_lens, metadata.block_table, strict=True)
        return [(slice(end - n, end), blocks[: -(-kv_len // size)].long(), kv_len) for end, n, kv_len, blocks in rows if kv_len]

    def decode(self, q, cache, plan, out):
        spec = self.spec
        for tokens, blocks, kv_len in plan:
            # [n, heads, dim, slot] -> [heads, dim, tokens], without what lies beyond the sequence's end
            k, v = (tensor[blocks].permute(1, 2, 0, 3).flatten(2)[..., :kv_len] for tensor in (cache.key, cache.value))
            query = q[tokens].unflatten(1, (spec.num_kv_heads, spec.group_size))  # [new, kv heads, group, dim]
            scores = torch.einsum("nhgd,hdt->nhgt", query.float(), k.float()) * spec.scale
            new = query.shape[0]  # more than one where drafts are verified: query i sits at position kv_len - new + i
            seen = torch.arange(kv_len, device=q.device) <= torch.arange(kv_len - new, kv_len, device=q.device)[:, None]
            weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
            out[tokens] = torch.einsum("nhgt,hdt->nhgd", weights, v.float()).flatten(1, 2).to(out.dtype)


@hookimpl
def headway_register_layouts():
    return [LayoutInfo(TRANSPOSED, lambda device: write)]


@hookimpl
def headway_register_backends():
    return [BackendInfo("transposed", "decode over a layout of its own", lambda: Transposed, api_version=3)]
