"""The FlexAttention plugin: its tiles and pages by hand, and cells of the kit, for which torch compiles."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from backend_cases import spec
from headway.core.contract.layout import NHD, CacheGeometry, write_rows
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import make_case
from headway.core.oracle.cells import CheckCell
from headway.core.oracle.steps import Foreign
from headway.registry.plugin_sources import load_file
from headway.testing.kit.kit import Kit
from headway.testing.kit.subject import load_subject

FILE = Path(__file__).resolve().parent.parent / "examples" / "headway-flex" / "headway_flex.py"
LAYER = spec(num_heads=4, num_kv_heads=2, head_dim=64, sliding_window=20)


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    return load_file(FILE)


def step(query_lens: list[int], contexts: list[int]) -> AttentionMetadata:
    blocks = [[8 * row + 7 - each for each in range(8)] for row in range(len(query_lens))]
    return AttentionMetadata.build(query_lens, contexts, blocks, 16, torch.device("cpu"))


def test_queries_stand_in_tiles_of_one_sequence_and_read_its_pages(plugin: ModuleType) -> None:
    plan = plugin.Flex(LAYER, NHD, 16).plan(step([20, 3], [0, 40]).prefill)
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

    def sees(tile: int, query: int, slot: int) -> bool:
        return bool(mask.mask_mod(*map(torch.tensor, (tile, 0, query, slot))))

    assert sees(0, 19, 7 * 16) is True
    assert sees(0, 19, 6 * 16 + 3) is True
    assert sees(0, 18, 6 * 16 + 3) is False, "a later token"
    assert sees(0, 19, 14 * 16) is False, "another sequence's page"
    assert sees(1, 0, 14 * 16 + 5) is True, "position 21 from position 40"
    assert sees(1, 0, 14 * 16 + 4) is False, "behind the window"


def test_rows_of_padding_read_no_page(plugin: ModuleType) -> None:
    plan = plugin.Flex(LAYER, NHD, 16).plan(step([1, 1], [30, -1]))
    assert plan.mods(16)[0].kv_num_blocks.flatten().tolist()[:3] == [2, 0, 0]


def test_it_claims_what_it_computes(plugin: ModuleType) -> None:
    assert plugin.Flex.supports(LAYER, NHD, 16, Phase.DECODE)
    assert "sinks" in str(plugin.Flex.supports(spec(sinks=(0.0,) * 4), NHD, 16, Phase.DECODE))
    assert plugin.Flex.accepts(NHD.allocate(CacheGeometry.of(LAYER, 4, 16)))
    assert "gaps between them" in str(plugin.Flex.accepts(_packed(LAYER)))


def _packed(layer: AttentionSpec) -> object:
    return Foreign(layer, NHD, 4, 16, "packed").cache


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "extend", "decode", "mixed", "verify", "ragged"])
def test_it_is_right_in_every_phase(phase: str) -> None:
    kit = Kit(load_subject(f"{FILE}:Flex", torch.device("cpu")))
    result = kit.run(CheckCell("answer", phase, layout="nhd", block_size=16, head_dim=64, group=2, feature="window"))
    assert result.status == "passed", result


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["none", "softcap", "alibi", "together"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_computes_every_feature_it_claims(feature: str, dtype: str) -> None:
    kit = Kit(load_subject(f"{FILE}:Flex", torch.device("cpu")))
    result = kit.run(
        CheckCell("answer", "mixed", layout="nhd", block_size=16, head_dim=64, group=4, feature=feature, dtype=dtype)
    )
    assert result.status == "passed", result


def test_a_step_of_the_kit_says_how_large_its_pool_is_as_the_engine_does(plugin: ModuleType) -> None:
    """So that masks, copied from the host, are made by `plan`, which may wait for the device."""
    layer = spec(num_heads=4, num_kv_heads=2, head_dim=64)
    made = make_case([(5, 9), (1, 30)], layer, NHD, 16, write_rows)
    assert made.metadata.num_blocks == len(made.cache.key)
    backend = plugin.Flex(layer, NHD, 16)
    made_masks = backend.plan(made.metadata.decode).mods
    assert made_masks.cache_info().currsize == 1


def test_long_heads_of_float32_are_refused_on_a_gpu(plugin: ModuleType) -> None:
    def claims(**changes: object) -> str:
        return str(plugin.Flex.supports(spec(**{"device": torch.device("cuda"), **changes}), NHD, 16, Phase.DECODE))

    assert "head_dim: needs at most 128 in float32 on a GPU, got 256" in claims(head_dim=256)
    assert claims(head_dim=128) == claims(head_dim=256, dtype=torch.bfloat16) == "yes"
    assert claims(head_dim=256, device=torch.device("cpu")) == "yes"
