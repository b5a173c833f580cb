"""Correctness, then times, of speculation on a GPU: Qwen3-0.6B shapes, random weights, a proposer that is right for 70 % of tokens.

Tokens with and without may part at near ties of bfloat16, so the share of equal prefixes is printed beside float32's exact check.
"""
import json, os, random, statistics, sys, time
from headway import hookimpl
from headway.core.sampling.params import SamplingParams
from headway.core.speculation.proposer import ProposerInfo
from headway.llm import LLM

KNOWN = {}  # prompt -> tokens without speculation
class Right:
    def __init__(self, n): self.n, self.rng = n, random.Random(n)
    def propose(self, ids, most):
        text = KNOWN.get(tuple(ids[: self.n]), [])
        at = len(ids) - self.n
        return [t if self.rng.random() < 0.7 else (t + 1) % 1000 for t in text[at : at + most]]
    def finish(self, ids): pass
class Proposer:
    def begin(self, n): return Right(n)
class Plugin:
    @hookimpl
    def headway_register_proposers(self): return [ProposerInfo("right70", "70 % right", lambda options: Proposer())]

def run(llm, prompts, params):
    before, t = llm.engine.stats.snapshot(), time.perf_counter()
    out = [o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]
    return out, time.perf_counter() - t, llm.engine.stats - before

def main():
    rng, rows = random.Random(0), []
    common = dict(model="qwen3-0.6b", load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, plugins=[Plugin()])
    for dtype in ("float32", "bfloat16"):
        plain, fast = LLM(**common, dtype=dtype, gpu_memory_utilization=0.35), LLM(**common, dtype=dtype, speculate="right70", gpu_memory_utilization=0.35)
        for batch in (1, 4, 16, 64):
            prompts = [[rng.randrange(1000) for _ in range(256)] for _ in range(batch)]
            params = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
            want, _, _ = run(plain, prompts, params)
            for p, w in zip(prompts, want): KNOWN[tuple(p)] = w
            got, _, _ = run(fast, prompts, params)
            same = sum(a == b for a, b in zip(want, got)) / batch
            times = {"plain": [], "fast": []}
            for _ in range(5):
                times["plain"].append(run(plain, prompts, params)[1])
                _, t, stats = run(fast, prompts, params); times["fast"].append(t)
            a, b = (statistics.median(times[k]) for k in ("plain", "fast"))
            row = dict(dtype=dtype, batch=batch, equal=same, plain_s=a, fast_s=b, gain=a / b, drafts=stats.num_draft_tokens, held=stats.num_accepted_tokens,
                       steps=stats.num_steps, graph_steps=stats.num_graph_steps, pieces=dict(stats.steps_in_pieces), without=dict(stats.steps_without_drafts))
            rows.append(row); print(row, flush=True)
        del plain, fast
    json.dump(rows, open(os.path.join(os.environ.get("OUT", "."), "spc.json"), "w"), indent=1)
main()
