"""`headway backends explain --linear`: what multiplies over a model's quantised weights, by kept times or by the rule."""

from __future__ import annotations

import json
from collections.abc import Callable

from rich.console import Console

from headway.cli.look.explain import print_products
from sandbox import Result, assert_refused

Headway = Callable[..., Result]
LINEAR = ("backends", "explain", "--device", "cpu", "--linear")


def test_each_kind_of_product_is_told_in_a_narrow_terminal(headway: Headway) -> None:
    out = headway(*LINEAR, "--model", "llama-3-8b", "--quantization", "fp8").out
    assert "fp8 rows 28672x4096, 32 layers\n  expanded on loading from 1 rows on\n" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "no product over a quantised weight" in headway(*LINEAR, "--model", "llama-3-8b").out


def test_json_and_refusals(headway: Headway) -> None:
    found = json.loads(headway(*LINEAR, "--model", "llama-3-8b", "--quantization", "fp8", "--json").out)
    assert {row["product"]: row["layers"] for row in found["products"]}["fp8 rows 4096x14336"] == 32
    assert_refused(headway(*LINEAR), "--model NAME")
    assert_refused(headway(*LINEAR, "--model", "llama-3-8b", "--quantization", "fp3"), "none or fp8")


def test_ways_that_were_refused_are_named_with_the_reason_they_share() -> None:
    console = Console(width=80, record=True)
    why = "vLLM's library: needs a compiled library that holds it, got none"
    refused = {"marlin": why, "cutlass": why, "scaled_mm": "form: needs floats of 8 bits, got int4"}
    row = {"product": "int4 of 128 64x128", "layers": 2, "ways": {1: "kernel"}, "by": "the rule", "refused": refused}
    print_products([row], console)
    shown = console.export_text()
    assert f"  marlin, cutlass: {why}\n" in shown
    assert "  scaled_mm: form: needs floats of 8 bits, got int4\n" in shown
