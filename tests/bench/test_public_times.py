"""NVIDIA's public times beside a table: which points are common, how they are told apart, and what is wrong in a line."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.bench.studies.public_times import KERNEL, common_cells, public_times, summary
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_json
from headway.tuning.table.schema import CrossoverTable
from tables import a_cell, a_table

Row = Mapping[str, object]


@pytest.fixture(autouse=True)
def pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pyarrow that reads JSON."""

    def read_table(file: io.BytesIO, filters: Sequence[tuple[str, str, object]]) -> SimpleNamespace:
        rows = json.load(file)
        kept = [row for row in rows if all(row[key] == of for key, _, of in filters)]
        return SimpleNamespace(to_pylist=lambda: kept)

    package, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    parquet.read_table = read_table  # type: ignore[attr-defined]
    package.parquet = parquet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)


def row(batch: int, isl: int, step: int, milliseconds: float, **other: object) -> Row:
    layer = {"num_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    at = {"kernel_source": KERNEL, "window_size": 0, "batch_size": batch, "isl": isl, "step": step, "latency": milliseconds}
    return {**layer, **at, **other}


def a_wheel(path: Path, decode: Sequence[Row], prefill: Sequence[Row]) -> Path:
    folder = "aiconfigurator_core/systems/data/h200_sxm/attention/vllm/0.24.0"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{folder}/generation_attention_perf.parquet", json.dumps(decode))
        wheel.writestr(f"{folder}/context_attention_perf.parquet", json.dumps(prefill))
    return path


DECODE = [
    row(4, 1, 255, 0.02),
    row(4, 1, 255, 0.5, window_size=128),
    row(4, 1, 255, 0.5, kv_cache_dtype="fp8"),
    row(5, 1, 99, 1.0),
]
PREFILL = [row(1, 128, 0, 0.03), row(1, 16384, 0, 2.0)]


def our_table(**device: object) -> CrossoverTable:
    cells = [
        a_cell(10.0, backend="a", case="4q1s256", batch=4, kv_len=256),
        a_cell(8.0, backend="a", case="4q1s256", batch=4, kv_len=256, block_size=256),
        a_cell(40.0, backend="b", case="4q1s256", batch=4, kv_len=256),
        a_cell(15.0, phase="prefill", backend="a", case="1q128", batch=1, query_len=128, kv_len=128),
        a_cell(500.0, phase="prefill", backend="a", case="1q16k", batch=1, query_len=16384, kv_len=16384),
        a_cell(15.0, phase="extend", backend="a", case="1q128s256", batch=1, query_len=128, kv_len=256),
    ]
    table = a_table(*cells)
    spec = table.spec.model_copy(update={"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"})
    named = table.device.model_copy(update={"name": "NVIDIA H200", **device})
    return table.model_copy(update={"spec": spec, "device": named})


@pytest.mark.parametrize("unpack", [False, True], ids=["wheel", "folder"])
def test_common_points_are_compared_with_the_best_of_each_backend(unpack: bool, tmp_path: Path) -> None:
    wheel = a_wheel(tmp_path / "data.whl", DECODE, PREFILL)
    if unpack:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(tmp_path / "unpacked")
    cells = list(common_cells(tmp_path / "unpacked" if unpack else wheel, our_table()))
    assert [(cell.phase, cell.batch, cell.kv_len, cell.public_us) for cell in cells] == [
        ("decode", 4, 256, pytest.approx(20.0)),
        ("prefill", 1, 128, pytest.approx(30.0)),
        ("prefill", 1, 16384, pytest.approx(2000.0)),
    ]
    assert cells[0].ours_us == {"a": 8.0, "b": 40.0}
    told = {each["group"]: each["public_over_ours"] for each in summary(cells)}
    assert told["decode, K and V fit in the L2"] == {"a": 2.5, "b": 0.5}
    assert told["prefill, to 1,024 tokens"] == {"a": 2.0}
    assert told["prefill, beyond"] == {"a": 4.0}


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel, table, output = a_wheel(tmp_path / "data.whl", DECODE, PREFILL), tmp_path / "table.json", tmp_path / "out.json"
    write_json(our_table(), table)
    public_times([wheel, table], output)
    assert "decode, K and V fit in the L2" in capsys.readouterr().out
    written = json.loads(output.read_text())
    assert [len(written["cells"]), written["kernel"], written["tables"]] == [3, KERNEL, [str(table)]]


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda folder: common_cells(folder / "none.whl", our_table()), "needs the wheel of aiconfigurator-core, or its folder"),
        (lambda folder: common_cells(folder, our_table()), "needs one file h200_sxm/attention/vllm/*/generation_attention"),
        (lambda folder: common_cells(folder, our_table(name="NVIDIA L4")), "got NVIDIA L4"),
    ],
)
def test_what_is_missing_is_said(ask: Callable[[Path], Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told.replace("*", r"\*")):
        list(ask(tmp_path))


def test_tables_without_a_common_point_are_an_error(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    write_json(our_table(), table)
    with pytest.raises(ConfigError, match="points that both have measured"):
        public_times([a_wheel(tmp_path / "data.whl", [], []), table], None)
