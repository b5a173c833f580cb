"""A cache layout with its writer, and a backend that reads it. Tokens are the innermost axis, so one load reads many."""

import torch

from headway import hookimpl
from headway.contract import AttentionBackend, BackendInfo, CacheLayout, Capabilities, LayoutInfo, Phase

AXES = ("block", "head", "dim", "slot")
TRANSPOSED = CacheLayout("transposed", {"key": AXES, "value": AXES})


def write(k, v, cache, slot_mapping):
    """Write k, v [num_tokens, num_kv_heads, head_dim] to the slots in slot_mapping [num_tokens], skipping -1."""
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    block, offset = slots // cache.block_size, slots % cache.block_size
    for name, rows, scale in (("key", k, cache.k_scale), ("value", v, cache.v_scale)):
        rows, tensor = rows[stored], cache.tensors[name]  # [num_blocks, num_kv_heads, head_dim, block_size]
        if tensor.dtype != rows.dtype:  # an FP8 cache stores row / scale, clamped to avoid NaN
            limit = torch.finfo(tensor.dtype).max
            rows = (rows.float() / scale).clamp(-limit, limit).to(tensor.dtype)
        if tensor.itemsize == 1:  # torch cannot index FP8: move it as bytes
            rows, tensor = rows.view(torch.uint8), tensor.view(torch.uint8)
        tensor[block, :, :, offset] = rows


class Transposed(AttentionBackend):
    """Decode for this layout only. Prompts need another backend that reads the layout."""

    name = "transposed"
    capabilities = Capabilities(
        phases=frozenset({Phase.DECODE}), layouts=(TRANSPOSED,), devices=("cpu", "cuda"), exact_host_lengths=True
    )

    def plan(self, metadata):
        """Return the query tokens, blocks and length of each sequence."""
        ends, size = metadata.query_start_loc_cpu[1:].tolist(), metadata.block_size
        rows = zip(ends, metadata.query_lens, metadata.kv_lens, metadata.block_table, strict=True)
        return [(slice(end - n, end), blocks[: -(-kv_len // size)].long(), kv_len) for end, n, kv_len, blocks in rows if kv_len]

    def decode(self, q, cache, plan, out):
        spec = self.spec
        for tokens, blocks, kv_len in plan:
            # [n, heads, dim, slot] -> [heads, dim, tokens], without slots after the sequence's end
            k, v = (tensor[blocks].permute(1, 2, 0, 3).flatten(2)[..., :kv_len] for tensor in (cache.key, cache.value))
            query = q[tokens].unflatten(1, (spec.num_kv_heads, spec.group_size))  # [new, kv heads, group, dim]
            scores = torch.einsum("nhgd,hdt->nhgt", query.float(), k.float()) * spec.scale
            new = query.shape[0]  # more than one with draft tokens: query i has position kv_len - new + i
            seen = torch.arange(kv_len, device=q.device) <= torch.arange(kv_len - new, kv_len, device=q.device)[:, None]
            weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
            out[tokens] = torch.einsum("nhgt,hdt->nhgd", weights, v.float()).flatten(1, 2).to(out.dtype)


@hookimpl
def headway_register_layouts():
    return [LayoutInfo(TRANSPOSED, lambda device: write)]


@hookimpl
def headway_register_backends():
    return [BackendInfo("transposed", "decode over its own cache layout", lambda: Transposed, api_version=3)]
