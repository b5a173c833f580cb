"""Bad input gets one clear message and exit code 2: no traceback, nothing on stdout, and a fix that works when it is followed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from headway import LLM, SamplingParams
from headway.core.contract.errors import ConfigError, HeadwayError, ModelError, PromptError, UnsupportedError
from headway.models import loader
from plain_models import GEMMA4
from sandbox import Result, assert_refused, run_headway

Headway = Callable[..., Result]
Spoil = Callable[[Path], object]

OPTIONS = {
    "max_tokens 0": (["--max-tokens", "0"], ("max_tokens", "at least 1", "got 0")),
    "top_p nan": (["--top-p", "nan"], ("top_p", "above 0 and at most 1", "got nan")),
    "temperature -1": (["--temperature", "-1"], ("temperature", "at least 0", "got -1.0")),
    "seed too large": (["--seed", str(2**70), "--temperature", "1"], ("seed", "got 1180591620717411303424")),
    "block size 12": (["--block-size", "12"], ("block_size", "a multiple of 8", "got 12", "16")),
    "block size text": (["--block-size", "large"], ("block_size", "a multiple of 8", "got 'large'")),
    "max_model_len beyond the model": (["--max-model-len", "257"], ("max_model_len", "at most 256", "got 257")),
    "memory text": (["--kv-cache-memory", "lots"], ("kv_cache_memory", "2GiB", "got 'lots'")),
    "unknown backend": (["--attn-backend", "flsh"], ("'flsh'", "sdpa ", "sdpa.math", "available")),
    "empty wish": (["--attn-backend", ""], ("attn_backend", "prefill=NAME,decode=NAME", "got ''")),
    "unknown phase": (["--attn-backend", "extend=sdpa"], ("attn_backend", "prefill=NAME,decode=NAME", "got 'extend=sdpa'")),
    "option without a value": (["--attn-opt", "sdpa.splits"], ("--attn-opt", "NAME.key=value", "got 'sdpa.splits'")),
    "option of nobody": (["--attn-opt", "flsh.splits=4"], ("'flsh'", "sdpa.math")),
    "unknown option": (["--attn-opt", "sdpa.splits=4"], ("--attn-opt", "an option of sdpa", "got sdpa.splits")),
    "unknown layout": (["--kv-layout", "bhsd"], ("kv_layout", "nhd, hnd, vllm_5d, latent", "got 'bhsd'")),
    "unknown dtype": (["--dtype", "int8"], ("dtype", "float32, bfloat16, float16", "got 'int8'")),
    "unknown model_impl": (["--model-impl", "jax"], ("model_impl", "auto, headway, transformers", "got 'jax'")),
    "deterministic by transformers": (
        ["--model-impl", "transformers", "--deterministic"],
        ("deterministic", "a model that Headway's decoder computes", "not batch-invariant"),
    ),
    "unknown device": (["--device", "tpu"], ("device", "auto or cpu", "got 'tpu'")),
    "a budget below nothing": (["--autotune-budget", "-1"], ("autotune_budget", "at least 0", "got -1.0")),
    "unknown cache dtype": (["--kv-cache-dtype", "int4"], ("kv_cache_dtype", "auto or fp8_e4m3", "got 'int4'")),
    "unknown flag": (["--qqq"], ("--qqq", "an option of", "--help lists them")),
    "a short flag of vLLM's": (["-tp", "2"], ("-tp", "an option of", "did you mean --tensor-parallel-size?")),
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

NEEDS_MODEL = (*("max_model_len beyond the model", "no chat template", "unknown option", "deterministic by transformers"),)
"""Cases that are told when the model has been read; the others come before one is looked for."""


def generate(model: Path | str, *options: str, prompt: str = "the quick fox") -> tuple[str, ...]:
    return ("generate", "--model", str(model), "--max-tokens", "4", *options, prompt)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_bad_option_is_refused(headway: Headway, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def find(name: str) -> None:
        raise ModelError("the model was looked for first")

    if name not in NEEDS_MODEL:
        monkeypatch.setattr(loader, "locate", find)
    options, words = OPTIONS[name]
    assert_refused(headway(*generate(tiny_model_folder, *options)), *words)


def test_the_meta_device_is_refused_by_name(tiny_model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"device: needs a text, got device\(type='meta'\)"):
        LLM(str(tiny_model_folder), device=torch.device("meta"))  # type: ignore[arg-type]
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match="device: needs one that holds numbers, got meta, torch's default"),
    ):
        LLM(str(tiny_model_folder))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_refused(headway: Headway, tiny_model_folder: Path) -> None:
    refused = headway(*generate(tiny_model_folder, "--device", "cuda:1"))
    assert_refused(refused, "device", "auto or cpu", "got 'cuda:1'", "no CUDA device")


@pytest.mark.parametrize("arguments", [("generate", "a", "--max-tokens", "many"), ("generate",), ("no_such_command",)], ids=str)
def test_what_is_no_command_shows_the_usage(headway: Headway, arguments: tuple[str, ...]) -> None:
    result = headway(*arguments)
    assert (result.code, result.out) == (2, "")
    assert "Usage: " in result.err
    assert not arguments[2:] or arguments[2] in result.err


# Prompts, and pools that are too small


@pytest.mark.parametrize("prompt", ["", "\u6f22\u5b57"], ids=["empty", "of no known character"])
def test_a_prompt_without_tokens_is_refused(headway: Headway, tiny_model_folder: Path, prompt: str) -> None:
    assert_refused(headway(*generate(tiny_model_folder, prompt=prompt)), "prompt", "at least one", "empty")


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


# Kinds of layers


@pytest.fixture(scope="module")
def two_kinds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers of the kinds `window` and `wide`, with heads of 100 and of 520 elements."""
    folder = tmp_path_factory.mktemp("two-kinds")
    config = Gemma4TextConfig(**{**GEMMA4, "head_dim": 100, "global_head_dim": 520})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def start(model: str, attn_backend: Any = "sdpa", **options: str) -> LLM:
    return LLM(model, attn_backend=attn_backend, skip_tokenizer_init=True, kv_cache_memory="8MiB", **options)


