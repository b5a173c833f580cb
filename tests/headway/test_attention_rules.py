"""Attention rules through `LLM`, held to each author's own dense formula in float64; and rules that are refused."""

from __future__ import annotations

import asyncio
import linecache
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headway import LLM, AsyncLLM, EngineArgs, SamplingParams
from headway.contract import AttentionRule, AttentionSpec, ConfigError, HeadwayError, PerHead, PromptError, check_rule
from headway.core.contract.rule import rule_of
from headway.registry import create_registry, hookimpl
from headway.testing.kit.kit import kernels_for, make_kit, run_cell
from headway.tuning.table.schema import SpecRecord
from plain_models import ROWS
from rules import DocumentTable, every_rule
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


def best_of_group(queries: Tensor, means: list[Tensor]) -> list[list[int]]:
    """The choice of TopBlocks for the two query heads of a kv head."""
    scores = [float((queries[0] + queries[1]) @ mean) for mean in means]
    return [sorted(range(len(means)), key=lambda block: -scores[block])[:2]] * 2


def selected(queries: Tensor, means: list[Tensor]) -> list[list[int]]:
    """The choice of NSA's selection branch, with a compressed key for each complete block before the query's."""
    importance = [0.0] * len(means)
    for query in queries:
        weights = [math.exp(float(query @ mean) / math.sqrt(len(query))) for mean in means]
        importance = [before + weight / sum(weights) for before, weight in zip(importance, weights, strict=True)]
    always = {0, len(means) - 1} if means else set()
    others = sorted(set(range(len(means))) - always, key=lambda block: -importance[block])
    return [[*always, *others[: 4 - len(always)]]] * 2


def routed(queries: Tensor, means: list[Tensor]) -> list[list[int]]:
    """The gate of MoBA: each query head chooses three blocks by their mean keys, and its own block has an infinite score."""
    chosen = []
    for query in queries:
        scores = [*(float(query @ mean) for mean in means), math.inf]
        chosen.append(sorted(range(len(scores)), key=lambda block: -scores[block])[:3])
    return chosen


SPARSE = {"TopBlocks": (16, best_of_group), "NSABlocks": (8, selected), "MoBA": (8, routed)}


def blocks_seen(name: str, q: Tensor, k: Tensor) -> Tensor:
    """The mask of a rule with blocks, query by query: q [4, n, dim], k [2, n, dim]."""
    seen = torch.zeros(4, q.shape[1], q.shape[1], dtype=torch.bool)
    size, choose = SPARSE[name]
    for kv_head in range(2):
        means = [each.mean(0) for each in k[kv_head].split(size)]
        for row in range(q.shape[1]):
            own = row // size
            for head, chosen in enumerate(choose(q[2 * kv_head : 2 * kv_head + 2, row], means[:own]), 2 * kv_head):
                for block in (*chosen, own):
                    seen[head, row, size * block : size * block + size] = True
    return seen


def dense(name: str) -> Callable[..., tuple[Tensor, None]]:
    """transformers' attention function with a rule's formula."""

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        n = q.shape[2]
        rows, keys, heads = torch.arange(n)[:, None], torch.arange(n), torch.arange(4)[:, None, None]
        scores = q[0] @ k[0].repeat_interleave(2, 0).transpose(1, 2) * scaling
        mask = gate = None
        if name in SPARSE:
            mask = blocks_seen(name, q[0], k[0])
        elif name:
            changed, mask, gate = FORMULAS[name](scores, rows, keys, heads)
            scores = scores if changed is None else changed
        seen = torch.ones(4, n, n, dtype=torch.bool) if mask is None else mask.expand(4, n, n)
        if name != "PrefixLM":
            seen = seen & (keys <= rows)
        if getattr(module, "sliding_window", None) is not None:
            seen = seen & (rows - keys < module.sliding_window)
        weights = torch.exp(scores - scores.amax()) * seen
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        weights = weights if gate is None else weights * gate
        return (weights @ v[0].repeat_interleave(2, 0)).transpose(0, 1)[None], None

    return attend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
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
    return folder, made.double()


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_its_formula_in_graphs_on_a_gpu(name: str, model: tuple[str, Any]) -> None:
    folder, reference = model
    options: dict[str, Any] = {"max_num_batched_tokens": 24, "block_size": 16, "speculate": "ngram", "device": "cuda"}
    llm = engine(folder, RULES[name], attn_backend="sdpa" if name in (*SPARSE, "PrefixLM") else "triton", **options)
    assert [output.num_cached_tokens >= 20 for output in held(llm, reference, name)] == [False, True, True, True]


