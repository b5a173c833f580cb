"""The table file: what is written is read again, and a faulty file is refused with the line at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from backend_cases import spec
from headway.core.contract.spec import AttentionSpec
from headway.core.system.json_files import write_json
from headway.tuning.table.files import TableError, read_table
from headway.tuning.table.schema import SCHEMA, SpecRecord
from tables import a_table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.json"


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    write_json(a_table(), path)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data, indent=1))
    return path


def test_a_table_is_read_as_it_was_written(path: Path) -> None:
    table = a_table()
    write_json(table, path)
    assert read_table(path) == table
    assert json.loads(path.read_text())["schema"] == SCHEMA


def test_a_layer_goes_into_a_record_and_back() -> None:
    spec = AttentionSpec(4, 2, 32, 0.21, torch.bfloat16, sliding_window=9, softcap=2.0, sinks=(0.1, 0.2, 0.3, 0.4))
    assert SpecRecord.of(spec).to_spec(spec.device) == spec
    fp8 = AttentionSpec(4, 2, 32, 0.21, torch.bfloat16, kv_dtype=torch.float8_e4m3fn, k_scale=0.5)
    assert SpecRecord.of(fp8).to_spec(fp8.device) == fp8
    assert SpecRecord.of(fp8).kind != SpecRecord.of(spec).key


@pytest.mark.parametrize(
    ("edit", "place", "word"),
    [
        (lambda d: d["cells"][1].update(batch=-3), '"batch": -3', "cells.1.batch"),
        (lambda d: d["cells"][1].update(batch="3"), '"batch": "3"', "cells.1.batch"),
        (lambda d: d["cells"][0].update(median_us=-1.0), '"median_us": -1.0', "cells.0.median_us"),
        (lambda d: d["cells"][0].update(median_us=float("nan")), '"median_us": NaN', "cells.0.median_us"),
        (lambda d: d["cells"][0].update(status="fine"), '"status": "fine"', "cells.0.status"),
        (lambda d: d["cells"][1].update(colour="red"), '"colour": "red"', "cells.1.colour"),
        (lambda d: d["device"].pop("name"), '"device": {', "device.name"),
        (lambda d: d["spec"].update(dtype="int8"), '"dtype": "int8"', "spec.dtype"),
        (lambda d: d.update(noise=7.0), '"noise": 7.0', "noise"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_line(
    path: Path, edit: Callable[[dict[str, Any]], object], place: str, word: str
) -> None:
    edited(path, edit)
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if place in text)
    with pytest.raises(TableError, match=f"line {line}: {word}"):
        read_table(path)


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (lambda d: d["cells"][0].update(status="oom", reason="x"), "a cell that is oom has no median_us"),
        (lambda d: d["cells"][0].update(median_us=None), "needs a median_us"),
        (lambda d: d["cells"][0].update(p80_us=0.1), "p20_us <= median_us <= p80_us"),
        (lambda d: d["cells"][0].update(kv_len=1, query_len=2), "kv_len counts the new tokens too"),
        (lambda d: d["cells"][0].update(layout=None), "both given or both null"),
        (lambda d: d["cells"].append(d["cells"][0]), "is there twice"),
        (lambda d: d["cells"][0].update(kernel="ghost"), "'ghost' is not in kernels"),
        (lambda d: d["spec"].update(num_heads=3), "num_heads must be a multiple"),
    ],
)
def test_values_that_contradict_each_other_are_refused(path: Path, edit: Callable[[dict[str, Any]], object], word: str) -> None:
    with pytest.raises(TableError, match=r"line \d+: .*" + word):
        read_table(edited(path, edit))


def test_every_prefix_of_a_file_is_refused_and_none_crashes(path: Path) -> None:
    write_json(a_table(), path)
    text = path.read_text()
    for end in range(0, len(text.rstrip()), 23):
        path.write_text(text[:end])
        with pytest.raises(TableError, match="line "):
            read_table(path)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\xff\xfe\x00binary", "no text"),
        (b"[]", "line 1: no schema"),
        (b'{"schema": "headway.kernel/1"}', r"line 1: schema 'headway.kernel/1'$"),
        (b'{\n"schema": "headway.table/2"}', "line 2: schema 'headway.table/2'.*newer release"),
        (b'{"schema": 3}', "no schema"),
        (b"[" * 100_000, "line 1, column 202: more than 200 levels"),
        (b"backend,median_us\n", "line 1, column 1: expected value"),
    ],
)
def test_a_foreign_or_newer_file_is_refused(path: Path, content: bytes, word: str) -> None:
    path.write_bytes(content)
    with pytest.raises(TableError, match=word):
        read_table(path)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(TableError, match="table "):
            read_table(path)


def test_a_bidirectional_layer_has_a_table_of_its_own_and_others_keep_theirs() -> None:
    dense = spec(dense=True)
    both_ways = replace(dense, causal=False, sliding_window=65)
    record = SpecRecord.of(both_ways)
    assert record.to_spec(torch.device("cpu")) == both_ways
    assert "bidirectional" in str(record)
    assert "bidirectional" in record.key
    before = SpecRecord.of(dense).model_dump()
    assert before.pop("causal") is True  # as in files that were written before there was such a field
    assert SpecRecord.model_validate(before).key == SpecRecord.of(dense).key
    assert SpecRecord.of(replace(both_ways, causal=True)).key != record.key
    for changes in ({"dense": False}, {"alibi_slopes": [0.5] * both_ways.num_heads}):
        with pytest.raises(ValidationError, match="not causal reads no cache|they need a causal layer"):
            SpecRecord.model_validate({**record.model_dump(), **changes})
