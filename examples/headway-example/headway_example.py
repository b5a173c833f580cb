"""A third-party attention backend: every phase, every layout, one sequence at a time."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from headway import hookimpl
from headway.contract import ALL_PHASES, AttentionBackend, BackendInfo, Capabilities


class Example(AttentionBackend):
    name = "example"
    # exact_host_lengths: plan() uses the lengths on the host.
    capabilities = Capabilities(phases=ALL_PHASES, devices=("cpu", "cuda"), exact_host_lengths=True)

    def plan(self, metadata):
        """Once per step: return the slots of each sequence's keys, and its mask."""
        plan, start, size = [], 0, metadata.block_size
        for table, query_len, kv_len in zip(metadata.block_table, metadata.query_lens, metadata.kv_lens, strict=True):
            at = torch.arange(kv_len, device=table.device)
            slots = table[at // size].long() * size + at % size
            mask = at <= torch.arange(kv_len - query_len, kv_len, device=table.device)[:, None]
            plan.append((slice(start, start + query_len), slots, mask))
            start += query_len
        return plan

    def decode(self, q, cache, plan, out):
        """Once per layer. q, out: [tokens, num_heads, head_dim]; this step's k and v are already in the cache."""
        for tokens, slots, mask in plan:
            if len(slots):  # a padding row has no keys
                k, v = (rows.transpose(0, 1)[None] for rows in cache.gather(slots))
                query = q[tokens].transpose(0, 1)[None]
                result = scaled_dot_product_attention(query, k, v, mask, scale=self.spec.scale, enable_gqa=True)
                out[tokens] = result[0].transpose(0, 1)

    def prefill(self, q, k, v, cache, plan, out):
        self.decode(q, cache, plan, out)


@hookimpl
def headway_register_backends():
    return [BackendInfo("example", "the smallest complete backend", lambda: Example, api_version=3)]
