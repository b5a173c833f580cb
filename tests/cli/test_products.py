"""`headway backends explain --linear` and `headway bench kernel --linear`: GEMMs over quantized weights, explained and timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from expert_layers import CONFIGS
from headway.bench.kernel.products import ProductsBench
from headway.cli.look.explain import choice_data, kernel_section
from headway.core.contract.experts import ExpertsSpec
from headway.core.contract.weights import WeightFormat
from headway.core.select.costs import AxisTimes
from headway.core.system.terminal import show
from headway.kernels.experts.bound import ExpertsKind
from headway.kernels.experts.builtin import TOKEN_COUNTS, TOKENS
from headway.registry import create_registry
from headway.registry.plugin_sources import load_file
from sandbox import Result, assert_refused

Headway = Callable[..., Result]
ROOT = Path(__file__).parents[2]
LINEAR = ("backends", "explain", "--device", "cpu", "--linear")


def test_each_kind_of_product_is_told_in_a_narrow_terminal(headway: Headway) -> None:
    out = headway(*LINEAR, "--model", "llama-3-8b", "--quantization", "fp8").out
    lines = [line.split() for line in out.splitlines()]
    title = lines.index(["fp8", "rows", "28672x4096", "float32,", "32", "layers"])
    assert ["expanded", "from", "1", "on"] in lines[title:]
    assert max(map(len, out.splitlines())) <= 80
    assert "no linear layer with a quantized weight" in headway(*LINEAR, "--model", "llama-3-8b").out


def test_json_and_refusals(headway: Headway) -> None:
    found = json.loads(headway(*LINEAR, "--model", "llama-3-8b", "--quantization", "fp8", "--json").out)
    assert {row["product"]: row["layers"] for row in found["products"]}["fp8 rows 4096x14336 float32"] == 32
    assert_refused(headway(*LINEAR), "--model NAME")
    assert_refused(headway(*LINEAR, "--model", "llama-3-8b", "--quantization", "fp3"), "none or fp8")


def test_ways_that_were_refused_are_named_with_the_reason_they_share() -> None:
    console = Console(width=80, record=True)
    why = "vLLM's library: needs a compiled library that holds it, got none"
    refused = {"marlin": why, "cutlass": why, "scaled_mm": "form: needs floats of 8 bits, got int4"}
    ways = {1: "kernel", 17: "dequantize"}
    row = {
        "product": "int4 of 128 64x128",
        "layers": 2,
        "ways": ways,
        "unit": "rows",
        "us": {},
        "by": "the rule",
        "refused": refused,
    }
    show(kernel_section(row), console, all_kernels=False)
    shown = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert shown[0] == "int4 of 128 64x128, 2 layers"
    assert {"kernel from 1 to 16", "dequantize from 17 on", "by: the rule"} <= set(shown)
    assert f"marlin, cutlass {why}" in " ".join(shown)
    assert "scaled_mm form: needs floats of 8 bits, got int4" in " ".join(shown)


EXAMPLE = ROOT / "examples" / "headway-experts" / "headway_experts.py"


def test_layers_of_experts_have_the_same_form(headway: Headway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the times that are stored, and the reason of each kernel that was refused."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    asked = (*LINEAR[:-1], "--experts", "--plugin", str(EXAMPLE), "--model")
    (refused,) = json.loads(headway(*asked, "gpt-oss-20b", "--json").out)["experts"]
    assert refused["layers"] == 24
    assert refused["ways"] == {"1": "torch"}
    assert "biases: needs none, got a layer with biases" in refused["refused"]["gathered"]
    (row,) = json.loads(headway(*asked, "qwen3-30b-a3b", "--json").out)["experts"]
    assert (row["ways"], row["by"], row["us"]) == ({"1": "torch"}, "not measured", {})
    registry, config = create_registry([load_file(EXAMPLE)], load_entry_points=False), CONFIGS["qwen3_moe"]
    spec = ExpertsSpec(config, 64, torch.float32, torch.device("cpu"), WeightFormat("plain"), WeightFormat("plain"))
    kind = ExpertsKind(spec, [each(spec) for each in registry.experts.classes("cpu")], lambda *_: None)
    times = {"torch": [9.0] * len(TOKEN_COUNTS), "gathered": [4.0] * 5 + [None] * 9}
    kind.use_times(AxisTimes(TOKENS, times, "measured"))
    console = Console(width=80, record=True)
    data = choice_data(kind, 2, TOKENS) | {"experts": str(spec), "refused": {"triton.rows": "Triton: needs it, got none"}}
    show(kernel_section(data), console, all_kernels=False)
    shown = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert {"gathered from 1 to 31 4.0 4.0 - -", "torch from 32 on 9.0 9.0 9.0 9.0", "by: measured"} <= set(shown), shown
    assert "triton.rows Triton: needs it, got none" in " ".join(shown)


QUICKLY = ("--rep-ms", "0", "--warmup-ms", "0", "--device", "cpu")


def test_the_command_prints_narrow_tables_and_writes_a_file(headway: Headway, tmp_path: Path) -> None:
    output = tmp_path / "products.json"
    command = ("bench", "kernel", "--linear", "64x256", "--form", "fp8,int4", "--rows", "1,2", "--dtype", "bfloat16")
    result = headway(*command, "--output", str(output), *QUICKLY)
    assert result.code == 0, result
    assert "64x256 int4; *: the engine's choice, by its form" in result.out
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
