"""Attention rules through `LLM`, held to each author's own dense formula in float64; and rules that are refused."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headway import LLM, SamplingParams
from headway.contract import AttentionRule, PerHead, check_rule
from rules import every_rule
from tiny_transformers import HEADS, SIZES

RULES = every_rule()
Formula = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None, Tensor | None]]


def scattered(q: Tensor, k: Tensor, h: Tensor) -> Tensor:
    """The mask of RandomKeys, in Python's integers."""
    shape = torch.broadcast_shapes(q.shape, k.shape, h.shape)
    found = []
    for one, other, head in zip(*(each.expand(shape).flatten().tolist() for each in (q, k, h)), strict=True):
        mixed = (one * 2654435761 + other * 40503 + head * 97 + 7) % 2**32
        mixed = ((mixed ^ (mixed // 2**15)) * 2246822519) % 2**32
        found.append(mixed // 2**13 % 4 != 0 or one == other)
    return torch.tensor(found).view(shape)


def by_head(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None, None]


TABLE = RULES["LearnedBias"].table.double()  # type: ignore[attr-defined]
IDS = torch.arange(128) ** 2 // 700
FORMULAS: dict[str, Formula] = {  # scores [heads, n, n], positions of queries and keys, heads -> scores, mask, gate
    "Documents": lambda s, q, k, h: (None, q.div(24, rounding_mode="floor") == k.div(24, rounding_mode="floor"), None),
    "DocumentTable": lambda s, q, k, h: (None, IDS[: q.shape[0]][:, None] == IDS[: q.shape[0]], None),
    "PrefixLM": lambda s, q, k, h: (None, (k <= q) | ((k < 20) & (q < 20)), None),
    "Dilated": lambda s, q, k, h: (None, ((q - k).remainder(3) == 0) | ((q - k).abs() <= 3), None),
    "RandomKeys": lambda s, q, k, h: (None, scattered(q, k, h), None),
    "CappedAlibi": lambda s, q, k, h: (s - by_head(0.5, 0.25, 0.1, 0.0) * torch.minimum(q - k, torch.tensor(32)), None, None),
    "TanhCap": lambda s, q, k, h: (2 - 4 / (torch.exp(s) + 1), None, None),
    "LearnedBias": lambda s, q, k, h: (s + TABLE[:, (q - k).clamp(0, 39)], None, None),
    "HeadWindows": lambda s, q, k, h: (None, k > q - by_head(1, 7, 30, 100), None),
    "KeyDecay": lambda s, q, k, h: (None, None, math.e ** (-0.2 * (k - 11 * (k // 11)).double())),
    "LogDecay": lambda s, q, k, h: (s - by_head(0.3, 0.6, 0.9, 1.2) * torch.log((q - k).clamp(min=0).double() + 1), None, None),
    "StreamingSinks": lambda s, q, k, h: (None, (k <= 3) | (k > q - 16), None),
    "OddKeys": lambda s, q, k, h: (s * by_head(1, 2, 1, 2), k - k // 2 * 2 == 1, None),
    "LogLength": lambda s, q, k, h: (s * (torch.log(q.double() + 2) / math.log(2.0)) / 5, None, None),
}


def blocks_seen(q: Tensor, k: Tensor) -> Tensor:
    """The mask of TopBlocks: q [4, n, dim], k [2, n, dim]."""
    seen = torch.zeros(4, q.shape[1], q.shape[1], dtype=torch.bool)
    for head in range(4):
        for row in range(q.shape[1]):
            own = row // 16
            query = (q[head // 2 * 2, row] + q[head // 2 * 2 + 1, row]) / 2
            scores = [float(query @ k[head // 2, 16 * block : 16 * block + 16].mean(0)) for block in range(own)]
            best = sorted(range(own), key=lambda block: -scores[block])[:2]
            for block in (*best, own):
                seen[head, row, 16 * block : 16 * block + 16] = True
    return seen


def dense(name: str) -> Callable[..., tuple[Tensor, None]]:
    """transformers' attention function with a rule's formula."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
        n = q.shape[2]
        rows, keys, heads = torch.arange(n)[:, None], torch.arange(n), torch.arange(4)[:, None, None]
        scores = q[0] @ k[0].repeat_interleave(2, 0).transpose(1, 2) * scaling
        mask, gate = None, None
        if name == "TopBlocks":
            mask = blocks_seen(q[0], k[0])
        elif name:
            changed, mask, gate = FORMULAS[name](scores, rows, keys, heads)
            scores = scores if changed is None else changed
        seen = torch.ones(4, n, n, dtype=torch.bool) if mask is None else mask.expand(4, n, n)
        if name != "PrefixLM":
            seen = seen & (keys <= rows)
        weights = torch.exp(scores - scores.amax()) * seen
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        weights = weights if gate is None else weights * gate
        return (weights @ v[0].repeat_interleave(2, 0)).transpose(0, 1)[None], None

    return attend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """A folder with random weights of 32 bits, and the same model in 64."""
    folder = str(tmp_path_factory.mktemp("rules"))
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, **HEADS)).eval()
    for parameter in made.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0, 0.3)
    made.save_pretrained(folder)
    for name in RULES:
        ALL_ATTENTION_FUNCTIONS.register(f"rule-{name}", dense(name))
    ALL_ATTENTION_FUNCTIONS.register("rule-", dense(""))
    yield folder, made.double()


START = [int(each) for each in torch.randint(1, 97, (40,), generator=torch.Generator().manual_seed(5))]
PROMPTS = [START + [9, 8, 7, 6] * 4, START + [5, 4, 3] * 5, START[:33], START[:23]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


def engine(folder: str, rule: object, **options: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, attention_rules={"all": rule}, kv_cache_memory="2MiB", **options)


def held(llm: LLM, reference: Any, name: str) -> list[Any]:
    """Check every written token's log-probability against the dense model over the whole text. Return the outputs."""
    outputs = [each for prompt in PROMPTS for each in llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)]
    reference.set_attn_implementation(f"rule-{name}")
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        written = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == written
        found = torch.tensor([each[token].logprob for token, each in zip(written, output.outputs[0].logprobs, strict=True)])
        expected = logits.log_softmax(-1)[range(len(written)), written]
        torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=2e-4)
    return outputs


@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_its_formula_with_chunks_hits_and_drafts(name: str, model: tuple[str, Any]) -> None:
    folder, reference = model
    llm = engine(folder, RULES[name], max_num_batched_tokens=24, block_size=16, speculate="ngram")
    outputs = held(llm, reference, name)
    assert [output.num_cached_tokens >= 20 for output in outputs] == [False, True, True, True]
    assert llm.engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("name", [each for each in RULES if each != "TopBlocks"])
def test_a_rule_equals_its_formula_in_one_prompt_and_deterministically(name: str, model: tuple[str, Any]) -> None:
    folder, reference = model
    held(engine(folder, RULES[name], deterministic=True, deterministic_level="full", max_num_batched_tokens=64), reference, name)
