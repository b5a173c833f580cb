"""`headway check --model`: a model's layers as cells, found again by their names, wrong ones caught, refused ones told."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from headway.core.contract.errors import ConfigError, ModelError
from headway.core.contract.metadata import Phase
from headway.core.oracle.cells import MODEL_SOFTCAPS, MODEL_WINDOWS, WINDOWS, CheckCell
from headway.core.oracle.inputs import steps_of
from headway.models.checkpoints.locate import SHAPES
from headway.models.families.families import FAMILIES
from headway.models.loader import decoder_config, decoder_layer_specs, read_config, read_layer_specs
from headway.testing.broken import attention as planted
from headway.testing.broken.attention import PlainBackend
from headway.testing.diagnosis.scorecard import command, scorecard
from headway.testing.kit.checking import Wanted, check
from headway.testing.kit.cover import GROUPS, HEAD_DIMS, LATENT_DIM, MANY_HEADS, OTHERS, read_model_layers
from headway.testing.kit.kit import CHECKS, Kit, make_kit
from headway.testing.kit.report import CheckReport
from headway.testing.kit.subject import load_subject

CPU = torch.device("cpu")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 100,
    "eos_token_id": 1,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "sliding_window": 12,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_hidden_layers": 3,
    "dtype": "bfloat16",
}
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "dtype": "float16",
}


def write(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    def kit_of(backend: type[PlainBackend], model: str) -> Kit:
        monkeypatch.setitem(planted.PLANTED, "made", backend)
        return Kit(load_subject("broken:made", CPU), read_model_layers(model, CPU))

    return kit_of


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LLAMA, {"0": "2 of 2 layers, first 0: 6/3 heads x 16 float32 on cpu"}),
        (
            GPT_OSS,
            {
                "0": "2 of 4 layers, first 0: 4/2 heads x 16 bfloat16 on cpu sinks sliding_window (12)",
                "1": "2 of 4 layers, first 1: 4/2 heads x 16 bfloat16 on cpu sinks",
            },
        ),
        (
            DEEPSEEK,
            {
                "0": "3 of 3 layers, first 0: 4/1 heads x 40/32 bfloat16 on cpu value_in_key",
                "0-expanded": "3 of 3 layers, first 0, expanded: 4/4 heads x 24/16 bfloat16 on cpu dense",
            },
        ),
        (NEOX, {"0": "2 of 2 layers, first 0: 4/4 heads x 16 float16 on cpu"}),
    ],
    ids=["llama", "gpt_oss, quantised", "deepseek", "of transformers"],
)
def test_each_distinct_layer_is_found_in_its_own_type(config: dict[str, Any], layers: dict[str, str], tmp_path: Path) -> None:
    found = read_model_layers(write(tmp_path, config), CPU)
    assert {name: str(layer) for name, layer in found.items()} == layers
    assert all(layer.spec.sinks is None or len(set(layer.spec.sinks)) > 1 for layer in found.values())
    by_folder = read_layer_specs(str(tmp_path), CPU)
    assert by_folder.distinct[0].num_kv_heads == found["0"].spec.num_kv_heads


def test_a_name_of_a_shape_is_a_model() -> None:
    assert [str(layer.spec) for layer in read_model_layers("llama-3-8b", CPU).values()] == ["32/8 heads x 128 bfloat16 on cpu"]


@pytest.mark.parametrize("name", ["nothing/config.json", "other.json"])
def test_a_path_of_no_config_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--model: needs a config\.json that is there") as caught:
        make_kit("sdpa", "cpu", model=str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_config_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, {**LLAMA, "num_key_value_heads": 4})
    with pytest.raises(ModelError, match="num_attention_heads needs a multiple of num_key_value_heads=4, got 6") as caught:
        make_kit("sdpa", "cpu", model=path)
    assert "\n" not in str(caught.value)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [LLAMA, GPT_OSS, DEEPSEEK], ids=["llama", "gpt_oss", "deepseek"])
def test_a_right_backend_is_right_in_every_cell_of_a_model(config: dict[str, Any], tmp_path: Path) -> None:
    kit = make_kit("sdpa", "cpu", model=write(tmp_path, config))
    cells = kit.cells(quick=True)
    assert [CheckCell.parse(str(cell)) for cell in cells] == cells
    assert len(set(cells)) == len(cells)
    tried = Counter((cell.layer, cell.check) for cell in cells)
    for name, layer in kit.layers.items():
        phases = {cell.phase for cell in cells if cell.layer == name and cell.check == "answer"}
        served = {"prefill"} if layer.spec.dense else {"extend", "decode", "mixed", "verify", "ragged"}
        assert phases == served | ({"prefill"} if config is not DEEPSEEK else set())
        assert len({cell.scores for cell in cells if cell.layer == name and cell.check == "answer"}) >= 5
        assert tried[name, "serves"] == 1
        assert tried[name, "lse"] == len(phases)
        assert tried[name, "steps"] == tried[name, "engine"] == (not layer.spec.dense)
    telling = [cell for cell in cells if cell.check != "answer" or cell.work == "edges" or cell.scores == "low"]
    wrong = [result for cell in telling if (result := kit.run(cell)).status == "failed"]
    assert not wrong, wrong


class ThreeHeadsWrong(PlainBackend):
    """Right with any number of kv heads but three."""

    name = "three-heads-wrong"

    def kv_heads(self, device: torch.device) -> torch.Tensor:
        right = super().kv_heads(device)
        return right.flip(0) if self.spec.num_kv_heads == 3 else right


class ThirdOfTheScale(PlainBackend):
    """Takes the scale for 1 / sqrt(head_dim)."""

    name = "assumes-its-scale"

    def scale(self) -> float:
        return float(self.spec.head_dim**-0.5)


class WindowOfTwelveWrong(PlainBackend):
    name = "window-of-twelve"

    def window(self) -> int:
        return super().window() - (super().window() == 12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("backend", "config", "layer"),
    [
        (ThreeHeadsWrong, LLAMA, "0"),
        (ThirdOfTheScale, {**LLAMA, "model_type": "granite", "architectures": None, "attention_multiplier": 0.5}, "0"),
        (WindowOfTwelveWrong, GPT_OSS, "0"),
    ],
    ids=["kv heads", "scale", "window"],
)
def test_a_mistake_in_a_models_values_is_found(
    backend: type[PlainBackend], config: dict[str, Any], layer: str, plant: Any, tmp_path: Path
) -> None:
    kit = plant(backend, write(tmp_path, config))
    cells = [cell for cell in kit.cells(quick=True) if cell.check == "answer" and cell.work == "edges" and cell.layer == layer]
    results = [kit.run(cell) for cell in cells]
    assert [result for result in results if result.status == "failed"], results
    right = plant(PlainBackend, write(tmp_path, config))
    results = [right.run(cell) for cell in cells]
    assert {result.status for result in results} == {"passed"}, results
    assert {result.scale for result in results} == {"own"}


class DecodesWithoutWindows(PlainBackend):
    name = "decodes-without-windows"
    capabilities = replace(PlainBackend.capabilities, phases=frozenset({Phase.DECODE}), features=frozenset({"sinks"}))


def test_a_layer_that_is_refused_is_told_and_no_failure(plant: Any, tmp_path: Path) -> None:
    path = write(tmp_path, GPT_OSS)
    kit = plant(DecodesWithoutWindows, path)
    cells = kit.cells(quick=True)
    assert {cell.layer for cell in cells if cell.check == "answer"} == {"1"}
    assert {cell.phase for cell in cells if cell.check == "answer"} == {"decode", "verify", "ragged"}
    results = [kit.run(cell) for cell in cells if cell.check == "serves"]
    assert [result.status for result in results] == ["skipped", "passed"]
    assert "would not serve 2 of 4 layers, first 0" in results[0].reason
    assert "sliding_window=12" in results[0].reason
    assert "serves in decode 2 of 4 layers, first 1" in results[1].reason
    report = CheckReport.model_validate(
        {
            "schema": "headway.check/1",
            "target": "x",
            "subject": "x",
            "model": path,
            "origin": {"version": "1", "commit": "a"},
            "date": "now",
            "quick": True,
            "machine": {"device": "cpu", "name": "a cpu", "python": "3", "torch": "2"},
            "cells": results,
        }
    )
    shown = "\n".join(line.plain for line in scorecard(report, {name: about for name, (_, about) in CHECKS.items()}, 200))
    assert f"with the layers of {path}" in shown
    assert "would not serve 2 of 4 layers, first 0" in shown
    assert "not in prefill and extend: phase" in shown or "not in prefill: phase" in shown
    assert f"--model {path} --cell" in command(report, results[0])


@pytest.mark.slow
def test_a_cell_of_a_model_runs_again_by_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA)
    cell = str(next(cell for cell in make_kit("sdpa.math", "cpu", model=path).cells(quick=True) if cell.check == "answer"))
    report = check(Wanted(target="sdpa.math", model=path, cell=cell))
    assert [(result.cell, result.status) for result in report.cells] == [(cell, "passed")]
    with pytest.raises(ConfigError, match="needs --model, whose layer it names"):
        check(Wanted(target="sdpa.math", cell=cell, in_process=True))
    with pytest.raises(ConfigError, match="a cell of one of the model's layers 0, got"):
        check(Wanted(target="sdpa.math", model=path, cell=cell.replace("layer=0", "layer=1"), in_process=True))


def configs() -> Iterator[Any]:
    """The configurations of the shapes that Headway brings, and transformers' own of each family it knows."""
    yield from (read_config(folder) for folder in sorted(SHAPES.iterdir()))
    for family in FAMILIES:
        with suppress(ValueError):  # a family that this transformers does not know
            yield AutoConfig.for_model(family)


