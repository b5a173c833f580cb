"""Attention rules inlined into the Triton kernels, against float64 under the interpreter."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_rules import LENGTH, RULES, Document, expected
from backend_cases import CASES, case_of, spec
from decode_writes import new_token_case, write_and_decode
from headway.backends.triton.backend import TritonAttention
from headway.backends.triton.rule_code import NO_RULE, traced_rule
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import HND, LATENT, NHD, NHD_INT8, VLLM_5D, CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.rule import AttentionRule
from headway.core.oracle.cases import Case, reference, relative_error, run_backend
from headway.testing.kit.checks.answers import in_parts


def error_of(case: Case, **options: str) -> float:
    backend = TritonAttention(case.spec, case.cache.layout, case.cache.block_size, options)
    for phase in Phase:
        support = backend.supports(case.spec, case.cache.layout, case.cache.block_size, phase)
        assert support, str(support)
    return relative_error(run_backend(backend, case), expected(case), case)


@pytest.mark.parametrize("case_name", ["mixed", "verify", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES)])
@pytest.mark.parametrize("name", RULES)
def test_matches_float64(name: str, case_name: str) -> None:
    assert error_of(case_of(case_name, spec(rule=RULES[name]))) < 5e-6


@pytest.mark.parametrize(
    "more", [{}, {"sliding_window": 21}, {"sinks": (0.3, -1.0, 2.0, 0.0)}, "Document", "Windows", "Cap"], ids=str
)
def test_neither_chunks_nor_phases_change_bits(more: dict[str, Any] | str) -> None:
    fields: dict[str, Any] = {"rule": RULES[more]} if isinstance(more, str) else more
    case = case_of("1q120", spec(invariance=Invariance.PHASE, **fields))
    backend = TritonAttention(case.spec, NHD, 16)
    whole = in_parts(backend, case, [120], False)
    assert relative_error(whole, reference(case), case) < 5e-6
    assert torch.equal(in_parts(backend, case, [40, 30, 50], False), whole)
    assert torch.equal(in_parts(backend, case, [90, *[1] * 30], True), whole)
    assert torch.equal(in_parts(backend, case, [60, 8, 8, 8, 3, 33], True), whole)


SPLITS = {"num_splits": "3", "extend_splits": "3"}


@pytest.mark.parametrize("name", ["Document", "Windows", "Hidden", "Everything"])
@pytest.mark.parametrize("options", [{}, SPLITS], ids=str)
def test_tiles_that_a_mask_hides_are_left_out(name: str, options: dict[str, str]) -> None:
    """Long enough for tiles that no query of a tile sees, tiles that all see, and programs of which each has a run of keys."""
    assert error_of(case_of("1q90_1q40s100_1q1s99_1q4s77", spec(rule=RULES[name])), **options) < 5e-6


@pytest.mark.parametrize("layout", [NHD, VLLM_5D], ids=lambda layout: layout.name)
@pytest.mark.parametrize("options", [{}, SPLITS], ids=str)
def test_rows_of_hidden_tiles_are_not_read(options: dict[str, str], layout: CacheLayout) -> None:
    """Values of the first document are NaN, which a weight of 0 would not hide."""
    layer = spec(rule=Document(torch.arange(LENGTH) // 64))
    case = case_of("1q16s120_1q1s65_1q1s128_1q4s100", layer, layout, verify=4)
    right = expected(case)
    for row in range(case.metadata.num_seqs):
        for block in case.metadata.block_table[row, :4].tolist():
            case.cache.logical_value[block] = torch.nan
    backend = TritonAttention(layer, layout, 16, options)
    assert relative_error(run_backend(backend, case), right, case) < 5e-6


@pytest.mark.parametrize("name", ["Document", "Windows"])
def test_a_captured_plan_lists_tiles_anew_for_each_replay(name: str) -> None:
    case = case_of("1q1s120_3q1s40", spec(rule=RULES[name]))
    step, lengths = case.metadata, case.metadata.seq_lens.clone()
    backend = TritonAttention(case.spec, NHD, 16)
    plan = backend.plan_for_capture(replace(step, seq_lens_cpu=torch.full_like(step.seq_lens_cpu, 8192)))
    step.seq_lens.zero_()  # a replay of padding only, then one of the case's own lengths
    backend.plan_for_replay(plan, replace(step, seq_lens_cpu=step.seq_lens))
    assert plan.chunks.seen.counts.tolist() == [0] * 4
    step.seq_lens.copy_(lengths)
    backend.plan_for_replay(plan, step)
    out = torch.full_like(case.q, torch.nan)
    backend.decode(case.q, case.cache, plan, out)
    assert relative_error(out, expected(case), case) < 5e-6


LAYERS = {
    "window": {"sliding_window": 9},
    "softcap, sinks": {"softcap": 2.0, "sinks": (0.3, -1.0, 2.0, 0.0)},
    "mha": {"num_kv_heads": 4},
    "one kv head": {"num_kv_heads": 1},
    "value of 40": {"v_head_dim": 40},
}


@pytest.mark.parametrize("options", [{}, SPLITS], ids=str)
@pytest.mark.parametrize("layout", [NHD, *(pytest.param(each, marks=pytest.mark.slow) for each in (HND, VLLM_5D))], ids=str)
@pytest.mark.parametrize("changes", LAYERS)
def test_other_features_and_layouts(changes: str, layout: CacheLayout, options: dict[str, str]) -> None:
    layer = spec(rule=RULES["Everything"], **LAYERS[changes])
    assert error_of(case_of("1q9_1q6s42_1q1s63_2q1s8", layer, layout), **options) < 5e-6


def test_a_cache_of_int8_and_a_value_in_the_key() -> None:
    rule = RULES["Everything"]
    layer = spec(rule=rule, kv_dtype=torch.int8)
    assert error_of(case_of("mixed", layer, NHD_INT8)) < 5e-6
    latent = spec(rule=rule, num_kv_heads=1, head_dim=48, v_head_dim=32, value_in_key=True)
    assert error_of(case_of("mixed", latent, LATENT)) < 5e-6


@pytest.mark.parametrize("name", ["Hashed", "Alibi", "Everything"])
def test_decode_that_writes_its_new_token(name: str) -> None:
    case = new_token_case("2q1s17_1q1s40", spec(rule=RULES[name]), NHD, 16, padding_rows=0)
    backend = TritonAttention(case.spec, NHD, case.cache.block_size)
    assert backend.decode_writes
    out = write_and_decode(backend, case)
    assert relative_error(out, expected(case), case) < 5e-6


class Keyless(AttentionRule):
    """Of five queries, one sees no key."""

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return (q_pos % 5 != 3) & (k_pos >= 2)


@pytest.mark.parametrize("options", [{}, SPLITS], ids=str)
@pytest.mark.parametrize("sinks", [None, (0.3, -1.0, 2.0, 0.0)])
def test_queries_without_a_key(sinks: tuple[float, ...] | None, options: dict[str, str]) -> None:
    case = case_of("1q9_1q40s100_1q1s63_1q1s64_1q4s77", spec(rule=Keyless(), sinks=sinks), verify=4)
    assert error_of(case, **options) < 5e-6
    lse = torch.full((4, len(case.q)), torch.nan)
    run_backend(TritonAttention(case.spec, NHD, 16, options), case, lse)
    hidden = torch.tensor([position % 5 == 3 or position < 2 for position in positions_of(case)])
    least = torch.full((4,), -torch.inf) if sinks is None else torch.tensor(sinks)
    assert torch.allclose(lse[:, hidden], least[:, None].expand(-1, int(hidden.sum())))
    assert lse[:, ~hidden].isfinite().all()


def positions_of(case: Case) -> list[int]:
    lengths = zip(case.metadata.query_lens, case.metadata.kv_lens, strict=True)
    return [position for query_len, kv_len in lengths for position in range(kv_len - query_len, kv_len)]


class Summed(AttentionRule):
    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return torch.cumsum(q_pos, 0) > k_pos


class Branching(AttentionRule):
    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score if (q_pos > 5).any() else 2 * score


class ByRow(AttentionRule):
    table: Tensor

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score + params.table[head]


class InPlace(AttentionRule):
    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score.mul_(2)


class Faulty(AttentionRule):
    def gate(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return params.missing * q_pos


class Rounded(AttentionRule):
    logits: Tensor

    def gate(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return params.logits[k_pos].exp()


class Narrow(AttentionRule):
    table: Tensor

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score + (params.table[k_pos % 8] - params.table[q_pos % 8])


class TwoBools(AttentionRule):
    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        return score + 1.0 * ((k_pos % 2 == 0) + (k_pos % 3 == 0))


def test_code_is_written_as_json_for_hooks_that_watch_compilations() -> None:
    code = traced_rule(RULES["Document"]).code()
    assert json.loads(json.dumps([NO_RULE, code])) == ["no_rule", code]
    assert code.mask is not None
    assert NO_RULE.mask is None


_HINT = "(convert its operands to int64 or float32)"
REFUSED = {
    Narrow(torch.arange(8, dtype=torch.uint8)): f"torch.sub with a result of torch.uint8 {_HINT} in score",
    TwoBools(): f"torch.add with a result of torch.bool {_HINT} in score",
    Rounded(torch.ones(9).bfloat16()): "torch.exp with a result of torch.bfloat16 instead of float32 in gate",
    Summed(): "torch.cumsum in mask",
    Branching(): "torch.any in score",
    ByRow(torch.ones(4, 3)): "a parameter of 2 dimensions with 1 indices in score",
    InPlace(): "torch.mul, which changes a tensor in place in score",
    Faulty(): "AttributeError in gate: params has nothing, not missing",
}


@pytest.mark.parametrize("rule", REFUSED, ids=lambda rule: rule.name)
def test_a_refusal_names_what_is_not_inlined(rule: AttentionRule) -> None:
    support = TritonAttention.supports(spec(rule=rule), NHD, 16, Phase.DECODE)
    need = "elementwise operations that triton inlines"
    assert str(support) == f"no: rule {rule.name}: needs {need}, got {REFUSED[rule]} (name another backend)"


def test_a_rule_is_inlined_in_inference_mode_too() -> None:
    class Near(AttentionRule):
        def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
            return score + (1.0 + (q_pos - k_pos).float()) ** -0.5

    with torch.inference_mode():
        assert "tl.float32" in traced_rule(Near()).source
