"""`headway bench kernel --linear` on the command line: its tables, its file, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.bench.kernel.products import ProductsBench
from sandbox import Result, assert_refused

Headway = Callable[..., Result]
QUICKLY = ("--rep-ms", "0", "--warmup-ms", "0", "--device", "cpu")


def test_the_command_prints_narrow_tables_and_writes_a_file(headway: Headway, tmp_path: Path) -> None:
    output = tmp_path / "products.json"
    command = ("bench", "kernel", "--linear", "64x256", "--form", "fp8,int4", "--rows", "1,2", "--dtype", "bfloat16")
    result = headway(*command, "--output", str(output), *QUICKLY)
    assert result.code == 0, result
    assert "64x256 int4; *: what an engine takes, by its form" in result.out
    assert "expanded" in result.out
    told = [line for line in result.out.splitlines()[2:-2] if not line.startswith("measured on a busy machine")]
    assert max(map(len, told)) <= 80
    report = ProductsBench.model_validate_json(output.read_text())
    assert {(cell.form, cell.rows) for cell in report.cells} == {(form, rows) for form in ("fp8", "int4") for rows in (1, 2)}


def test_a_users_mistake_is_one_message(headway: Headway) -> None:
    def refused(*arguments: str) -> Result:
        return headway("bench", "kernel", *arguments, *QUICKLY)

    assert_refused(refused("--form", "fp8"), "--linear with a shape")
    assert_refused(refused("--linear", "64by8"), "--linear", "4096x14336", "'64by8'")
    assert_refused(refused("--linear", "0x8"), "'0x8'")
    assert_refused(refused("--linear", "64x64", "--form", "int4"), "a multiple of 128 for int4", "64x64")
    assert_refused(refused("--linear", "64x64", "--form", "int3"), "--form", "mxfp4", "'int3'")
    assert_refused(refused("--linear", "64x64", "--rows", "none"), "--rows", "positive numbers")
    assert_refused(refused("--linear", "64x64", "--cases", "1q1s8"), "an option of attention or of states")
