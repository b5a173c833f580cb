"""Names of layers in log lines."""

from __future__ import annotations

import pytest

from headway.core.contract.experts import ExpertsConfig
from headway.tuning.table.schema import ExpertsRecord


@pytest.mark.parametrize(
    ("held", "formats", "name"),
    [
        (None, "", "experts 128 top 8, 2048 x 768, bfloat16"),
        (None, " fp8 128x128 / fp8 128x128", "experts 128 top 8, 2048 x 768, bfloat16, fp8 128x128"),
        (range(64), "  / fp8 rows", "experts 128 top 8, 2048 x 768, shard 0 to 63, bfloat16, plain / fp8 rows"),
    ],
)
def test_a_layer_of_experts_has_a_short_name_and_its_stored_key_stays(held: range | None, formats: str, name: str) -> None:
    config = ExpertsConfig(num_experts=128, top_k=8, intermediate_size=768, held=held)
    record = ExpertsRecord(layer=f"{config}, hidden size 2048 bfloat16{formats}")
    assert str(record) == name
    assert record.key == (record.layer,)


def test_an_unknown_layer_of_experts_is_named_as_it_is_stored() -> None:
    assert str(ExpertsRecord(layer="four experts")) == "four experts"