QUICK = ("Documents", "HeadWindows", "PrefixLM", "MoBA")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in RULES])
def test_a_rule_equals_its_formula_in_one_prompt_and_deterministically(name: str, model: tuple[str, Any]) -> None:
    folder, reference = model
    options: dict[str, Any] = {} if name in SPARSE else {"deterministic": True, "deterministic_level": "full"}
    held(engine(folder, RULES[name], max_num_batched_tokens=64, **options), reference, name)


def test_layers_with_and_without_windows_have_their_own_rules(tmp_path: Path) -> None:
    torch.manual_seed(1)
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 24}
    made = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, **HEADS, **kinds)).eval()
    for parameter in made.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, 0, 0.3)
    made.save_pretrained(tmp_path)
    full, window = dense("LogDecay"), dense("HeadWindows")

    def attend(module: Any, *given: Any, **options: Any) -> tuple[Tensor, None]:
        return (full if module.sliding_window is None else window)(module, *given, **options)

    ALL_ATTENTION_FUNCTIONS.register("rule-both", attend)
    rules = {"all": RULES["LogDecay"], "window": replace(RULES["HeadWindows"], sizes=(1, 7, 30, 100))}
    options = {"max_num_batched_tokens": 16, "block_size": 8, "speculate": "ngram", "kv_cache_memory": "2MiB"}
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, attention_rules=rules, **options)
    assert [spec.sliding_window for spec in llm.engine.executor.attention.specs] == [24, None]
    outputs = held(llm, made.double(), "both")
    assert sum(output.num_cached_tokens for output in outputs) > 0


def test_another_formula_differs(model: tuple[str, Any]) -> None:
    folder, reference = model
    with pytest.raises(AssertionError):
        held(engine(folder, RULES["Dilated"]), reference, "StreamingSinks")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LearnedBias", "HeadWindows", *SPARSE])
def test_two_ranks_apply_a_rule_to_their_own_heads(name: str, model: tuple[str, Any]) -> None:
    folder, reference = model
    held(engine(folder, RULES[name], tensor_parallel_size=2, num_threads=2), reference, name)


def test_ranks_of_differential_attention_refuse_a_rule(tmp_path: Path) -> None:
    ROWS["diffllama"].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size: needs 1 for attention rules with differential attention.*got 2"):
        engine(str(tmp_path), RULES["TanhCap"], tensor_parallel_size=2, load_format="dummy")


def test_layers_choose_rules(model: tuple[str, Any]) -> None:
    folder, _ = model
    llm = LLM(folder, skip_tokenizer_init=True, attention_rules={"all": RULES["TanhCap"], "layers.1": RULES["Dilated"]})
    assert [spec.rule.name for spec in llm.engine.executor.attention.specs] == ["TanhCap", "Dilated"]
    llm = LLM(folder, skip_tokenizer_init=True, attention_rules={"layers.0-0": "tests/support/rules.py:KeyDecay"})
    assert [spec.rule and spec.rule.name for spec in llm.engine.executor.attention.specs] == ["KeyDecay", None]


class Slow(AttentionRule):
    """A rule of a plugin."""

    rate: PerHead = (0.1, 0.1, 0.1, 0.1)

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score - params.rate * (q_pos - k_pos)


class Plugin:
    @hookimpl
    def headway_register_attention_rules(self) -> list[AttentionRule]:
        return [Slow()]


