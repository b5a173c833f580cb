"""Greedy tokens of a tiny random model through the engine: prompts in chunks, prefix hits, preemption, captured decode."""

from __future__ import annotations

import torch

from headway.core.contract.layout import CacheGeometry
from headway.core.engine.config import EngineConfig
from headway.core.engine.engine import Engine
from headway.core.sampling.params import SamplingParams
from headway.testing.cells import Cell
from headway.testing.findings import Finding
from headway.testing.stage import Stage
from headway.testing.subject import BASELINE
from headway.testing.tiny import LAYERS, TinyDecoder

NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""How far below the best logit, of about 1 in size, a chosen token's may lie, by dtype."""
TOKENS = 12


def engine(stage: Stage, cell: Cell) -> str:
    """Every token is the best, or as good as the best, after those before it; in float32 all are those of the baseline."""
    spec = stage.claimed.spec(cell)
    model = TinyDecoder(spec)
    prefill, decode = stage.parts(cell.plain("engine", phase="mixed"))
    prompts = _prompts(cell.block_size)
    found, stats = _generate(stage, cell, model, f"prefill={prefill},decode={decode}", prompts)
    for number, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        logits = model.reference_logits(prompt + tokens)[len(prompt) - 1 : -1]
        behind = logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        if float(behind.max()) > NEAR[spec.dtype]:
            at = int((behind > NEAR[spec.dtype]).nonzero()[0])
            raise Finding(
                f"prompt {number} ({len(prompt)} tokens), output token {at}: expected {int(logits[at].argmax())}, "
                f"got {tokens[at]}, whose logit is {float(behind[at]):.3g} below the best",
                guess="wrong in the engine: with chunks, prefix hits or preemption",
            )
    if spec.dtype == torch.float32 and BASELINE not in (prefill, decode):
        others, _ = _generate(stage, cell, model, BASELINE, prompts)
        if others != found:
            number = next(n for n, pair in enumerate(zip(found, others, strict=True)) if pair[0] != pair[1])
            raise Finding(f"greedy tokens of prompt {number} are those of {BASELINE} {others[number]}, got {found[number]}")
    return stats


def _prompts(block_size: int) -> list[list[int]]:
    """Prompts of many lengths, some of which begin alike."""
    generator = torch.Generator().manual_seed(7)

    def ids(count: int) -> list[int]:
        return torch.randint(TinyDecoder.vocab_size, (count,), generator=generator).tolist()

    shared = ids(min(2 * block_size, 150))
    return [ids(1), shared + ids(3), ids(17), shared + ids(1), ids(40), shared[: block_size + 1], ids(70), shared + ids(9)]


def _generate(
    stage: Stage, cell: Cell, model: TinyDecoder, backend: str, prompts: list[list[int]]
) -> tuple[list[list[int]], str]:
    spec, longest = model.spec, max(map(len, prompts)) + TOKENS
    blocks = -(-longest // cell.block_size)
    layout = stage.subject.layouts[cell.layout]
    memory = (2 * blocks + 3) * LAYERS * layout.bytes_per_block(CacheGeometry.of(spec, 1, cell.block_size))
    config = EngineConfig(
        attn_backend=backend,
        kv_layout=cell.layout,
        block_size=cell.block_size,
        max_model_len=longest,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        kv_cache_memory=memory,
        cudagraph_capture_sizes=(1, 4, 6),
    )
    made = Engine(model, stage.subject.registry, config)
    wanted = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    tokens: list[list[int]] = [[] for _ in prompts]
    hits = [0] * len(prompts)
    for number, prompt in enumerate(prompts):
        made.add_request(str(number), prompt, wanted)
    while made.has_unfinished:
        for delta in made.step():
            if delta.error:
                raise Finding(f"the engine ended a request: {delta.error}")
            tokens[int(delta.request_id)] += delta.new_token_ids
            hits[int(delta.request_id)] = delta.num_cached_tokens
    return tokens, f"{sum(hits)} tokens from prefix hits, {made.stats.num_preemptions} preemptions"