def test_the_kits_values_are_those_that_models_have() -> None:
    specs = set()
    for config in configs():
        with suppress(ModelError, ConfigError):  # a default configuration that is no model's
            found = decoder_layer_specs(decoder_config(config, required=True), torch.bfloat16, torch.device("cpu"))
            specs |= {*found.cached, *found.expanded.values()}
    dims = {*HEAD_DIMS, *OTHERS["head_dim"], LATENT_DIM}
    assert {spec.head_dim for spec in specs} <= dims
    groups = {*GROUPS, *OTHERS["group"], *MANY_HEADS["latent"], *MANY_HEADS["none"]}
    assert {spec.group_size for spec in specs} <= groups
    windows = {*WINDOWS.values(), *MODEL_WINDOWS.values()}
    assert {spec.sliding_window for spec in specs} <= {None, *windows}
    assert {spec.softcap for spec in specs} <= {None, *MODEL_SOFTCAPS.values()}
    assert len({spec.sliding_window for spec in specs}) > 2


@pytest.mark.slow
def test_windows_and_soft_caps_of_models_bite_in_their_cells() -> None:
    cells = make_kit("broken:drops-softcap", "cpu").stage.claimed.of_models()  # type: ignore[union-attr]
    named = (*MODEL_WINDOWS, *MODEL_SOFTCAPS)
    assert {(cell.feature, cell.phase) for cell in cells} == set(product(named, ("decode", "extend")))
    for cell in cells:
        steps = steps_of(cell.work, cell.phase, cell.block_size)
        longest = max(query + context for lens in steps for query, context, _ in lens)
        assert longest > MODEL_WINDOWS.get(cell.feature, 0)
        assert cell.feature in MODEL_WINDOWS or cell.scores == "alternating"
