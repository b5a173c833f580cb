"""Folders of adapters: what cannot be served is refused by name, in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from headway.core.contract.adapters import AdapterSlots, LoRARequest
from headway.core.contract.errors import ConfigError
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.linear import Linear, ProductOrigin
from headway.kernels.lora.bank import AdapterBank
from headway.kernels.lora.folder import read_folder
from tiny_adapters import save_adapter, sizes_of

CONFIG = LlamaConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=30
)
NAME = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bank() -> AdapterBank:
    """Slots beside the products of one layer, merged as a decoder has them."""
    made = []
    merged = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("self_attn", ("o_proj",)), ("mlp", ("gate_proj", "up_proj")))
    for room, names in (*merged, ("mlp", ("down_proj",))):
        sizes = [sizes_of(CONFIG)[name] for name in names]
        modules = {f"model.layers.0.{room}.{name}": Axis.all(rows) for name, (rows, _) in zip(names, sizes, strict=True)}
        columns = sizes[0][1]
        origin = ProductOrigin(modules, Axis.all(columns), None, 1.0)
        made.append(Linear(torch.zeros(sum(rows for rows, _ in sizes), columns), origin=origin))
    return AdapterBank(made, AdapterSlots(1, 8), torch.float32)


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)

    return changed


def put(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors.update({name: tensor}))


def spoil(name: str, value: float) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors[name].view(-1)[3:4].fill_(value))


REFUSED = {
    "dora": (change_config(use_dora=True), "no use_dora, got True: DoRA"),
    "dora by its tensor": (put(f"{NAME}.lora_magnitude_vector", torch.ones(16)), "DoRA.*lora_magnitude_vector"),
    "bias": (change_config(bias="lora_only"), "bias none, got 'lora_only'"),
    "a bias": (put(f"{NAME}.lora_B.bias", torch.ones(16)), r"q_proj.lora_B.bias"),
    "modules to save": (change_config(modules_to_save=["lm_head"]), "modules_to_save, got .*lm_head"),
    "a saved module": (put("base_model.model.lm_head.modules_to_save.weight", torch.ones(2, 2)), "modules_to_save"),
    "an embedding": (put("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 2)), "embedding.*embed_tokens"),
    "the head": (put("base_model.model.lm_head.lora_A.weight", torch.ones(4, 16)), "lora_A and lora_B of lm_head, got no lora_B"),
    "experts": (change_config(target_parameters=["mlp.experts.gate_up_proj"]), "target_parameters"),
    "prompt tuning": (change_config(peft_type="PROMPT_TUNING"), "peft_type LORA, got 'PROMPT_TUNING'"),
    "pissa": (change_config(init_lora_weights="pissa_niter_4"), "base's own weights.*pissa_niter_4"),
    "no rank": (change_config(r=0), "a whole number from 1 to 4096 as r, got 0"),
    "alpha": (change_config(lora_alpha="a"), "a number of at most .* as lora_alpha, got 'a'"),
    "alpha, vast": (change_config(lora_alpha=10**400), "a number of at most 1e.09 as lora_alpha, got 1000"),
    "alpha, NaN": (change_config(lora_alpha=float("nan")), "a number of at most .* as lora_alpha, got nan"),
    "rank, vast": (change_config(r=10**9), "a whole number from 1 to 4096 as r, got 1000000000"),
    "index": (
        lambda folder: (folder / "adapter_model.safetensors.index.json").write_text("{}"),
        "all tensors in one file adapter_model.safetensors, got an index of several",
    ),
    "a pattern": (change_config(rank_pattern={"q_proj": 2}), r"rank 2 of model.layers.0.self_attn.q_proj.*\[4, 16\]"),
    "NaN": (spoil(f"{NAME}.lora_A.weight", float("nan")), "finite numbers in .*q_proj.lora_A.weight"),
    "infinity": (spoil(f"{NAME}.lora_B.weight", float("inf")), "finite numbers in .*q_proj.lora_B.weight"),
    "half a pair": (change_tensors(lambda tensors: tensors.pop(f"{NAME}.lora_B.weight")), "q_proj, got no lora_B"),
    "a missing pair": (
        change_tensors(lambda tensors: [tensors.pop(f"{NAME}.lora_{half}.weight") for half in "AB"]),
        "tensors of every q_proj, got none of model.layers.0.self_attn.q_proj",
    ),
    "columns": (
        put(f"{NAME}.lora_A.weight", torch.ones(4, 20)),
        r"\[4, 16\] as model.layers.0.self_attn.q_proj.lora_A.weight, got \[4, 20\] \(the adapter is another base's",
    ),
    "rows": (put(f"{NAME}.lora_B.weight", torch.ones(10, 4)), r"\[16, 4\] as .*q_proj.lora_B.weight, got \[10, 4\]"),
    "integers": (put(f"{NAME}.lora_B.weight", torch.ones(16, 4, dtype=torch.int32)), "floating-point"),
    "another layer": (
        put("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", torch.ones(4, 16)),
        "layers.7.self_attn.q_proj, got no lora_B",
    ),
    "another target": (change_config(target_modules=["q_proj", "w1"]), "target_modules among down_proj, .*got w1"),
    "a target of the head": (change_config(target_modules=["lm_head"]), "lm_head: adapters of the embedding and of the output"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "a JSON object in adapter_config.json"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "a folder with adapter_config.json"),
    "no tensors": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "a file adapter_model.safetensors"),
    "half a file": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0"),
        "a whole file adapter_model.safetensors",
    ),
    "no adapter": (put("base_model.model.model.norm.weight", torch.ones(16)), "lora_A.weight and lora_B.weight.*norm.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(model: Path, bank: AdapterBank, tmp_path: Path, case: str) -> None:
    folder = save_adapter(tmp_path / "adapter", model)
    bank.read(LoRARequest("sql", 1, str(folder)))
    change, words = REFUSED[case]
    change(folder)
    with pytest.raises(ConfigError) as refused:
        bank.read(LoRARequest("sql", 1, str(folder)))
    text = str(refused.value)
    assert "\n" not in text
    assert text.startswith("adapter sql: needs "), text
    assert re.search(words, text), text


def test_a_rank_above_the_slots_is_refused(model: Path, bank: AdapterBank, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", model, rank=9)
    with pytest.raises(ConfigError, match="a rank of at most max_lora_rank=8, got 9"):
        bank.read(LoRARequest("sql", 1, str(folder)))


@pytest.mark.parametrize("path", ["nowhere/at/all", "~nobody-of-this-name/x", "a\0b", "no/such"])
def test_a_folder_that_is_not_there(bank: AdapterBank, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="adapter sql: needs a folder that peft has written"):
        bank.read(LoRARequest("sql", 1, path))


def test_a_pickle_is_never_read(model: Path, bank: AdapterBank, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", model)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="a pickle, which may run any code"):
        bank.read(LoRARequest("sql", 1, str(folder)))


def test_ranks_and_scales_follow_the_patterns(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(
        tmp_path / "a", model, alpha_pattern={"q_proj": 3.0, r"layers\.0\.mlp\..*": 5.0}, use_rslora=True, lora_alpha=8
    )
    scales = {
        module.rpartition(".")[2]: each.scale for module, each in read_folder(LoRARequest("a", 1, str(folder))).low_ranks.items()
    }
    assert scales["q_proj"] == 1.5
    assert scales["up_proj"] == 2.5
    assert scales["k_proj"] == 4.0


def test_a_digest_tells_one_content_from_another(model: Path, bank: AdapterBank, tmp_path: Path) -> None:
    digests = {
        bank.read(LoRARequest("a", 1, str(save_adapter(tmp_path / name, model, seed=seed, lora_alpha=alpha)))).digest
        for name, seed, alpha in (("a", 0, 8), ("b", 1, 8), ("c", 0, 9), ("again", 0, 8))
    }
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_name": ""}, "lora_name: needs a text"),
        ({"lora_int_id": 0}, "lora_int_id: needs a whole number of at least 1, got 0"),
        ({"lora_int_id": True}, "lora_int_id"),
        ({"lora_path": ""}, "lora_path: needs the adapter's folder"),
        ({"tensorizer_config_dict": {"a": 1}}, "tensorizer_config_dict"),
    ],
)
def test_a_request_without_a_name_a_number_or_a_path(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoRARequest(**{"lora_name": "sql", "lora_int_id": 1, "lora_path": "folder", **given})