SIZES_OF_NATIVE = "head_dim: needs a multiple of 16 up to 256, got"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("attn_backend", "window=nosuch", ["for window layers: asked for 'nosuch', which nobody registered", "sdpa.math"]),
        ("attn_backend", "window", ["attn_backend: needs window=NAME, as no backend is called window, got 'window'"]),
        ("attn_backend", "decode", ["attn_backend: needs decode=NAME"]),
        ("attn_backend", "latent=sdpa", ["a kind of layer that the model has: wide, window, full, got 'latent'"]),
        ("attn_backend", {"window": "sdpa,full=sdpa"}, ["a name for each kind of layer, got 'sdpa,full=sdpa' for 'window'"]),
        ("attn_backend", {"window": None}, ["needs a name for each kind of layer, got None for 'window'"]),
        ("attn_backend", ["window=sdpa"], ["attn_backend: needs a text or a mapping"]),
        ("attn_backend", "window=sdpa,window=sdpa.math", ["attn_backend: needs each kind and phase once"]),
        ("attn_backend", "prefill=a,prefill=b", ["attn_backend: needs each kind and phase once"]),
        ("attn_backend", "full:decode", ["attn_backend: needs auto, NAME"]),
        ("attn_backend", "windows:decode=sdpa", ["needs a kind of layer: rule, latent, wide, window, full, encoder"]),
        ("attn_backend", "window:verify=sdpa", ["needs a phase: prefill or decode, got 'window:verify'"]),
        ("attn_backend", "window:decode=native", ["window layers: ", f"{SIZES_OF_NATIVE} 100"]),
        ("attn_backend", "wide:decode=native", ["wide layers: ", f"{SIZES_OF_NATIVE} 520"]),
        ("kv_cache_dtype", "window", ["kv_cache_dtype: needs auto or", "window is a kind of layer: window=DTYPE"]),
        ("kv_cache_dtype", "latent=fp8_e4m3", ["a kind of layer that the model has: wide, window, full, got 'latent'"]),
        ("kv_cache_dtype", "full=int4", ["needs auto or fp8_e4m3 or int8_per_token_head, got 'full=int4'"]),
        ("kv_cache_dtype", "full:decode=auto", ["needs kinds of layers without a phase, got 'full:decode'"]),
        ("kv_cache_dtype", "state=fp8_e4m3", ["a kind of layer that the model has: wide, window, full, got 'state'"]),
    ],
)
def test_a_choice_that_a_kind_of_layer_cannot_have_is_refused(two_kinds: str, option: str, value: Any, words: list[str]) -> None:
    with pytest.raises(HeadwayError) as refused:
        start(two_kinds, **{option: value})
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("layout", ["nhd", "nhd_int8"])
def test_the_hint_for_a_layout_of_one_kind_works_for_the_others(two_kinds: str, layout: str) -> None:
    with pytest.raises(UnsupportedError, match="(wide|window) layers: .*\n  kv_layout: needs a layout that holds") as refused:
        start(two_kinds, kv_cache_dtype="full=int8_per_token_head", kv_layout=layout)
    (hint,) = re.findall(r'\(kv_layout="(\w+)"\)', str(refused.value))
    selection = start(two_kinds, kv_cache_dtype="full=int8_per_token_head", kv_layout=hint).engine.selection
    assert {kind: part.layout.name for kind, part in selection.parts.items()} == {"window": "nhd", "wide": "nhd_int8"}


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
    "unknown architecture": (edit_config(model_type="own", architectures=["Own"]), ("needs one of", "LlamaFor", "got Own")),
    "an attention of its own": (write("config.json", BLOOM), ("BloomForCausalLM", "ignores transformers' attention interface")),
    "a state of its own": (write("config.json", MAMBA), ("MambaForCausalLM", "keeps a state of each sequence")),
    "an encoder with a decoder": (write("config.json", T5), ("needs causal attention", "is_encoder_decoder=true")),
    "a model of images": (write("config.json", VIT), ("ViTForImageClassification", "generates none")),
    "another architecture's weights": (write("config.json", OLMO), ("lm_head.weight", "[50304, 32]", "got [300, 32]")),
    "hidden_act": (edit_config(hidden_act="gleu"), ("transformers cannot make it", "gleu")),
    "text for a number": (edit_config(num_attention_heads="four"), ("config.json cannot be used", "num_attention_heads", "four")),
    "bitsandbytes": (
        edit_config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("quantised with bitsandbytes, 4 bits", "unquantised"),
    ),
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
    "wrong shape": (edit_tensors(lambda tensors: tensors.update({NORM: torch.ones(31)})), (NORM, "needs shape [32]", "got [31]")),
    "left-over tensors": (
        edit_tensors(lambda tensors: tensors.update({"model.layers.0.router.weight": torch.ones(3)})),
        ("1 tensors", "does not use", "model.layers.0.router.weight"),
    ),
    "no tokenizer": (remove("tokenizer.json"), ("the tokenizer cannot be read",)),
    "a chat template of bytes": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"caf\xe9"),
        ("the chat template chat_template.jinja cannot be read", "UnicodeDecodeError"),
    ),
    "broken generation config": (
        write("generation_config.json", "{"),
        ("generation_config.json: needs a JSON object, got a text that is not JSON",),
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
    "name", [*("int8 weights", "truncated safetensors", "missing shard", "missing tensor", "wrong shape", "left-over tensors")]
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


def test_the_longest_prompt_gets_one_token(llm: LLM) -> None:
    (output,) = llm.generate([[7] * 255], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"n": value} for value in (0, True)),
        *({"temperature": value} for value in ("hot", float("nan"), float("inf"))),
        *({"top_p": value} for value in (None, 0.0, float("nan"))),
        *({"top_k": value} for value in (1.5, -2)),
        {"min_p": 2.0},
        *({"max_tokens": value} for value in (0, True)),
        *({"seed": value} for value in (0.5, 2**64, "x")),
        *({"stop": value} for value in ("", [""], [3])),
        {"stop": ".", "detokenize": False},
        {"stop_token_ids": ["a"]},
        {"min_tokens": 17},
        {"best_of": 1, "n": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -3},
        {"logit_bias": {3: 101}},
        {"logit_bias": {-3: 1}},
        {"allowed_token_ids": []},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words_token_ids": [[]]},
        {"logits_processors": [3]},
        {"logprobs": -2},
        {"logprobs": True},
        {"prompt_logprobs": 1.5},
        {"structured_outputs": {"regex": "a"}},
        {"truncate_prompt_tokens": 0},
        {"extra_args": []},
        {"use_beam_search": True},
        {"max_token": 3},
    ],
    ids=str,
)
def test_bad_sampling_params_are_refused_when_they_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: needs ") as caught:
        SamplingParams(**wrong)
    assert caught.value.reason.what == next(iter(wrong))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "asked", [{"seed": -1}, {"spaces_between_special_tokens": False}, {"spaces_between_special_tokens": True}], ids=str
)
def test_values_of_vllms_that_ask_for_nothing_are_taken(asked: dict[str, Any]) -> None:
    assert SamplingParams(**asked) == SamplingParams()


def test_an_unknown_argument_of_llm_gets_the_nearest_of_ours() -> None:
    for name, words in {
        "attn_backen": "did you mean attn_backend?",
        "max_model_length": "did you mean max_model_len?",
        "pipeline_parallel_size": "not supported: tensor_parallel_size cuts a model over GPUs",
        "frobnicate": "docs/options.md lists them",
    }.items():
        with pytest.raises(ConfigError, match=f"^{name}: needs an option of LLM, got '{name}'.*{re.escape(words)}"):
            LLM("no such model", **{name: 2})


# In processes of their own: one case of each kind


@pytest.mark.parametrize("kind", ["option", pytest.param("hub", marks=pytest.mark.slow)])
def test_python_m_headway_ends_with_one_message_and_code_2(tiny_model_folder: Path, tmp_path: Path, kind: str) -> None:
    arguments, words = {
        "option": (generate(tiny_model_folder, "--temperature", "nan"), ("temperature", "got nan")),
        "hub": (generate("no-such/model"), ("no-such/model", "cannot be reached")),
    }[kind]
    assert_refused(run_headway(*arguments, cwd=tmp_path), *words)