def test_config_json_names_a_plugins_rule_and_no_file(model: tuple[str, Any]) -> None:
    folder, _ = model

    def started(stated: object, **options: Any) -> LLM:
        return LLM(folder, skip_tokenizer_init=True, hf_overrides={"headway_attention_rules": stated}, **options)

    llm = started({"all": {"rule": "Slow", "rate": [1, 2, 3, 4]}}, plugins=[Plugin()])
    assert llm.engine.executor.attention.specs[0].rule == Slow((1, 2, 3, 4))
    with pytest.raises(ConfigError, match=r"if you trust its code: --attention-rule rule.py:Far"):
        started({"all": "rule.py:Far"})
    with pytest.raises(ConfigError, match=r"an AttentionRule, its class, FILE.py:CLASS, or a plugin's rule \(Slow\), got 'Other"):
        started({"all": "Other"}, plugins=[Plugin()])
    with pytest.raises(ConfigError, match="attention rule Slow: needs parameters out of rate, got rat"):
        started({"all": {"rule": "Slow", "rat": 1}}, plugins=[Plugin()])


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: Slow(rat=1), r"rule Slow: needs parameters out of rate, got rat \(declare rat as a field, or remove it\)"),
        (lambda: replace(Slow(), rat=1), r"rule Slow: needs parameters out of rate, got rat \(declare"),
        (lambda: Slow(1, 2), r"rule Slow: needs parameters out of rate, got too many positional arguments \(give the fields"),
        (lambda: DocumentTable(), r"rule DocumentTable: needs parameters out of ids, got missing .*'ids' \(give the fields"),
        (lambda: rule_of(DocumentTable, {}), r"rule DocumentTable: needs parameters out of ids, got missing .*'ids'"),
        (
            lambda: rule_of(DocumentTable, {"ids": [[1], [2, 3]]}),
            "rule DocumentTable, ids: needs a tensor, or nested lists",
        ),
        (lambda: Slow(0.5), "rule Slow, rate: needs one number for each query head, got 0.5"),
        (lambda: Slow("ab"), "rule Slow, rate: needs one number for each query head, got 'ab'"),
    ],
)
def test_wrong_parameters_in_python_are_refused_in_one_line(made: Callable[[], AttentionRule], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as raised:
        made()
    assert "\n" not in str(raised.value)


def test_messages_about_a_rules_file_call_it_a_rule(tmp_path: Path) -> None:
    own, bad = tmp_path / "own_rules.py", tmp_path / "bad_rule.py"
    own.write_text(Path("tests/support/rules.py").read_text())
    bad.write_text("raise RuntimeError('boom')\n")
    registry = create_registry(load_entry_points=False)
    for text, expected in (
        (f"{bad}:Bad", f"^attention rule {bad}: RuntimeError: boom .line 1"),
        (f"{own}:Nobody", f"^attention rule: needs {own}:RULE, with a rule out of .*TanhCap, .*, got {own}:Nobody"),
        ("nowhere.py:Far", "^attention rule: needs FILE.py or FILE.py:CLASS, got nowhere.py .there"),
    ):
        with pytest.raises(HeadwayError, match=expected):
            registry.attention_rule(text)
    for plugin in (own, f"{own}:TanhCap"):
        with pytest.raises(HeadwayError, match=f"attention rules are passed with --attention-rule, .*{own}:TanhCap"):
            create_registry([plugin], load_entry_points=False)


class FarNaN(AttentionRule):
    """A rule whose faulty pair of positions is not among those that a start checks."""

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score + torch.log((q_pos - 21).abs() + (k_pos - 5).abs() - 0.5)


def test_debug_mode_names_the_rule_that_may_have_made_a_nan(model: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_DEBUG", "1")
    (output,) = engine(model[0], FarNaN()).generate([{"prompt_token_ids": START[:22]}], GREEDY)
    assert "the first came from sdpa or attention rule FarNaN, in attention layer 0" in str(output.outputs[0])


def test_a_list_of_numbers_for_each_head_becomes_a_tuple() -> None:
    assert Slow([1, 2, 3, 4]) == Slow((1.0, 2.0, 3.0, 4.0))


def bad(part: str, function: Callable[..., Any], **attributes: Any) -> AttentionRule:
    """A rule with one function."""
    return type("Bad", (AttentionRule,), {part: lambda self, *given: function(*given), **attributes})()  # type: ignore[no-any-return]


CALLS = iter(range(1 << 20))
BAD: dict[str, tuple[AttentionRule, str]] = {
    "shape": (bad("mask", lambda q, k, h, p: torch.ones(7) > 0), r"mask: needs a shape that broadcasts .*, got \[7\]"),
    "dtype": (bad("score", lambda s, q, k, h, p: s.double()), "score: needs a tensor of torch.float32, got torch.float64"),
    "no tensor": (bad("mask", lambda q, k, h, p: True), "mask: needs a tensor of torch.bool, got a bool"),
    "nan": (
        bad("score", lambda s, q, k, h, p: s * ((q - 16) / (q - 16))),
        "needs a number.*, got nan at q_pos=16, k_pos=",
    ),
    "other keys": (
        bad("score", lambda s, q, k, h, p: s - s.amax(-1, True)),
        "for a query by itself.* got .* at q_pos=.*, k_pos=",
    ),
    "other heads": (bad("score", lambda s, q, k, h, p: s - s.mean(0, True)), "for a query by itself.* got .* at q_pos=.*, head="),
    "later keys": (bad("gate", lambda q, k, h, p: k / k.max().clamp(min=1)), "gate: needs the same for a query by itself"),
    "random": (bad("mask", lambda q, k, h, p: torch.rand(len(q), k.shape[-1]) < 0.5), "mask: needs the same in two calls, got "),
    "state": (
        bad("score", lambda s, q, k, h, p: s + next(CALLS)),
        "needs the same in two calls, got .* at q_pos=0, k_pos=0",
    ),
    "table": (bad("score", lambda s, q, k, h, p: s + torch.ones(50)[q - k]), "IndexError at q_pos=63, k_pos=0, .*max_len states"),
    "arguments": (bad("score", lambda s, q, k, h, p: s.mul_(2)), "score: needs arguments left as they are, got changed"),
    "no parameter": (
        bad("score", lambda s, q, k, h, p: s * p.rate),
        "AttributeError at q_pos=0, k_pos=0, head=0: params has nothing, not rate",
    ),
    "infinite score": (
        bad("score", lambda s, q, k, h, p: torch.where(k == 5, torch.inf, s)),
        "needs a number.*, got inf at q_pos=.*, k_pos=5, head=0",
    ),
    "infinite gate": (
        bad("gate", lambda q, k, h, p: 1.0 / (k - 77)),
        "gate: needs a number, got -?inf at q_pos=127, k_pos=77, head=0",
    ),
    "nan at one position": (bad("score", lambda s, q, k, h, p: torch.where(q == 77, torch.nan, s)), "nan at q_pos=77, k_pos=77"),
    "no function": (bad("scores", lambda s, q, k, h, p: s), "needs a function out of score, mask, gate, blocks, got scores"),
    "later keys without ahead": (bad("mask", lambda q, k, h, p: k < 20, causal=False), "or neither, got ahead=0, causal=False"),
    "ahead": (bad("mask", lambda q, k, h, p: k >= 0, ahead=9), "needs ahead of 1 to 128 with causal = False, .*, got ahead=9"),
    "blocks": (bad("blocks", lambda q, b, t, p: torch.ones(8, 3, 5) > 0), r"blocks: needs torch.bool \[8, 4, 5\]"),
    "other queries": (
        bad("blocks", lambda q, b, t, p: (q > q.mean(0))[:, :, :1].expand(-1, -1, len(b))),
        "blocks: needs the same for a query by itself, got .* at q_pos=.*, block=0, head=",
    ),
    "few blocks": (
        bad("blocks", lambda q, b, t, p: q.new_ones(len(q), 1, len(b)).topk(2).values.mean(2, True).expand(-1, -1, len(b)) > 0),
        "blocks: needs no exception, got RuntimeError at q_pos=.*, with 1 blocks: ",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_rule_is_refused_in_one_line(fault: str) -> None:
    rule, expected = BAD[fault]
    with pytest.raises(ConfigError, match=expected) as raised:
        check_rule(rule, 4, 2, 16, 128)
    assert "\n" not in str(raised.value)


def test_a_rule_keeps_its_own_copy_of_a_table() -> None:
    table = torch.zeros(2, 64)
    rule = replace(RULES["LearnedBias"], table=table)
    digest = rule.digest
    table[0, 1] = 9
    assert not rule.table.any()
    assert replace(rule).digest == digest


def test_a_list_as_default_and_layers_that_do_not_exist_are_refused(model: tuple[str, Any]) -> None:
    for kind, default in ((PerHead, [1.0]), (dict, {})):
        with pytest.raises(
            ConfigError, match="rule Bad: needs parameters whose defaults are .*, got mutable default .* field rate"
        ):
            type("Bad", (AttentionRule,), {"__annotations__": {"rate": kind}, "rate": default})
    with pytest.raises(ConfigError, match="rule Bad: needs .*, after those without one, got non-default argument 'window'"):
        type("Bad", (AttentionRule,), {"__annotations__": {"rate": float, "window": int}, "rate": 1.0})
    for key in ("layers.1-2", "layers.2"):
        with pytest.raises(ConfigError, match="layers.N or layers.N-M of 2 attention layers"):
            LLM(model[0], skip_tokenizer_init=True, attention_rules={key: RULES["TanhCap"]})
    with pytest.raises(ConfigError, match="attention_rules: needs a mapping such as"):
        LLM(model[0], skip_tokenizer_init=True, attention_rules={0: RULES["TanhCap"]})  # type: ignore[dict-item]


def test_a_start_refuses_a_bad_rule_a_short_table_and_a_rule_without_source(model: tuple[str, Any]) -> None:
    with pytest.raises(ConfigError, match="LearnedBias, score: needs no exception, got IndexError at q_pos=0, k_pos=0"):
        engine(model[0], replace(RULES["LearnedBias"], table=torch.ones(2, 40)))
    with pytest.raises(ConfigError, match="max_model_len: needs at most 64, the max_len of .* DocumentTable, got 128"):
        engine(model[0], DocumentTable(torch.arange(64)))
    with pytest.raises(ConfigError, match=r"Bad: needs a class in a file, .*, got Bad without source \(write it to FILE.py"):
        engine(model[0], bad("mask", lambda q, k, h, p: k <= q))


def test_a_number_for_each_head_is_needed() -> None:
    with pytest.raises(ConfigError, match="CappedAlibi, slopes: needs one number for each of 8 heads, got 4 of them"):
        check_rule(RULES["CappedAlibi"], 8, 2, 16, 128)


def test_a_prompt_shorter_than_ahead_and_a_budget_below_it_are_refused(model: tuple[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens: needs at least 20, for the first tokens that see each other"):
        engine(model[0], RULES["PrefixLM"], max_num_batched_tokens=16)
    with pytest.raises(PromptError, match="needs at least 20 tokens, because an attention rule .*, got 19 tokens"):
        engine(model[0], RULES["PrefixLM"]).generate([{"prompt_token_ids": START[:19]}], GREEDY)


def test_equal_rules_are_equal_and_reach_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "own_rule.py"
    text = Path("tests/support/rules.py").read_text()
    registry = create_registry(load_entry_points=False)

    def loaded(changed: str) -> AttentionRule:
        file.write_text(changed)
        linecache.checkcache()
        return registry.attention_rule(f"{file}:Dilated")

    first = loaded(text)
    assert first == loaded(text.replace("TanhCap", "Cap"))
    others = [("SHARE = 3", "SHARE = 5"), ("return q_pos - k_pos\n", "return k_pos - q_pos\n"), (" < 4)", " < 5)")]
    assert len({first, *(loaded(text.replace(old, new)) for old, new in others)}) == 4
    again = loaded(text)
    code = "import pickle, sys; rule = pickle.load(sys.stdin.buffer); print(rule, rule.slopes, rule.parts)"
    sent = pickle.dumps(RULES["CappedAlibi"].for_heads(2, 2))
    shown = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True).stdout.decode()
    assert shown.strip() == f"{RULES['CappedAlibi'].for_heads(2, 2)} (0.1, 0.0) frozenset({{'score'}})"
    assert pickle.loads(pickle.dumps(again)) == again
    with pytest.raises(ConfigError, match="needs a class at the top level of a file"):
        pickle.dumps(bad("mask", lambda q, k, h, p: k >= 0))


@pytest.mark.slow
def test_transformers_code_and_a_process_of_its_own_apply_a_rule(model: tuple[str, Any]) -> None:
    folder, reference = model
    held(engine(folder, RULES["LearnedBias"], model_impl="transformers"), reference, "LearnedBias")
    options = {"attention_rules": {"all": RULES["KeyDecay"]}, "kv_cache_memory": "2MiB", "device": "cpu"}
    wanted = engine(folder, RULES["KeyDecay"]).generate([{"prompt_token_ids": START}], GREEDY, use_tqdm=False)[0]

    async def written() -> list[int]:
        llm = AsyncLLM.from_engine_args(EngineArgs(folder, skip_tokenizer_init=True, **options), own_process=True)
        try:
            return [list(each.outputs[0].token_ids) async for each in llm.generate({"prompt_token_ids": START}, GREEDY, "1")][-1]
        finally:
            llm.shutdown()

    assert asyncio.run(written()) == list(wanted.outputs[0].token_ids)


IGNORING = """
from dataclasses import replace
from headway.backends.sdpa import SDPA

class Ignoring(SDPA):
    name = "ignoring"

    def __init__(self, spec, *given):
        super().__init__(replace(spec, rule=None), *given)
"""


@pytest.mark.parametrize("name", ["Dilated", "TopBlocks", "OddKeys"])
def test_the_kit_holds_a_backend_to_a_rule(name: str, tmp_path: Path) -> None:
    file = tmp_path / "ignoring.py"
    file.write_text(IGNORING)
    found = {}
    for target in ("sdpa", str(file)):
        kit = make_kit(target, "cpu", rule=f"tests/support/rules.py:{name}")
        cells = [each for each in kit.cells(quick=True) if each.check in ("serves", "answer") and each.layer == "0"]
        found[target] = [run_cell(kit, str(each), guesses=False).status for each in cells[:4]]
    assert found["sdpa"] == ["passed"] * 4
    assert "failed" in found[str(file)][1:]


def test_the_kit_finds_the_backends_that_claim_a_rule_and_others_refuse_it(headway: Any) -> None:
    assert kernels_for("tests/support/rules.py:TanhCap", "", "cpu") == ["sdpa", "flex", "sdpa.math"]
    shown = headway("backends", "explain", "--attention-rule", "tests/support/rules.py:TanhCap", "--geometry", "8/2/64", "--json")
    assert f"rule=TanhCap@{RULES['TanhCap'].digest} (sdpa computes every attention rule)" in shown.out


def test_times_of_another_rule_do_not_apply() -> None:
    plain = AttentionSpec(4, 2, 16, 0.25)
    records = [SpecRecord.of(plain), *(SpecRecord.of(replace(plain, rule=RULES[name])) for name in ("TanhCap", "Dilated"))]
    assert len({each.key for each in records}) == 3
    assert f"rule {RULES['TanhCap']}" in str(records[1])
    with pytest.raises(ConfigError, match="table: needs a layer without an attention rule, got TanhCap@"):
        records[1].to_spec(torch.device("cpu"))


def test_parameters_are_per_head_however_the_type_is_written() -> None:
    types = (PerHead, "PerHead", "contract.PerHead", "tuple[float, ...]")
    rules = [type("Rule", (AttentionRule,), {"__annotations__": {"rate": each}})((1.0, 2.0)) for each in types]
    assert [rule.num_heads for rule in rules] == [2] * 4
    assert [rule.params(torch.tensor([1, 0])).rate.tolist() for rule in rules] == [[2.0, 1.0]] * 4


def test_a_required_passport_refuses_the_file_of_a_rule(model: tuple[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="require_passport: needs the name of a plugin's rule, got 'tests/support/rules.py:TanhCap'"
    ):
        engine(model[0], "tests/support/rules.py:TanhCap", require_passport=True)
