"""Tests that unusable model folders are refused before a weight is read, with a one-line cause; and of end-of-text tokens."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from engine_logits import logits_by_transformers, observed, save_random
from headway import LLM, SamplingParams, StructuredOutputsParams
from headway.core.chat.template import token_after_answer
from headway.core.contract.errors import ModelError
from headway.core.engine.data.config import EngineConfig
from headway.core.select.request import LayerSpecs
from headway.models.checkpoints.checkpoint import check_folder
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.tokenizer import read_tokenizer
from headway.models.checkpoints.weights import Weights
from headway.models.layers.decoder import Decoder
from headway.models.loader import LoadedModel, load_model, read_config
from headway.registry import Registry
from headway.server.options import ServerOptions
from plain_models import sizes
from sandbox import save_tiny_model
from server_thread import running
from tiny_engine import made_engine

LLAMA: dict[str, Any] = sizes(300, 32, 64, 2, model_type="llama", architectures=["LlamaForCausalLM"])


def write(folder: Path, name: str = "config.json", **content: object) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_config(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plain_checkpoint_is_accepted_with_or_without_its_architecture(tmp_path: Path) -> None:
    check_folder(write(tmp_path, **LLAMA))
    check_folder(write(tmp_path, **{**LLAMA, "architectures": None, "quantization_config": None, "sliding_window": None}))


def test_a_folder_with_a_gguf_file_alone_is_told_that_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "small-Q4_K_M.gguf").touch()
    assert refused(tmp_path).endswith(f"got none; a .gguf file is named itself, such as {tmp_path / 'small-Q4_K_M.gguf'}")


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


@pytest.mark.parametrize("scheme", [SCHEME, {**SCHEME, "dynamic": False, "observer": "minmax"}], ids=["short", "long"])
def test_a_checkpoint_whose_cache_alone_is_quantised_is_accepted(tmp_path: Path, scheme: dict[str, Any]) -> None:
    only_cache = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    assert read_quantization(tmp_path, {"quantization_config": only_cache}) is None
    for change in ({"num_bits": 4}, {"type": "int"}, {"strategy": "attn_head"}, {"dynamic": True}):
        other = {**only_cache, "kv_cache_scheme": {**scheme, **change}}
        with pytest.raises(ModelError, match="needs an fp8 cache with a scale for each layer"):
            read_quantization(tmp_path, {"quantization_config": other})


def test_modelopts_file_may_tell_of_the_cache_alone(tmp_path: Path) -> None:
    write(tmp_path, "hf_quant_config.json", quantization={"quant_algo": None, "kv_cache_quant_algo": "FP8"})
    assert read_quantization(tmp_path, {}) is None
    write(tmp_path, "hf_quant_config.json", quantization={"quant_algo": None, "kv_cache_quant_algo": "NVFP4"})
    with pytest.raises(ModelError, match="got 'NVFP4' for its cache"):
        read_quantization(tmp_path, {})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_weights_that_are_no_plain_numbers_are_refused_when_they_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.ones(2).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"a needs float32, bfloat16 or float16 elements, got {str(dtype)[6:]}: .*quantised"):
        Weights(tmp_path, torch.float32, torch.device("cpu")).take("a", (2,))


@pytest.mark.parametrize("with_config", [True, False])
def test_an_adapter_is_refused_with_its_base_model(tmp_path: Path, with_config: bool) -> None:
    if with_config:
        write(tmp_path, **LLAMA)
    text = refused(write(tmp_path, "adapter_config.json", base_model_name_or_path="Qwen/Qwen3-0.6B", peft_type="LORA"))
    assert "needs a whole model, got an adapter (LoRA) for Qwen/Qwen3-0.6B" in text
    assert "merge_and_unload" in text


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("LlamaBidirectionalModel", "bidirectional"),
        ("LlamaEncoderModel", "bidirectional"),
        ("LlamaModel", "embedding"),
        ("LlamaForSequenceClassification", "scores texts"),
        ("Qwen2ForCausalLM", "got Qwen2ForCausalLM"),
    ],
)
def test_an_architecture_that_is_not_the_decoders_is_refused(tmp_path: Path, architecture: str, words: str) -> None:
    text = refused(write(tmp_path, **{**LLAMA, "architectures": [architecture]}))
    assert "needs LlamaForCausalLM for model_type llama" in text
    assert f"got {architecture}" in text
    assert words in text


@pytest.mark.parametrize("key", [{"is_causal": False}, {"use_bidirectional_attention": True}], ids=str)
def test_a_bidirectional_model_is_refused_by_its_switch(tmp_path: Path, key: dict[str, bool]) -> None:
    assert "needs causal attention" in refused(write(tmp_path, **LLAMA, **key))


def test_an_embedding_model_is_refused_by_its_files(tmp_path: Path) -> None:
    (write(tmp_path, **LLAMA) / "modules.json").write_text("[]")
    assert "got an embedding model by its modules.json" in refused(tmp_path)


def test_code_of_the_models_own_is_never_run_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*arguments: object) -> str:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr("builtins.input", ask)
    code = "raise SystemExit('the code of the model was run')"
    (tmp_path / "custom.py").write_text(code)
    auto_map = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    folder = write(tmp_path, **LLAMA, auto_map=auto_map)
    assert read_config(folder).hidden_size == read_config(folder, plain=False).hidden_size == 32
    text = refused(write(tmp_path, model_type="custom", architectures=["CustomForCausalLM"], auto_map=auto_map))
    assert "got CustomForCausalLM" in text


LAYERS, VOCAB = 2, 53
CONFIG = LlamaConfig(**sizes(VOCAB, 32, 48, LAYERS, 2, 1, initializer_range=0.2))
NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "ModelOpt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "both at once": ("self_attn.kv_scale", "self_attn.kv_scale"),
}


def add(folder: Path, names: tuple[str, ...], scales: list[float]) -> None:
    """Scales to the layers of a saved model, and the note that its cache is quantised."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer in range(LAYERS):
        for name, scale in zip(names, scales, strict=True):
            tensors[f"model.layers.{layer}.{name}"] = torch.tensor([scale * (layer + 1)])
    save_file(tensors, path)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config))


