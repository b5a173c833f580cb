"""FlexAttention for layers with attention rules, against float64 on a CPU, where torch does not compile it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from attention_rules import RULES, Document, expected
from backend_cases import CASES, case_of, spec
from headway.backends.flex import BLOCK, FlexAttention, FlexPlan, block_mask
from headway.bench.studies.rules import error_of, rules_of
from headway.core.contract.layout import NHD, CacheGeometry, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.rule import AttentionRule
from headway.core.oracle.cases import relative_error, run_backend
from headway.core.oracle.steps import Foreign


class Plain(AttentionRule):
    pass


LAYER = spec(num_heads=4, num_kv_heads=2, head_dim=64, sliding_window=20, rule=Plain())
GATED = {"Decay", "KeyGate", "Everything"}


REST = sorted(RULES.keys() - GATED - {"Alibi", "Document", "Windows"})


@pytest.mark.parametrize("case_name", ["mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("prefill", *CASES))])
@pytest.mark.parametrize("name", ["Alibi", "Document", "Windows", *(pytest.param(each, marks=pytest.mark.slow) for each in REST)])
def test_matches_float64(name: str, case_name: str) -> None:
    layer = spec(rule=RULES[name])
    made = case_of(case_name, layer, poison=3e4)
    backend = FlexAttention(layer, NHD, 16)
    assert relative_error(run_backend(backend, made), expected(made), made) < 5e-6


@pytest.mark.parametrize("changes", [{"sliding_window": 9}, {"softcap": 2.0, "alibi_slopes": (0.5, 0.25, 0.125, 0.1)}], ids=str)
def test_other_features(changes: dict[str, Any]) -> None:
    layer = spec(rule=RULES["Distance"], **changes)
    made = case_of("1q9_1q40_1q6s42_1q1s63_2q1s8", layer, poison=3e4)
    assert relative_error(run_backend(FlexAttention(layer, NHD, 16), made), expected(made), made) < 5e-6


def test_a_table_as_long_as_the_sequence() -> None:
    layer = spec(rule=Document(torch.arange(60) // 25))
    made = case_of("1q40s60_1q33_1q1s60", layer, poison=3e4)
    assert relative_error(run_backend(FlexAttention(layer, NHD, 16), made), expected(made), made) < 5e-6


def flex_plan(query_lens: list[int], contexts: list[int]) -> FlexPlan:
    blocks = [[8 * row + 7 - each for each in range(8)] for row in range(len(query_lens))]
    step = AttentionMetadata.build(query_lens, contexts, blocks, 16, torch.device("cpu"))
    view = step.prefill or step.decode
    assert view is not None
    return FlexAttention(LAYER, NHD, 16).plan(view)


def test_queries_are_in_tiles_of_one_sequence_and_read_its_pages() -> None:
    plan = flex_plan([20, 3], [1, 40])
    assert plan.tile == 128
    rows = plan.rows.view(-1, 128)
    assert rows[0, :20].tolist() == list(range(20))
    assert rows[1, :3].tolist() == [20, 21, 22]
    assert plan.places.tolist() == [*range(20), 128, 129, 130]
    mask, score_mod = plan.mods(16)
    assert score_mod is None
    assert mask.kv_num_blocks.flatten().tolist() == [2, 2, 0, 0, 0, 0, 0, 0], "tiles of padding read nothing"
    assert mask.kv_indices[0, 0, 0, :2].tolist() == [7, 6]
    assert mask.kv_indices[1, 0, 0, :2].tolist() == [14, 13], "the window begins in the second page"


def test_rows_of_padding_read_no_page() -> None:
    assert flex_plan([1, 1], [30, -1]).mods(16)[0].kv_num_blocks.flatten().tolist()[:3] == [2, 0, 0]


def test_it_claims_what_it_computes() -> None:
    def claims(**changes: Any) -> str:
        return str(FlexAttention.supports(replace(LAYER, **changes), NHD, 16, Phase.DECODE))

    assert claims() == "yes"
    assert "sinks" in claims(sinks=(0.0,) * 4)
    assert "layer: needs an attention rule, got none (other backends compute plain attention)" in claims(rule=None)
    assert claims(rule=RULES["Decay"]) == "no: rule Decay: needs score and mask only, got gate (name another backend)"
    gpu = torch.device("cuda")
    assert "head_dim: needs at most 128 in float32 on a GPU, got 256" in claims(device=gpu, head_dim=256, v_head_dim=256)
    assert claims(device=gpu, head_dim=256, v_head_dim=256, dtype=torch.bfloat16) == "yes"
    assert FlexAttention.accepts(NHD.allocate(CacheGeometry.of(LAYER, 4, 16)))
    packed: LayerCache = Foreign(LAYER, NHD, 4, 16, "packed").cache
    assert "gaps between them" in str(FlexAttention.accepts(packed))


@pytest.mark.parametrize("text", ["2q90", "3q1s70"])
@pytest.mark.parametrize("name", ["alibi", "softcap", "documents"])
def test_the_study_of_rules_checks_results(name: str, text: str) -> None:
    layer = spec(rule=rules_of(4, 90)[name])
    made = case_of(text, layer, poison=3e4)
    out = run_backend(FlexAttention(layer, NHD, 16), made)
    assert error_of(made, out) < 1e-6
    assert error_of(made, run_backend(FlexAttention(spec(rule=Plain()), NHD, 16), made)) > 1e-3


@pytest.mark.parametrize("heads", [1, 3])
def test_blocks_of_a_mask_are_those_of_torch(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.backends.flex.MASK_ELEMENTS", 2**18)  # several parts
    owner = torch.arange(1024) // 300

    def visible(tile: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return (slot <= query) & (query - slot < 200 + 100 * head) & (owner[query] == owner[slot])

    found = block_mask(visible, heads, 1024, torch.device("cpu"))
    right = create_block_mask(visible, None, heads, 1024, 1024, device="cpu", BLOCK_SIZE=BLOCK)
    for blocks, numbers in (("kv_indices", "kv_num_blocks"), ("full_kv_indices", "full_kv_num_blocks")):
        assert torch.equal(getattr(found, numbers), getattr(right, numbers))
        assert torch.equal(getattr(found, blocks), getattr(right, blocks))
