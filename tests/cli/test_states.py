"""`headway backends explain --model` and `headway bench kernel --states` of models that have layers with a state."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from headway.core.system.json_files import write_json
from headway.models.loader import read_layer_specs
from headway.tuning.table.files import read_table, table_path
from headway.tuning.table.schema import Cell, CrossoverTable, StateSpecRecord
from hybrid_models import ROWS
from sandbox import Result, assert_refused, save_tiny_model
from tables import a_device

Headway = Callable[..., Result]
NEXT = ("backends", "explain", "--device", "cpu", "--model", "qwen3-next-80b-a3b")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_shape_shows_its_attention_and_its_states_with_reasons(headway: Headway) -> None:
    out = headway(*NEXT, "--all", columns=200).out
    assert "us per step of 12 layers" in out
    assert "36 layers with a state: gated_delta 32/16 heads x 128/128 float32" in out
    assert "convolution of 8192 x 4 on cpu; 2.09 MiB each in a slot" in out
    assert "\nstates: prefill=torch, decode=torch\n" in out
    assert "selection: prefill=torch, decode=torch; state_layout=key_value (auto: no crossover table, rank order)" in out
    assert "needs a CUDA GPU, got none" in out.partition("state backend")[2]
    narrow = headway(*NEXT).out
    assert max(map(len, narrow.splitlines())) <= 80
    assert "needs a CUDA GPU" not in narrow


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


def test_the_plan_has_a_row_for_each_kind_of_layer_and_phase(headway: Headway, tmp_path: Path) -> None:
    transformers.Gemma3TextConfig(num_hidden_layers=4, sliding_window_pattern=4, head_dim=64).save_pretrained(tmp_path)
    asked = ("backends", "explain", "--device", "cpu", "--model", str(tmp_path / "config.json"))
    chosen = ("--attn-backend", "window=sdpa.math,full:decode=sdpa", "--kv-cache-dtype", "full=int8_per_token_head")
    plan = json.loads(headway(*asked, *chosen, "--json").out)["plan"]
    assert [(row["kind"], row["phase"]) for row in plan] == [
        (k, p) for k in ("window", "full") for p in ("prefill", "extend", "decode")
    ]
    assert {(row["layers"], row["layout"], row["cache"], row["backend"], row["why"]) for row in plan[:3]} == {
        (3, "nhd", "float32", "sdpa.math", "asked for")
    }
    assert [row["layout"] + row["cache"] for row in plan[3:]] == ["nhd_int8int8_per_token_head"] * 3
    assert [row["why"] for row in plan[3:]] == ["rank order", "rank order", "asked for"]
    text = headway(*asked, *chosen, columns=200).out
    assert "window: decode, 1 sequence" in text
    assert re.search(r"\nfull +decode +1 +\S+ x 64 +nhd_int8 +16 +int8_per_token_head +sdpa +asked for\n", text)
    state = json.loads(headway(*NEXT, "--attn-backend", "state=torch", "--json").out)["plan"]
    assert [(row["kind"], row["why"]) for row in state] == [("full", "rank order")] * 3 + [("state", "asked for")] * 2
    assert_refused(
        headway(*asked, "--attn-backend", "state=torch"), "a kind of layer that the model has: window, full, got 'state'"
    )


def test_the_plan_of_deterministic_mode_is_the_engines(headway: Headway) -> None:
    for level in ("batch", "full"):
        plan = json.loads(headway(*NEXT, "--deterministic", "--deterministic-level", level, "--json").out)["plan"]
        assert [(row["backend"], row["why"]) for row in plan[:3]] == [("sdpa", "asked for")] * 3
    assert_refused(headway(*NEXT, "--deterministic-level", "full"), "deterministic_level=full: needs deterministic")


def test_a_model_without_states_has_none_and_excludes_a_geometry(headway: Headway) -> None:
    plain = ("backends", "explain", "--device", "cpu", "--model", "qwen3-0.6b")
    assert "states" not in json.loads(headway(*plain, "--json").out)
    assert_refused(headway(*plain, "--layers", "3", columns=200), "--model: needs no --geometry and no --layers")
    assert_refused(headway(*NEXT, "--state-backend", "trch", columns=200), "state backend: asked for 'trch'")


def test_an_unknown_state_backend_is_refused_whatever_the_model_has(headway: Headway, tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path / "model"))
    asked = ("generate", "--model", model, "--no-autotune", "--state-backend")
    assert_refused(headway(*asked, "trch", "the quick fox", columns=200), "state backend: asked for 'trch'")
    assert headway(*asked, "torch", "the quick fox").code == 0


TWIN = "from headway.backends.states.torch_states import TorchStates\n\nclass Twin(TorchStates):\n    name = 'twin'\n"


@pytest.fixture
def twin(tmp_path: Path) -> str:
    (tmp_path / "twin.py").write_text(TWIN)
    return f"{tmp_path / 'twin.py'}:Twin"


@pytest.fixture
def model(tmp_path: Path) -> str:
    ROWS["qwen3_next"].save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.slow
def test_states_of_a_model_are_timed_in_a_narrow_table_and_explained(
    headway: Headway, model: str, twin: str, tmp_path: Path
) -> None:
    file = tmp_path / "states.json"
    timed = ("bench", "kernel", "--states", "--model", model, "--device", "cpu", "--plugin", twin, "--rep-ms", "0")
    result = headway(*timed, "--backends", "twin,torch", "--output", str(file), "--peak-bandwidth", "100")
    assert result.code == 0, result.err
    step, scan = result.out.partition("scan: median us")[::2]
    assert "share of 100 GB/s, the peak (given by the user)" in " ".join(step.split())
    assert "tokens/s" in scan
    rows = [line for line in result.out.splitlines() if "key_value" in line or "value_key" in line]
    assert len(rows) == 11 * 2 * 2
    assert max(map(len, rows)) <= 80
    table = read_table(file, "state")
    assert table.complete
    record = StateSpecRecord.of(read_layer_specs(model, torch.device("cpu"), torch.float32).states[0])
    assert table.spec == record
    write_json(table, table_path(a_device(), record))  # where auto looks
    out = headway("backends", "explain", "--device", "cpu", "--model", model, "--plugin", twin, columns=300).out
    assert "(auto: state table of " in out
    assert ", workload chat)" in out
    assert "us: microseconds of all layers in a mean step of chat" in out


def test_a_model_without_attention_is_explained_and_planned(headway: Headway, tmp_path: Path) -> None:
    ROWS["bamba, no attention"].save_pretrained(tmp_path)
    asked = ("backends", "explain", "--device", "cpu", "--model", str(tmp_path))
    assert "no layer has attention" in (out := headway(*asked).out)
    assert "4 layers with a state: mamba2" in out
    assert json.loads(headway(*asked, "--json").out)["states"]["layout"] == "key_value"
    result = headway("plan", str(tmp_path), "--gpu", "h100", "--input-len", "64", "--output-len", "32")
    assert result.code == 0, result.err
    assert "attention:" not in result.out


def test_a_time_that_is_known_stands_in_the_place_of_yes(headway: Headway, model: str, twin: str) -> None:
    record = StateSpecRecord.of(read_layer_specs(model, torch.device("cpu"), torch.float32).states[0])
    cells = [
        Cell(
            phase=verb,
            case=f"1q{length}",
            batch=1,
            query_len=length,
            kv_len=length,
            kernel=name,
            layout="key_value",
            status="ok",
            median_us=us,
            p20_us=us,
            p80_us=us,
        )
        for verb, length, times in (("scan", 64, (30.0, 60.0)), ("step", 1, (8.0, 5.0)))
        for name, us in zip(("torch", "twin"), times, strict=True)
    ]
    backends = [{"name": name, "owner": owner_of(name, twin), "version": "", "available": True} for name in ("torch", "twin")]
    backends[0]["version"] = a_device().libraries.get("headway", "")
    head = {
        "date": "2026-11-24",
        "command": "",
        "complete": True,
        "device": a_device(),
        "spec": record,
        "kind": "state",
        "noise": 0.01,
    }
    write_json(CrossoverTable(**head, kernels=backends, cells=cells), table_path(a_device(), record))
    asked = ("backends", "explain", "--device", "cpu", "--model", model, "--plugin", twin, "--json")
    found = json.loads(headway(*asked).out)["states"]
    assert (found["scan"]["choice"], found["step"]["choice"]) == ("torch", "twin")
    assert found["step"]["candidates"][0]["mean_us"] == pytest.approx(2 * 5.0, abs=0.1)


def owner_of(name: str, plugin: str) -> str:
    from headway.registry import create_registry

    return create_registry([plugin], load_entry_points=False).states.entries[name].owner


def test_states_are_timed_for_a_model_that_has_them_alone(headway: Headway) -> None:
    timed = ("bench", "kernel", "--device", "cpu", "--states")
    assert_refused(headway(*timed, columns=200), "--states: needs the model whose layers are timed")
    assert_refused(headway(*timed, "--model", "qwen3-0.6b", columns=200), "0 kinds in qwen3-0.6b")
    assert_refused(headway(*timed, "--model", "qwen3-next", "--cases", "1q64", columns=300), "--states: needs no --cases")
