"""The smallest attention backend, in an engine: `python examples/smallest.py`."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from headway import LLM, SamplingParams
from headway.contract import ALL_PHASES, AttentionBackend, Capabilities


class MyBackend(AttentionBackend):
    name = "mine"
    capabilities = Capabilities(phases=ALL_PHASES, devices=("cpu",), exact_host_lengths=True)

    def plan(self, metadata):  # once per step; its result is passed to each layer's call
        return metadata

    def decode(self, q, cache, plan, out):  # q, out: [tokens, num_heads, head_dim]; this step's k and v are in the cache
        for i, (query_len, kv_len) in enumerate(zip(plan.query_lens, plan.kv_lens, strict=True)):
            at, size = torch.arange(kv_len), plan.block_size
            k, v = (x.transpose(0, 1) for x in cache.gather(plan.block_table[i][at // size] * size + at % size))
            mine = slice(plan.query_start_loc[i], plan.query_start_loc[i + 1])
            seen = at <= torch.arange(kv_len - query_len, kv_len)[:, None]  # the causal mask
            done = scaled_dot_product_attention(q[mine].transpose(0, 1), k, v, seen, scale=self.spec.scale, enable_gqa=True)
            if kv_len:  # a padding row sees no key
                out[mine] = done.transpose(0, 1)

    def prefill(self, q, k, v, cache, plan, out):
        self.decode(q, cache, plan, out)


if __name__ == "__main__":
    llm = LLM("smollm2", backends=[MyBackend], attn_backend="mine")
    print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text)
