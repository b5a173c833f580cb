"""Check of the greedy tokens of a small random model in the engine, with chunked prefill, prefix hits, preemption and decode
graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headway.core.contract.layer import BLOCK_MULTIPLE
from headway.core.contract.layout import CacheGeometry
from headway.core.contract.model import Attention, AttentionFunctions
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineParts, make_engine
from headway.core.oracle.cells import CheckCell, Finding, Skipped
from headway.core.oracle.oracle import attend
from headway.core.sampling.params import SamplingParams
from headway.testing.kit.attention import AttentionStage
from headway.testing.kit.subject import BASELINE

HIDDEN = 64
LAYERS = 2


class TinyDecoder:
    """Model with two attention layers over random embeddings. Every token depends on all earlier tokens, so greedy tokens
    reveal errors."""

    vocab_size = 97
    max_position_embeddings = 512

    def __init__(self, spec: AttentionSpec) -> None:
        generator = torch.Generator().manual_seed(0)
        self.spec = spec
        self.attention_specs = [spec] * LAYERS
        self._sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim]

        def weights(*shape: int, scale: float) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

        self._weights = {
            "embed": weights(self.vocab_size, HIDDEN, scale=1.0),
            "places": weights(self.max_position_embeddings, HIDDEN, scale=0.5),
            "head": weights(self.vocab_size, HIDDEN, scale=HIDDEN**-0.5),
        }
        for layer in range(LAYERS):
            self._weights[f"qkv{layer}"] = weights(HIDDEN, sum(self._sizes), scale=HIDDEN**-0.5)
            self._weights[f"out{layer}"] = weights(spec.num_heads * spec.v_head_dim, HIDDEN, scale=4 * self._sizes[0] ** -0.5)
        self._cast = {name: tensor.to(spec.device, spec.dtype) for name, tensor in self._weights.items()}

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return hidden states [num_tokens, HIDDEN]. input_ids, positions: int64 [num_tokens]."""
        return self._forward(self._cast, input_ids, positions, attention)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [rows, vocab_size]. hidden: [rows, HIDDEN]."""
        return torch.matmul(hidden, self._cast["head"].T, out=out)

    def reference_logits(self, token_ids: list[int], cached: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Return float64 logits [num_tokens, vocab_size] of one complete sequence, computed with the kit's reference attention.

        cached: function that takes keys and values and returns them as the cache stores them.
        """

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cached(k, v)
            return attend(self.spec, q, keys, values, 0)[0]

        ids = torch.tensor(token_ids)
        return self._forward(self._weights, ids, torch.arange(len(ids)), AttentionFunctions(attention)) @ self._weights["head"].T

    def _forward(self, weights: dict[str, Tensor], ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        spec = self.spec
        x = weights["embed"][ids] + weights["places"][positions]
        for layer in range(LAYERS):
            q, k, v = torch.split(x @ weights[f"qkv{layer}"], self._sizes, dim=-1)
            q, k, v = (torch.unflatten(part, -1, (heads, -1)) for part, heads in zip((q, k, v), _heads(spec), strict=True))
            v = k[..., : spec.v_head_dim] if spec.value_in_key else v
            x = x + attention(layer, q, k, v).flatten(1) @ weights[f"out{layer}"]
            x = x / x.pow(2).mean(-1, keepdim=True).sqrt()
        return x


def _heads(spec: AttentionSpec) -> tuple[int, int, int]:
    return spec.num_heads, spec.num_kv_heads, spec.num_kv_heads


NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Maximum difference between the best logit and the logit of a chosen token, for each dtype. The best logit is about 1."""
TOKENS = 12


def engine(stage: AttentionStage, cell: CheckCell) -> str:
    """Check that each token has the best logit, or nearly the best logit. In float32, also check that all tokens equal the
    baseline's tokens."""
    spec = stage.claimed.spec(cell)
    if cell.block_size % BLOCK_MULTIPLE:
        raise Skipped(f"block_size: an engine needs a multiple of {BLOCK_MULTIPLE}, got {cell.block_size}")
    model = TinyDecoder(spec)
    prefill, decode = stage.parts(cell)  # the prompts include some without a context
    ahead = 0 if spec.rule is None else spec.rule.ahead
    prompts = [prompt for prompt in _prompts(cell.block_size) if len(prompt) >= ahead]
    if not prompts:
        raise Skipped(f"ahead: needs at most 70 tokens, the longest prompt of this check, got {ahead}")
    found, stats = _generate(stage, cell, model, f"prefill={prefill},decode={decode}", prompts)
    for number, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        logits = model.reference_logits(prompt + tokens, partial(_cached, stage, cell))[len(prompt) - 1 : -1]
        below_best = logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        stage.errors.note(float(below_best.max()), NEAR[spec.dtype])
        if float(below_best.max()) > NEAR[spec.dtype]:
            at = int((below_best > NEAR[spec.dtype]).nonzero()[0])
            raise Finding(
                f"prompt {number} ({len(prompt)} tokens), output token {at}: expected {int(logits[at].argmax())}, "
                f"got {tokens[at]}, whose logit is {float(below_best[at]):.3g} below the best",
                guess="wrong in the engine: with chunks, prefix hits or preemption",
            )
    if spec.dtype == torch.float32 and BASELINE not in (prefill, decode):
        others, _ = _generate(stage, cell, model, BASELINE, prompts)
        if others != found:
            number = next(n for n, pair in enumerate(zip(found, others, strict=True)) if pair[0] != pair[1])
            raise Finding(f"greedy tokens of prompt {number} are those of {BASELINE} {others[number]}, got {found[number]}")
    return stats


def _cached(stage: AttentionStage, cell: CheckCell, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 keys and values of one sequence as the subject's cache stores them. They are unchanged if the cache has the
    layer's dtype."""
    spec, size = stage.claimed.spec(cell), cell.block_size
    if spec.kv_dtype is None:
        return k, v
    cache = stage.subject.layouts[cell.layout].allocate(
        CacheGeometry.of(spec, -(-len(k) // size), size), spec.k_scale, spec.v_scale
    )
    slots = torch.arange(len(k), device=spec.device)
    stage.subject.writer(cell.layout)(k.to(spec.dtype), v.to(spec.dtype), cache, slots)
    keys, values = cache.gather(slots)
    return keys.double() * spec.k_scale, values.double() * spec.v_scale


def _prompts(block_size: int) -> list[list[int]]:
    """Return prompts of various lengths, some with common prefixes."""
    generator = torch.Generator().manual_seed(7)

    def ids(count: int) -> list[int]:
        return torch.randint(TinyDecoder.vocab_size, (count,), generator=generator).tolist()

    shared = ids(min(2 * block_size, 150))
    return [ids(1), shared + ids(3), ids(17), shared + ids(1), ids(40), shared[: block_size + 1], ids(70), shared + ids(9)]


def _generate(
    stage: AttentionStage, cell: CheckCell, model: TinyDecoder, backend: str, prompts: list[list[int]]
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
        max_num_batched_tokens=max(24, 0 if spec.rule is None else spec.rule.ahead),
        max_num_seqs=6,
        kv_cache_memory=memory,
        cudagraph_capture_sizes=(1, 4, 6),
    )
    made = make_engine(EngineParts(model=model, source=stage.subject.registry, config=config))
    wanted = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    tokens: list[list[int]] = [[] for _ in prompts]
    hits = [0] * len(prompts)
    for number, prompt in enumerate(prompts):
        made.add_request(str(number), made.limits.checked(prompt, wanted))
    while made.has_unfinished:
        for delta in made.step():
            if delta.error:
                raise Finding(f"the engine ended a request: {delta.error}")
            tokens[int(delta.request_id)] += delta.new_token_ids
            hits[int(delta.request_id)] = delta.num_cached_tokens
    return tokens, f"{sum(hits)} tokens from prefix hits, {made.stats.num_preemptions} preemptions"
