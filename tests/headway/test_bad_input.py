"""Bad input gets one clear message and exit code 2: no traceback, nothing on stdout, and a fix that works when it is followed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway import LLM, HeadwayError, SamplingParams
from headway.core.contract.errors import ConfigError, ModelError, PromptError
from headway.models import loader
from sandbox import Result, assert_refused, run_headway

Headway = Callable[..., Result]
Spoil = Callable[[Path], object]

OPTIONS = {
    "max_tokens 0": (["--max-tokens", "0"], ("max_tokens", "at least 1", "got 0")),
    "max_tokens -1": (["--max-tokens", "-1"], ("max_tokens", "at least 1", "got -1")),
    "top_p 0": (["--top-p", "0"], ("top_p", "above 0 and at most 1", "got 0.0")),
    "top_p 1.5": (["--top-p", "1.5"], ("top_p", "above 0 and at most 1", "got 1.5")),
    "top_p nan": (["--top-p", "nan"], ("top_p", "above 0 and at most 1", "got nan")),
    "top_k -2": (["--top-k", "-2"], ("top_k", "at least -1", "got -2")),
    "min_p 2": (["--min-p", "2"], ("min_p", "from 0 to 1", "got 2.0")),
    "temperature nan": (["--temperature", "nan"], ("temperature", "at least 0", "got nan")),
    "temperature inf": (["--temperature", "inf"], ("temperature", "at least 0", "got inf")),
    "temperature -1": (["--temperature", "-1"], ("temperature", "at least 0", "got -1.0")),
    "seed too large": (["--seed", str(2**70), "--temperature", "1"], ("seed", "got 1180591620717411303424")),
    "empty stop": (["--stop", ""], ("stop", "not empty")),
    "block size 12": (["--block-size", "12"], ("block_size", "a multiple of 8", "got 12", "16")),
    "block size 0": (["--block-size", "0"], ("block_size", "at least 1", "got 0")),
    "block size -16": (["--block-size", "-16"], ("block_size", "at least 1", "got -16")),
    "block size text": (["--block-size", "large"], ("block_size", "a multiple of 8", "got 'large'")),
    "max_model_len 0": (["--max-model-len", "0"], ("max_model_len", "at least 1", "got 0")),
    "max_model_len beyond the model": (["--max-model-len", "257"], ("max_model_len", "at most 256", "got 257")),
    "step budget 0": (["--max-num-batched-tokens", "0"], ("max_num_batched_tokens", "at least 1", "got 0")),
    "memory 0": (["--kv-cache-memory", "0"], ("kv_cache_memory", "2GiB", "got '0'")),
    "memory text": (["--kv-cache-memory", "lots"], ("kv_cache_memory", "2GiB", "got 'lots'")),
    "memory nan": (["--kv-cache-memory", "nan"], ("kv_cache_memory", "2GiB", "got 'nan'")),
    "unknown backend": (["--attn-backend", "flsh"], ("'flsh'", "sdpa ", "sdpa.math", "available")),
    "unknown decode backend": (["--attn-backend", "decode=flsh"], ("'flsh'", "sdpa ", "sdpa.math", "available")),
    "empty wish": (["--attn-backend", ""], ("attn_backend", "prefill=NAME,decode=NAME", "got ''")),
    "half a wish": (["--attn-backend", "prefill="], ("attn_backend", "prefill=NAME,decode=NAME", "got 'prefill='")),
    "two names": (["--attn-backend", "sdpa,sdpa.math"], ("attn_backend", "prefill=NAME,decode=NAME", "got 'sdpa,sdpa.math'")),
    "unknown phase": (["--attn-backend", "extend=sdpa"], ("attn_backend", "prefill=NAME,decode=NAME", "got 'extend=sdpa'")),
    "option without a value": (["--attn-opt", "sdpa.splits"], ("--attn-opt", "NAME.key=value", "got 'sdpa.splits'")),
    "option without a backend": (["--attn-opt", "splits=4"], ("--attn-opt", "NAME.key=value", "got 'splits=4'")),
    "option without a key": (["--attn-opt", "sdpa.=4"], ("--attn-opt", "NAME.key=value", "got 'sdpa.=4'")),
    "option of nobody": (["--attn-opt", "flsh.splits=4"], ("'flsh'", "sdpa.math")),
    "unknown option": (["--attn-opt", "sdpa.splits=4"], ("--attn-opt", "an option of sdpa", "got sdpa.splits")),
    "unknown option elsewhere": (["--attn-opt", "sdpa.math.splits=4"], ("--attn-opt", "sdpa.math", "got sdpa.math.splits")),
    "unknown layout": (["--kv-layout", "bhsd"], ("kv_layout", "nhd, hnd, vllm_5d, latent", "got 'bhsd'")),
    "unknown dtype": (["--dtype", "int8"], ("dtype", "float32, bfloat16, float16", "got 'int8'")),
    "unknown model_impl": (["--model-impl", "jax"], ("model_impl", "auto, headway, transformers", "got 'jax'")),
    "deterministic by transformers": (
        ["--model-impl", "transformers", "--deterministic"],
        ("deterministic", "a model that Headway's decoder computes", "not batch-invariant"),
    ),
    "unknown device": (["--device", "tpu"], ("device", "auto or cpu", "got 'tpu'")),
    "no threads": (["--num-threads", "0"], ("num_threads", "at least 1", "got 0")),
    "a budget below nothing": (["--autotune-budget", "-1"], ("autotune_budget", "at least 0", "got -1.0")),
    "unknown cache dtype": (["--kv-cache-dtype", "int4"], ("kv_cache_dtype", "auto or fp8_e4m3", "got 'int4'")),
    "unknown flag": (["--qqq"], ("--qqq", "an option of", "--help lists them")),
    "misspelt flag": (["--attn-backen", "sdpa"], ("--attn-backen", "did you mean --attn-backend?")),
    "a flag of vLLM": (["--attention-backend", "sdpa"], ("--attention-backend", "Headway calls it attn_backend")),
    "another flag of vLLM": (
        ["--pipeline-parallel-size", "2"],
        ("--pipeline-parallel-size", "not supported: tensor_parallel_size"),
    ),
    "a flag of vLLM's server": (["--ssl-keyfile", "x"], ("--ssl-keyfile", "a proxy before the server can speak TLS")),
    "a flag that changes nothing": (["--stream-interval", "4"], ("--stream-interval", "leave it out: it changes no answer")),
    "more ranks than cores": (["--tensor-parallel-size", "4096", "--device", "cpu"], ("tensor_parallel_size", "at most")),
    "no chat template": (["--chat"], ("chat", "chat template", "leave --chat out")),
}

NEEDS_MODEL = (
    *("max_model_len beyond the model", "no chat template", "unknown option", "unknown option elsewhere"),
    "deterministic by transformers",
)
"""Cases that need not be told before a model is read."""

MODEL_FREE = [name for name in OPTIONS if name not in NEEDS_MODEL]


def generate(model: Path | str, *options: str, prompt: str = "the quick fox") -> tuple[str, ...]:
    return ("generate", "--model", str(model), "--max-tokens", "4", *options, prompt)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_bad_option_is_refused(headway: Headway, tiny_model_folder: Path, name: str) -> None:
    options, words = OPTIONS[name]
    assert_refused(headway(*generate(tiny_model_folder, *options)), *words)


@pytest.mark.parametrize("name", MODEL_FREE)
def test_a_bad_option_is_refused_before_a_model_is_looked_for(
    headway: Headway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def find(name: str) -> None:
        raise ModelError("the model was looked for first")

    monkeypatch.setattr(loader, "locate", find)
    options, words = OPTIONS[name]
    assert_refused(headway(*generate(tmp_path, *options)), *words)


def test_the_meta_device_is_refused_by_name(tiny_model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"device: needs a text, got device\(type='meta'\)"):
        LLM(str(tiny_model_folder), device=torch.device("meta"))  # type: ignore[arg-type]
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match="device: needs one that holds numbers, got meta, torch's default"),
    ):
        LLM(str(tiny_model_folder))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_refused(headway: Headway, tiny_model_folder: Path, device: str) -> None:
    assert_refused(
        headway(*generate(tiny_model_folder, "--device", device)), "device", "auto or cpu", f"got {device!r}", "no CUDA device"
    )


@pytest.mark.parametrize(
    "options",
    [["--max-tokens", "many"], ["--temperature", "hot"], ["--seed", "x"]],
    ids=str,
)
def test_an_option_of_the_wrong_kind_is_refused(headway: Headway, tiny_model_folder: Path, options: list[str]) -> None:
    result = headway(*generate(tiny_model_folder, *options))
    assert (result.code, result.out) == (2, "")
    assert options[0] in result.err
    assert "Usage: " in result.err


@pytest.mark.parametrize("arguments", [("generate",), ("no_such_command",)], ids=str)
def test_unknown_chat_command_is_refused(headway: Headway, arguments: tuple[str, ...]) -> None:
    result = headway(*arguments)
    assert (result.code, result.out) == (2, "")
    assert "Usage: " in result.err


# Prompts, and pools that are too small


def test_an_empty_prompt_is_refused(headway: Headway, tiny_model_folder: Path) -> None:
    assert_refused(headway(*generate(tiny_model_folder, prompt="")), "prompt", "at least one", "empty")


def test_a_prompt_without_a_single_known_character_is_refused(headway: Headway, tiny_model_folder: Path) -> None:
    assert_refused(headway(*generate(tiny_model_folder, prompt="\u6f22\u5b57")), "prompt", "at least one token", "empty")


def test_a_prompt_beyond_max_model_len_is_refused_and_its_hint_works(headway: Headway, tiny_model_folder: Path) -> None:
    prompt = "fox " * 20
    refused = headway(*generate(tiny_model_folder, "--max-model-len", "8", prompt=prompt))
    assert_refused(refused, "prompt", "at most 7 tokens", "max_model_len=8", "raise max_model_len")
    (length,) = re.findall(r"got (\d+) tokens", refused.err)
    assert headway(*generate(tiny_model_folder, "--max-model-len", str(int(length) + 1), prompt=prompt)).code == 0


def test_raising_max_model_len_is_no_hint_where_the_model_ends(headway: Headway, tiny_model_folder: Path) -> None:
    refused = headway(*generate(tiny_model_folder, prompt="fox " * 300))
    assert_refused(refused, "prompt", "at most 255 tokens", "shorten it")
    assert "raise max_model_len" not in refused.err


def test_a_prompt_beyond_what_the_pool_holds_is_told_to_raise_the_pool(headway: Headway, tiny_model_folder: Path) -> None:
    refused = headway(*generate(tiny_model_folder, "--kv-cache-memory", "20KiB", prompt="fox " * 100))
    assert_refused(refused, "prompt", "at most 79 tokens", "kv_cache_memory")
    assert headway(*generate(tiny_model_folder, "--kv-cache-memory", "200KiB", prompt="fox " * 100)).code == 0


def test_a_pool_too_small_for_one_sequence_is_refused_and_both_its_hints_work(headway: Headway, tiny_model_folder: Path) -> None:
    refused = headway(*generate(tiny_model_folder, "--kv-cache-memory", "20KiB", "--max-model-len", "200"))
    assert_refused(refused, "kv_cache_memory", "max_model_len=200", "room for 80 tokens")
    (fits,) = re.findall(r"set max_model_len to at most (\d+)", refused.err)
    assert headway(*generate(tiny_model_folder, "--kv-cache-memory", "20KiB", "--max-model-len", fits)).code == 0
    (need,) = re.findall(r"needs ([\d.]+ \w+) for one sequence", refused.err)
    followed = headway(*generate(tiny_model_folder, "--kv-cache-memory", need, "--max-model-len", "200"))
    assert followed.code == 0, followed


@pytest.mark.parametrize("options", [[], ["--max-model-len", "64"]], ids=["auto", "64"])
def test_a_pool_too_small_for_one_block_says_how_much_it_takes(
    headway: Headway, tiny_model_folder: Path, options: list[str]
) -> None:
    refused = headway(*generate(tiny_model_folder, "--kv-cache-memory", "1KiB", *options))
    assert_refused(refused, "kv_cache_memory", "raise kv_cache_memory")
    need, got = re.search(r"needs ([\d.]+ \w+) .*got ([\d.]+ \w+)", refused.err).groups()
    assert need != got
    followed = headway(*generate(tiny_model_folder, "--kv-cache-memory", need, *options))
    assert followed.code == 0, followed


# Backends that cannot


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("other_machine", ("GPU: needs compute capability 9.0, got no GPU", "run it on a Hopper GPU")),
        ("other_model", ("dtype: needs float16, got float32", "head_dim: needs 64 or 128, got 8")),
        ("prefill=sdpa,decode=other_machine", ("GPU: needs compute capability 9.0, got no GPU",)),
        ("toy.decode", ("phase: needs decode, got prefill", "phase: needs decode, got extend")),
    ],
)
def test_a_backend_that_cannot_is_refused_with_reasons_and_a_fix_that_works(
    headway: Headway, tiny_model_folder: Path, wish: str, words: tuple[str, ...]
) -> None:
    refused = headway(*generate(tiny_model_folder, "--attn-backend", wish))
    assert_refused(refused, "cannot be used here", *words)
    (fix,) = re.findall(r"nearest fix: (.+)", refused.err)
    followed = headway(*generate(tiny_model_folder, *fix.split(), "--stats"))
    assert followed.code == 0, followed
    if wish == "toy.decode":
        assert "decode=toy.decode" in followed.err


@pytest.mark.usefixtures("plugins")
def test_a_backend_that_does_not_load_is_refused_with_what_installs_it(headway: Headway, tiny_model_folder: Path) -> None:
    refused = headway(*generate(tiny_model_folder, "--attn-backend", "missing_library"))
    assert_refused(refused, "missing_library", "No module named 'libkernel'")
    assert "pip install 'libkernel>=2'" in refused.err


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("option", [["--kv-layout", "nhd"], ["--block-size", "16"]], ids=lambda option: option[0])
def test_a_layout_or_block_size_that_the_backend_cannot_read_is_refused(
    headway: Headway, tiny_model_folder: Path, option: list[str]
) -> None:
    wish = ["--attn-backend", "decode=toy.decode"]
    refused = headway(*generate(tiny_model_folder, *wish, *option))
    assert_refused(refused, option[0].strip("-").replace("-", "_"), "needs", f"got {option[1]}")
    (fix,) = re.findall(r"nearest fix: (.+)", refused.err)
    followed = headway(*generate(tiny_model_folder, *fix.split(), "--stats"))
    assert "decode=toy.decode; kv_layout=hnd, block_size=64" in followed.err, followed


@pytest.mark.usefixtures("plugins")
def test_a_backend_that_raises_is_refused_by_its_self_test_and_named_in_a_step(
    headway: Headway, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = generate(tiny_model_folder, "--attn-backend", "prefill=failing,decode=sdpa")
    refused = headway(*command)
    assert_refused(refused, "attention backend failing", "self-test", "the kernel fell over", "HEADWAY_SKIP_SELF_TEST=1")
    monkeypatch.setenv("HEADWAY_SKIP_SELF_TEST", "1")
    refused = headway(*command)
    assert_refused(refused, "backend failing failed in prefill", "layer 0", "RuntimeError: the kernel fell over")


# Models


def edit_config(**changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return spoil


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def write(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50_000])


BLOOM = json.dumps({"model_type": "bloom", "architectures": ["BloomForCausalLM"]})
VIT = json.dumps({"model_type": "vit", "architectures": ["ViTForImageClassification"]})
T5 = json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True})
MAMBA = json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
OLMO = json.dumps({"model_type": "olmo", "architectures": ["OlmoForCausalLM"], **SIZES})
INDEX = json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}})
NORM = "model.norm.weight"

MODELS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "no config": (remove("config.json"), ("needs a config.json", "got none")),
    "broken config": (write("config.json", "{"), ("config.json cannot be used", "not a valid JSON")),
    "config of nothing": (write("config.json", "{}"), ("config.json cannot be used", "model_type")),
    "unknown architecture": (
        edit_config(model_type="own", architectures=["Own"]),
        ("needs one of", "LlamaFor", "got Own"),
    ),
    "an attention of its own": (write("config.json", BLOOM), ("BloomForCausalLM", "ignores transformers' attention interface")),
    "a state of its own": (write("config.json", MAMBA), ("MambaForCausalLM", "keeps a state of each sequence")),
    "an encoder with a decoder": (write("config.json", T5), ("needs causal attention", "is_encoder_decoder=true")),
    "a model of images": (write("config.json", VIT), ("ViTForImageClassification", "generates none")),
    "another architecture's weights": (write("config.json", OLMO), ("lm_head.weight", "[50304, 32]", "got [300, 32]")),
    "hidden_act": (edit_config(hidden_act="gleu"), ("transformers cannot make it", "gleu")),
    "rope_type": (
        edit_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        ("transformers cannot make it", "spiral"),
    ),
    "text for a number": (edit_config(num_attention_heads="four"), ("config.json cannot be used", "num_attention_heads", "four")),
    "bitsandbytes": (
        edit_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("quantised with bitsandbytes, 4 bits", "unquantised"),
    ),
    "AWQ": (edit_config(quantization_config={"quant_method": "awq", "bits": 4}), ("group_size needs -1 or 16", "got None")),
    "adapter": (
        write("adapter_config.json", '{"base_model_name_or_path": "org/base"}'),
        ("an adapter (LoRA) for org/base", "merge"),
    ),
    "embedding model": (edit_config(architectures=["LlamaModel"]), ("got LlamaModel", "generates no text")),
    "custom code": (
        edit_config(model_type="own", architectures=["OwnForCausalLM"], auto_map={"AutoConfig": "own.Config"}),
        ("LlamaForCausalLM", "got OwnForCausalLM", "auto_map", "code of its own, which Headway never runs"),
    ),
    "tokenizer with custom code": (
        write("tokenizer_config.json", '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}'),
        ("the tokenizer needs code of the model's own", "never runs"),
    ),
    "another vocabulary": (edit_config(vocab_size=301), ("embed_tokens.weight needs shape [301, 32]", "got [300, 32]")),
    "heads that do not divide": (edit_config(num_key_value_heads=3), ("a multiple of num_key_value_heads=3", "got 4")),
    "int8 weights": (
        edit_tensors(lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)})),
        (NORM, "got int8", "quantised"),
    ),
    "no safetensors": (remove("model.safetensors"), ("no .safetensors file",)),
    "a pickle": (pickle, ("no .safetensors file", "pytorch_model.bin", "may run code", "never opens")),
    "truncated safetensors": (truncate, ("model.safetensors cannot be read", "truncated", "fetch it again")),
    "missing shard": (
        write("model.safetensors.index.json", INDEX),
        ("lacks model-00002-of-00002.safetensors", "index.json names"),
    ),
    "broken index": (write("model.safetensors.index.json", "[]"), ("index.json is not a safetensors index",)),
    "missing tensor": (edit_tensors(lambda tensors: tensors.pop(NORM)), ("no tensor", NORM)),
    "wrong shape": (
        edit_tensors(lambda tensors: tensors.update({NORM: torch.ones(31)})),
        (NORM, "needs shape [32]", "got [31]"),
    ),
    "left-over tensors": (
        edit_tensors(lambda tensors: tensors.update({"model.layers.0.router.weight": torch.ones(3)})),
        ("1 tensors", "does not use", "model.layers.0.router.weight"),
    ),
    "no tokenizer": (remove("tokenizer.json"), ("the tokenizer cannot be read",)),
    "broken tokenizer": (write("tokenizer.json", "{"), ("the tokenizer cannot be read",)),
    "a chat template of bytes": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"caf\xe9"),
        ("the chat template chat_template.jinja cannot be read", "UnicodeDecodeError"),
    ),
    "broken generation config": (
        write("generation_config.json", "{"),
        ("generation_config.json: needs a JSON object, got a text that is not JSON",),
    ),
    "generation config of another kind": (write("generation_config.json", "[]"), ("generation_config.json",)),
    "end of text by name": (
        write("generation_config.json", '{"eos_token_id": "<eos>"}'),
        ("generation_config.json", "eos_token_id"),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_spoiled_model_is_refused(headway: Headway, model_copy: Path, name: str) -> None:
    spoil, words = MODELS[name]
    spoil(model_copy)
    refused = headway(*generate(model_copy))
    assert_refused(refused, *words)
    assert refused.err.count("\n") == 1


@pytest.mark.parametrize(
    "name",
    [
        *("int8 weights", "no safetensors", "truncated safetensors", "missing shard", "broken index", "missing tensor"),
        *("wrong shape", "left-over tensors", "another architecture's weights"),
    ],
)
def test_spoiled_weights_are_refused_by_transformers_too(headway: Headway, model_copy: Path, name: str) -> None:
    spoil, words = MODELS[name]
    spoil(model_copy)
    refused = headway(*generate(model_copy, "--model-impl", "transformers"))
    assert_refused(refused, *words)
    assert refused.err.count("\n") == 1


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "mish"}, ("hidden_act", "needs one of silu", "got mish")),
        ({"rope_parameters": DYNAMIC}, ("rope_type", "needs default", "got dynamic")),
    ],
    ids=["hidden_act", "rope_type"],
)
def test_what_the_decoder_does_not_compute_is_left_to_transformers_or_refused(
    headway: Headway, model_copy: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    caplog.set_level("INFO", "headway")
    edit_config(**change)(model_copy)
    assert_refused(headway(*generate(model_copy, "--model-impl", "headway")), *words)
    adapted = headway(*generate(model_copy, "--stats"))
    assert adapted.code == 0, adapted
    assert "model: computed by transformers" in adapted.err
    assert all(word in caplog.text for word in words)


@pytest.mark.parametrize("name", ["smollm3", "./smollm2", "../models/smollm2", "/no/such/folder", ""], ids=repr)
def test_an_unknown_model_is_refused(headway: Headway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    refused = headway(*generate(name))
    assert_refused(refused, "model", name, "smollm2", ".gguf", "hub id")
    assert refused.err.count("\n") == 1


# The same from Python


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path) -> LLM:
    return LLM(str(tiny_model_folder), kv_cache_memory="1MiB")


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("", "prompt 0: needs at least one token"),
        ([], None),
        ([[]], "prompt 0: needs at least one token"),
        (["fine", ""], "prompt 1: needs at least one token"),
        ([[1], [2, 300]], "prompt 1: needs token ids from 0 to 299, got 300"),
        ([[1], [-1]], "prompt 1: needs token ids from 0 to 299, got -1"),
        ([[1], [7] * 256], "prompt 1: needs at most 255 tokens .*got 256"),
    ],
    ids=["empty", "none", "no ids", "second empty", "beyond the vocabulary", "negative", "too long"],
)
def test_a_bad_prompt_is_found_before_anything_runs(llm: LLM, prompts: Any, words: str | None) -> None:
    if words is None:
        assert llm.generate(prompts, use_tqdm=False) == []
    else:
        with pytest.raises(PromptError, match=words):
            llm.generate(prompts, use_tqdm=False)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("prompts", [None, 5, [None], [1.5], [["a"]], [1, "a"]], ids=repr)
def test_what_is_no_prompt_is_refused_with_what_is(llm: LLM, prompts: Any) -> None:
    with pytest.raises(PromptError, match="prompt"):
        llm.generate(prompts, use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_the_longest_prompt_gets_one_token(llm: LLM) -> None:
    (output,) = llm.generate([[7] * 255], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": True},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"top_p": None},
        {"top_k": 1.5},
        {"seed": 0.5},
        {"seed": 2**64},
        {"seed": -(2**64)},
        {"stop": [""]},
        {"stop": [3]},
        {"stop": 3},
        {"stop": ".", "detokenize": False},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": 3},
        {"min_tokens": 17},
        {"min_tokens": -1},
        {"best_of": 1, "n": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -3},
        {"frequency_penalty": float("nan")},
        {"logit_bias": {3: 101}},
        {"logit_bias": {-3: 1}},
        {"logit_bias": [3]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": 3},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words_token_ids": [[]]},
        {"logits_processors": [3]},
        {"logprobs": -2},
        {"logprobs": True},
        {"prompt_logprobs": 1.5},
        {"structured_outputs": {"regex": "a"}},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"extra_args": []},
        {"use_beam_search": True},
        {"max_token": 3},
    ],
    ids=str,
)
def test_bad_sampling_params_are_refused_when_they_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: needs "):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    "asked", [{"seed": -1}, {"spaces_between_special_tokens": False}, {"spaces_between_special_tokens": True}], ids=str
)
def test_values_of_vllms_that_ask_for_nothing_are_taken(asked: dict[str, Any]) -> None:
    assert SamplingParams(**asked) == SamplingParams()


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 12},
        {"block_size": "16"},
        {"block_size": True},
        {"max_num_seqs": 0},
        {"max_model_len": 100.0},
        {"kv_cache_memory": -1},
        {"kv_cache_memory": "2 lots"},
        {"max_num_batched_tokens": 10, "enable_chunked_prefill": False, "max_model_len": 100},
        {"kv_layout": "bhsd"},
        {"dtype": "int8"},
        {"seed": 2**70},
        {"seed": "x"},
        {"num_threads": 0},
        {"attn_backen": "sdpa"},
        {"tensor_parallel_size": 0},
        {"kv_cache_dtype": "fp8_e9"},
        {"model_": "x"},
    ],
    ids=str,
)
def test_bad_arguments_of_llm_are_refused_by_name(tiny_model_folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: needs "):
        LLM(str(tiny_model_folder), **wrong)


def test_an_unknown_argument_of_llm_gets_the_nearest_of_ours() -> None:
    for name, words in {
        "attn_backen": "did you mean attn_backend?",
        "max_model_length": "did you mean max_model_len?",
        "pipeline_parallel_size": "not supported: tensor_parallel_size cuts a model over GPUs",
        "frobnicate": "docs/options.md lists them",
    }.items():
        with pytest.raises(ConfigError, match=f"^{name}: needs an option of LLM, got '{name}'.*{re.escape(words)}"):
            LLM("no such model", **{name: 2})


def test_every_error_is_a_headway_error() -> None:
    assert issubclass(ConfigError, HeadwayError)
    assert issubclass(ModelError, HeadwayError)
    assert issubclass(ConfigError, ValueError)


# In processes of their own: one case of each kind


ALONE = [
    "option",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("backend", "model", "hub", "truncated", "decode only")),
]


@pytest.mark.parametrize("kind", ALONE)
def test_python_m_headway_ends_with_one_message_and_code_2(
    tiny_model_folder: Path, tmp_path: Path, plugins: Path, kind: str
) -> None:
    spoiled = Path(shutil.copytree(tiny_model_folder, tmp_path / "spoiled"))
    truncate(spoiled)
    arguments, words = {
        "option": (generate(tiny_model_folder, "--temperature", "nan"), ("temperature", "got nan")),
        "backend": (generate(tiny_model_folder, "--attn-backend", "flsh"), ("'flsh'", "sdpa.math", "unavailable: GPU")),
        "model": (generate("smollm3"), ("'smollm3'", "smollm2")),
        "hub": (generate("no-such/model"), ("no-such/model", "cannot be reached")),
        "truncated": (generate(spoiled), ("truncated", "fetch it again")),
        "decode only": (generate(tiny_model_folder, "--attn-backend", "toy.decode"), ("nearest fix: --attn-backend",)),
    }[kind]
    assert_refused(run_headway(*arguments, plugins=plugins, cwd=tmp_path), *words)
