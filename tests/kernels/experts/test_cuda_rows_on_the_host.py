"""The source of expert_rows.cu beside float64, run by the host: forms, slices that are not whole, lots, orders of threads."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from headway.kernels.experts.config import ExpertsConfig
from host_experts import CLAMPED, PLAIN, SHAPES, Add, check
from host_kernels import add_experts


def lots_of(lot: int, order: int = 0) -> Add:
    return partial(add_experts, lot=lot, blocks=3, order=order)


def test_clamped_experts_with_biases_and_a_slice_that_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, lots_of(8), "mxfp4", CLAMPED, 160, tokens=11)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "lot"), [(1, 8), (3, 8), (20, 8), (20, 16)])
@pytest.mark.parametrize("form", SHAPES)
def test_every_form(monkeypatch: pytest.MonkeyPatch, form: str, tokens: int, lot: int) -> None:
    check(monkeypatch, lots_of(lot), form, *SHAPES[form], tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "lot"), [(17, 8), (33, 16), (64, 8), (64, 16)])
def test_experts_of_several_lots_and_of_no_tokens(monkeypatch: pytest.MonkeyPatch, tokens: int, lot: int) -> None:
    check(monkeypatch, lots_of(lot), "mxfp4", CLAMPED, 160, tokens, alike=True)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("form", ["fp8 rows", "mxfp4"])
def test_threads_in_another_order(monkeypatch: pytest.MonkeyPatch, form: str, order: int) -> None:
    check(monkeypatch, lots_of(8, order), form, *SHAPES[form], 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "config"),
    [
        ("fp8 rows", dataclasses.replace(PLAIN, gated=False)),
        ("int8", dataclasses.replace(PLAIN, shared_intermediate_size=192)),
    ],
)
def test_experts_without_a_gate_and_shared_ones_in_float16(
    monkeypatch: pytest.MonkeyPatch, form: str, config: ExpertsConfig
) -> None:
    check(monkeypatch, lots_of(8), form, config, 176, 9, dtype=torch.float16)
