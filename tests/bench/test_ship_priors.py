"""Files that ship: what a lookup reads is as it was measured; what nobody can vouch for is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.bench.studies.ship_priors import ship
from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin
from headway.tuning.measure.products import ProductsFile
from headway.tuning.table.convert import to_costs
from headway.tuning.table.files import find_prior, read_table
from headway.tuning.table.schema import PriorRecord
from tables import a_cell, a_device, a_table

ROOT = Path(__file__).resolve().parents[2]
COMMIT = Origin(version="1.0", commit="0123456789ab")


def test_a_shipped_table_chooses_as_the_measured_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = ROOT / "bench" / "results" / "h200" / "crossover-16-8-128.json"
    target = ship(measured, tmp_path)
    before, after = read_table(measured), read_table(target)
    assert target.stat().st_size < measured.stat().st_size / 2
    costs, again = to_costs(before), to_costs(after)
    for phase in Phase:
        assert again.shapes[phase] == costs.shapes[phase]
        for shape in [*costs.shapes[phase], *costs.between[phase]]:
            for name in ("triton", "hopper", "flash_attn_3"):
                assert again.at(shape, name, "nhd", 16) == pytest.approx(costs.at(shape, name, "nhd", 16), rel=1e-3)
    monkeypatch.setenv("HEADWAY_PRIORS", str(tmp_path))
    found = find_prior(before.device, before.spec, {})
    assert found is not None
    assert found.path == target
    assert str(found.record()).startswith("shipped table of 2026-11-22 (NVIDIA H200, driver 580.159.04, torch 2.11.0+cu130")
    assert "commit c4a0fe8900f3" in found.record().made


def test_times_of_products_ship_under_their_name(tmp_path: Path) -> None:
    kept = ProductsFile(device=a_device(), origin=COMMIT, product="fp8 rows", rows=[1], us={"kernel": [1.0]})
    path = tmp_path / "some-product.json"
    write_json(kept, path)
    assert ship(path, tmp_path / "priors") == tmp_path / "priors" / "products" / "some-product.json"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"complete": False}, "a whole table"),
        ({"origin": None}, "the sources of one commit"),
        ({"origin": Origin(version="1.0", commit="0123456789ab", modified=True)}, "the sources of one commit"),
        ({"prior": PriorRecord(device=a_device(), origin=None, date="2026-11-21")}, "all measured by one run"),
    ],
)
def test_a_table_that_nobody_can_vouch_for_does_not_ship(tmp_path: Path, changes: dict[str, object], word: str) -> None:
    path = tmp_path / "table.json"
    write_json(a_table(a_cell(), **({"origin": COMMIT} | changes)), path)
    with pytest.raises(ConfigError, match=word):
        ship(path, tmp_path / "priors")
    path.write_text('{"schema": "another/1"}')
    with pytest.raises(ConfigError, match="another/1"):
        ship(path, tmp_path / "priors")