def load(folder: Path) -> Decoder:
    return load_model(str(folder), "float32", skip_tokenizer_init=True).decoder


@pytest.mark.parametrize("way", NAMES)
def test_scales_are_read_and_used(tmp_path: Path, registry: Registry, way: str) -> None:
    reference = save_random(CONFIG, tmp_path)
    for layer in reference.model.layers:  # values that fp8 holds only with the scale
        layer.self_attn.v_proj.weight.data *= 1e4
        layer.self_attn.o_proj.weight.data /= 1e4
    reference.save_pretrained(tmp_path)
    add(tmp_path, NAMES[way], [100.0, 100.0])
    decoder = load(tmp_path)
    assert decoder.kv_scales == [(100.0, 100.0), (200.0, 200.0)]
    stored = LayerSpecs.of(decoder, "fp8_e4m3", decoder.kv_scales).cached
    assert [(spec.k_scale, spec.v_scale) for spec in stored] == decoder.kv_scales
    assert {spec.k_scale for spec in LayerSpecs.of(decoder, "auto", decoder.kv_scales).cached} == {1.0}
    prompt = random.Random(0).choices(range(VOCAB), k=20)
    errors = []
    for scales in (decoder.kv_scales, None):
        config = EngineConfig(block_size=8, kv_cache_memory=2**18, max_model_len=64, kv_cache_dtype="fp8_e4m3")
        layers = LayerSpecs.of(decoder, "fp8_e4m3", scales)
        engine = made_engine(decoder, registry, config, layers=layers)
        ((tokens, logits, _),) = observed(engine, [prompt], 8)
        expected = logits_by_transformers(reference, prompt, tokens)
        errors.append(float((logits - expected).norm() / expected.norm()))
    assert errors[0] < 0.1 < 0.3 < errors[1], errors


