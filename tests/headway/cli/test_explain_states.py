"""`headway backends explain --model` of a model that has layers with a state, without any weight of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_models import ROWS
from sandbox import Result, assert_refused

Headway = Callable[..., Result]
NEXT = ("backends", "explain", "--device", "cpu", "--model", "qwen3-next-80b-a3b")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_shape_shows_its_attention_and_its_states_with_reasons(headway: Headway) -> None:
    out = headway(*NEXT, columns=200).out
    assert "us per step of 12 layers" in out
    assert "36 layers with a state: gated_delta 32/16 heads x 128/128 float32" in out
    assert "convolution of 8192 x 4 on cpu; 2.09 MiB each in a slot" in out
    assert "states: torch, states in layout key_value (auto: rank order)" in out
    assert "needs a CUDA GPU, got none" in out.partition("state backend")[2]
    narrow = headway(*NEXT).out.partition("state backend")[2]
    assert max(map(len, narrow.splitlines())) <= 80


def test_a_configuration_alone_will_do_and_says_the_same_as_data(headway: Headway, tmp_path: Path) -> None:
    ROWS["qwen3_next"].save_pretrained(tmp_path)
    asked = ("backends", "explain", "--device", "cpu", "--model", str(tmp_path / "config.json"), "--json")
    found = json.loads(headway(*asked, "--state-backend", "prefill=torch", "--dtype", "bfloat16").out)["states"]
    (row,) = found["layers"]
    assert row["count"] == 2
    assert "bfloat16, float32 states" in row["spec"]
    channels, state = 2 * 2 * 8 + 4 * 12, 4 * 8 * 12
    assert row["bytes_per_slot"] == 4 * state + 2 * 3 * channels
    assert found["scan"]["choice"] == found["step"]["choice"] == "torch"
    served = {each["name"]: each["serves"] for each in found["scan"]["candidates"]}
    assert served["torch"]
    assert all(each["reasons"] for each in found["scan"]["candidates"] if not each["serves"])


def test_a_model_without_states_has_none_and_excludes_a_geometry(headway: Headway) -> None:
    plain = ("backends", "explain", "--device", "cpu", "--model", "qwen3-0.6b")
    assert "states" not in json.loads(headway(*plain, "--json").out)
    assert_refused(headway(*plain, "--layers", "3", columns=200), "--model: needs no --geometry and no --layers")
    assert_refused(headway(*NEXT, "--state-backend", "trch", columns=200), "state backend: asked for 'trch'")