@pytest.mark.parametrize(
    ("names", "scales", "words"),
    [
        (("self_attn.k_scale",), [0.5], r"model\.layers\.0\. has a k_scale for its cache, but no v_scale"),
        (("self_attn.v_proj.v_scale",), [0.5], r"has a v_scale for its cache, but no k_scale"),
        (NAMES["compressed-tensors"], [0.5, -1.0], r"layers\.0\.self_attn\.v_scale needs a number above 0, got -1\.0"),
        (NAMES["compressed-tensors"], [float("inf"), 1.0], r"layers\.0\.self_attn\.k_scale needs a number above 0, got inf"),
    ],
)
def test_impossible_scales_are_refused(tmp_path: Path, names: tuple[str, ...], scales: list[float], words: str) -> None:
    save_random(CONFIG, tmp_path)
    add(tmp_path, names, scales)
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def test_a_model_without_scales_has_ones(tmp_path: Path) -> None:
    save_random(CONFIG, tmp_path)
    assert load(tmp_path).kv_scales == [(1.0, 1.0)] * LAYERS


SPECIAL = ["<|im_start|>", "<|im_end|>", "<|return|>", "<|user|>", "<|assistant|>", "<pad>"]
"""With the ids 1 to 6, after <eos>."""
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LAST_DIFFERS = "{% for m in messages %}<|user|>{{ m.content }}{{ '<|return|>' if loop.last else '<|im_end|>' }}{% endfor %}"
HEADERS = "{% for m in messages %}{{ '<|' + m.role + '|>' }}\n{{ m.content | trim }}{% endfor %}"
SPACED = "{% for m in messages %}[{{ m.content }} {{ '<|im_end|>' }}]{% endfor %}"
WORDS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n###{% endfor %}<|im_end|>"
REFUSES = "{{ raise_exception('no conversations today') }}<|im_end|>"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("made"), special=SPECIAL)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A model whose files name no end-of-text token yet; each change of a file starts from this model."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return write_model(tmp_path, config={"eos_token_id": None}, generation_config={}, tokenizer_config={"eos_token": None})


def write_model(folder: Path, **files: dict[str, Any] | None) -> Path:
    """Change values of files; None removes the file."""
    for name, values in files.items():
        path = folder / f"{name}.json"
        kept = json.loads(path.read_text()) if name != "generation_config" else {}
        path.unlink()
        if values is not None:
            path.write_text(json.dumps({**kept, **values}))
    return folder


def load_llm(folder: Path, **options: Any) -> LoadedModel:
    return load_model(str(folder), device="cpu", load_format="dummy", **options)


def test_all_sources_are_united_and_told_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_llm(folder).eos_token_ids == frozenset()
    write_model(
        folder, config={"eos_token_id": [9]}, generation_config={"eos_token_id": 8}, tokenizer_config={"eos_token": "<eos>"}
    )
    (folder / "chat_template.jinja").write_text(CHATML)
    with caplog.at_level(logging.INFO, "headway"):
        assert load_llm(folder).eos_token_ids == {0, 2, 8, 9}
    (line,) = [record.getMessage() for record in caplog.records if "end-of-text tokens" in record.getMessage()]
    for told in ("0 '<eos>' (tokenizer)", "2 '<|im_end|>' (chat template)", "8 ", "(generation_config.json)", "(config.json)"):
        assert told in line
    assert load_llm(folder, skip_tokenizer_init=True).eos_token_ids == {8, 9}
    assert load_llm(folder, model_impl="transformers").eos_token_ids == {0, 2, 8, 9}


def test_a_token_that_several_places_name_counts_once(folder: Path) -> None:
    write_model(
        folder,
        config={"eos_token_id": 2},
        generation_config={"eos_token_id": [2, 2]},
        tokenizer_config={"eos_token": "<|im_end|>"},
    )
    assert load_llm(folder).eos_token_ids == {2}


@pytest.mark.parametrize(
    ("template", "token"),
    [(CHATML, 2), (LAST_DIFFERS, 3), (HEADERS, 4), (SPACED, 2), (WORDS, None), (REFUSES, None), ("{% broken", None)],
)
def test_the_control_token_after_an_answer(made: Path, template: str, token: int | None) -> None:
    tokenizer = read_tokenizer(made)
    assert token_after_answer(tokenizer) is None, "there is no template"
    assert token_after_answer(tokenizer, template) == token
    tokenizer.chat_template = template
    assert token_after_answer(tokenizer) == token


@pytest.mark.parametrize("value", ["<eos>", 2.0, True, -1, [[2]], [2, None], {"id": 2}, [False]], ids=str)
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_what_is_no_token_id_is_refused_with_the_file(folder: Path, file: str, value: object) -> None:
    write_model(folder, **{file: {"eos_token_id": value}})
    with pytest.raises(ModelError, match=rf"{file}\.json.*eos_token_id|eos_token_id.*{file}\.json"):
        load_llm(folder)


def test_tokens_beyond_the_vocabulary_are_left_out_with_a_word(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(folder, config={"eos_token_id": [2, 10**30]}, generation_config={"eos_token_id": []})
    write_model(folder, tokenizer_config={"eos_token": "<not in the vocabulary>"})
    assert load_llm(folder).eos_token_ids == {2}
    assert caplog.text.count("outside the vocabulary") == 2


def test_the_default_of_a_class_counts_only_where_nothing_is_named(folder: Path) -> None:
    kept = json.loads((folder / "config.json").read_text())
    del kept["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(kept))
    assert load_llm(folder).eos_token_ids == {2}, "that of LlamaConfig"
    write_model(folder, generation_config={"eos_token_id": 8})
    assert load_llm(folder).eos_token_ids == {8}, "2 may be any word of this vocabulary"
    write_model(folder, generation_config={"eos_token_id": None})
    assert load_llm(folder).eos_token_ids == frozenset()


def test_an_answer_ends_at_the_token_after_a_turn(folder: Path) -> None:
    """Also with draft tokens and after structured output; with ignore_eos the response goes on."""
    write_model(folder, config={"eos_token_id": 8}, tokenizer_config={"eos_token": "<eos>"})
    (folder / "chat_template.jinja").write_text(CHATML)
    llm = LLM(str(folder), kv_cache_memory="8MiB", num_threads=1, speculate="suffix")

    def ended(**more: Any) -> tuple[list[int], str | None, object]:
        params = SamplingParams(temperature=0, max_tokens=5, logit_bias={2: 100.0}, **more)
        (output,) = llm.chat([{"role": "user", "content": "the fox"}], params, use_tqdm=False)[0].outputs
        return output.token_ids, output.finish_reason, output.stop_reason

    assert ended() == ([2], "stop", None)
    assert ended(ignore_eos=True) == ([2] * 5, "length", None)
    assert ended(stop_token_ids=[2], ignore_eos=True) == ([2], "stop", 2)
    tokens, reason, _ = ended(min_tokens=3)
    assert (len(tokens), tokens[-1], reason) == (4, 2, "stop")
    assert not set(tokens[:-1]) & {0, 2, 8}
    tokens, reason, _ = ended(structured_outputs=StructuredOutputsParams(choice=["the"]))
    assert (tokens[-1], reason, llm.get_tokenizer().decode(tokens[:-1])) == (2, "stop", "the")
    with running(llm, ServerOptions(chat_template=HEADERS)) as served:
        body = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 5, "temperature": 0}
        for biased, ignored, expected in ((2, False, "stop"), (4, False, "stop"), (4, True, "length")):
            asked = {**body, "logit_bias": {biased: 100}, "ignore_eos": ignored}
            answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=30).json()
            assert answer["choices"][0]["finish_reason"] == expected
