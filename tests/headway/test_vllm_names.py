"""vLLM's options, parameters and modules: what is taken, translated and refused; and the names that are stable."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import torch

import headway
from headway import LLM, BeamSearchParams, LLMEngine, RequestOutputKind, SamplingParams
from headway.compat import vllm
from headway.compat.vllm import LACKING, MODULES, EngineArgs
from headway.compat.vllm_words import LLM_OPTIONS, NEUTRAL_VALUES
from headway.core.contract.errors import ConfigError
from sandbox import run_python


@pytest.mark.parametrize("module", MODULES)
def test_each_name_of_the_table_is_in_its_module(module: str) -> None:
    loaded = importlib.import_module(f"headway.compat.vllm.{module}")
    for name in MODULES[module].split():
        assert getattr(loaded, name) is getattr(vllm, name)
    with pytest.raises(AttributeError, match=f"headway.compat.vllm.{module}"):
        loaded.no_such_name  # noqa: B018


def test_names_that_are_lacking_stand_in_a_module_or_in_vllm_itself() -> None:
    assert all(isinstance(getattr(vllm, name), type) for name in LACKING)
    with pytest.raises(ValueError, match="ModelRegistry: not supported: a model of transformers runs by model_impl"):
        vllm.ModelRegistry.register_model("Model", object)


def test_public_names_are_in_vllm_too() -> None:
    own = {"EngineSnapshot", "HeadwayError", "create_registry", "hookimpl"}
    assert set(headway.__all__) - own <= set(dir(vllm))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("model_executor.layers", "docs/models.md says which models run"),
        ("lora.layers", "docs/lora.md"),
        ("v1.attention.backend", "docs/backends.md"),
    ],
)
def test_module_that_is_lacking_says_why(module: str, words: str) -> None:
    with pytest.raises(ImportError, match=words):
        importlib.import_module(f"headway.compat.vllm.{module}")
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("headway.compat.vllm.no_such_module")
    with pytest.raises(ImportError, match="headway.compat.vllm.envs: not supported: docs/options.md has the options"):
        from headway.compat.vllm.envs import VLLM_USE_V1  # noqa: F401


def test_none_and_neutral_values_ask_for_nothing() -> None:
    plain = EngineArgs("model")
    assert EngineArgs("model", **dict.fromkeys(LLM_OPTIONS)) == plain
    for name, values in NEUTRAL_VALUES.items():
        for value in values:
            assert EngineArgs("model", **{name: value}) == plain, (name, value)
    assert EngineArgs("model", tokenizer="model", seed=None, max_num_seqs=None, swap_space=4, lora_dtype="auto") == plain


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"attention_backend": "FLASH_ATTN"}, {"attn_backend": "flash_attn"}),
        ({"attention_config": {"backend": "TRITON_ATTN"}}, {"attn_backend": "triton"}),
        ({"kv_cache_memory_bytes": 2**20}, {"kv_cache_memory": 2**20}),
        ({"kv_offloading_size": 0.5}, {"kv_offload_size": 2**29}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, {"enforce_eager": True}),
        ({"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}, {"cudagraph_capture_sizes": [1, 2]}),
        ({"compilation_config": 3}, {}),
        ({"convert": "classify"}, {"task": "score"}),
        ({"convert": "reward"}, {"task": "reward"}),
        ({"load_format": "safetensors", "model_impl": "vllm"}, {"model_impl": "headway"}),
        ({"speculative_config": {"method": "suffix", "num_speculative_tokens": 32}}, {"speculate": "suffix"}),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, {}),
        (
            {"speculative_config": {"model": "small", "num_speculative_tokens": 3}},
            {"speculative_model": "small", "num_speculative_tokens": 3},
        ),
        ({"enable_sleep_mode": True}, {}),
    ],
    ids=str,
)
def test_option_is_translated(options: dict[str, object], own: dict[str, object]) -> None:
    assert EngineArgs("model", **options) == EngineArgs("model", **own)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_lora_bias": True}, "enable_lora_bias: needs .*adapters have no biases"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: needs .*tensor_parallel_size cuts"),
        ({"speculative_config": {"method": "eagle"}}, "needs the method ngram, suffix or draft_model, got eagle"),
        ({"speculative_config": {"method": "draft_model"}}, "needs the draft's name as model, got None"),
        ({"speculative_model": "a", "speculate": "ngram"}, "speculative_model: needs no other source of guesses"),
        ({"speculative_model": "a", "deterministic": True}, "speculative_model: needs steps whose shape"),
        ({"speculative_config": "ngram"}, "the configuration: needs a dict, got 'ngram'"),
        ({"structured_outputs_config": {"reasoning_parser": "x"}}, "needs a backend alone, got reasoning_parser"),
        ({"convert": "rewards"}, "convert: needs none, embed, classify or reward, got 'rewards'"),
        ({"distributed_executor_backend": "k8s"}, "needs mp, uni or ray"),
        ({"tokeniser": "x"}, "tokeniser: needs .*did you mean tokenizer?"),
        ({"hf_overrides": len}, "hf_overrides: needs a mapping"),
        ({"generation_config": "folder"}, "generation_config: needs auto or vllm"),
    ],
    ids=str,
)
def test_option_is_refused_with_the_reason(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineArgs(**options)


def test_options_are_flags_and_survive_asdict() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = parser.parse_args(
        ["--model", "m", "--no-enable-prefix-caching", "--trust-remote-code", "--cpu-offload-gb", "0", "-tp", "2", "--seed", "3"]
    )
    made = EngineArgs.from_cli_args(args)
    assert made == EngineArgs("m", enable_prefix_caching=False, tensor_parallel_size=2, seed=3)
    assert EngineArgs(**vars(args)) == made
    named = EngineArgs("m", attn_backend="prefill=sdpa,decode=triton")
    assert EngineArgs(**dataclasses.asdict(named)) == named
    assert EngineArgs(**vars(parser.parse_args([]))) == EngineArgs()


def test_lists_are_lists_that_may_be_added_to() -> None:
    params = SamplingParams(stop=("a",), bad_words=["x"], allowed_token_ids=(1, 2))
    assert params.stop + params.bad_words == ["a", "x"]
    assert (params.allowed_token_ids, params.stop_token_ids, params.bad_words) == ([1, 2], [], ["x"])
    copied = params.clone()
    copied.stop_token_ids.append(7)
    copied.stop.append("c")
    assert (params.stop_token_ids, params.stop, copied.stop) == ([], ["a"], ["a", "c"])
    assert SamplingParams(stop=["a"]) == SamplingParams(stop="a")


def test_what_was_put_into_a_list_counts_for_later_requests_and_is_checked(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (whole,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)
    token = whole.outputs[0].token_ids[2]
    params.stop_token_ids.append(token)
    (cut,) = llm.generate([[3, 4, 5]], params, use_tqdm=False)
    assert cut.outputs[0].token_ids == whole.outputs[0].token_ids[: whole.outputs[0].token_ids.index(token) + 1]
    params.stop_token_ids.append("b")
    with pytest.raises(ConfigError, match="stop_token_ids: needs token ids"):
        llm.generate([[3, 4, 5]], params, use_tqdm=False)


def test_none_is_the_default_of_every_option() -> None:
    assert EngineArgs(**dict.fromkeys(each.name for each in dataclasses.fields(EngineArgs))) == EngineArgs()


def test_parameters_may_be_changed_and_are_checked_when_they_are() -> None:
    params = SamplingParams(stop="a", logit_bias={1: 2.0})
    copied = params.clone()
    copied.stop = ["b", "c"]
    copied.logit_bias[5] = 1.0
    assert (params.stop, copied.stop, params.logit_bias) == (["a"], ["b", "c"], {1: 2.0})
    with pytest.raises(ConfigError, match="top_p: needs a number above 0"):
        params.top_p = 0
    with pytest.raises(ConfigError, match="no_such: needs an option of SamplingParams"):
        params.no_such = 1
    assert params.top_p == 1
    with pytest.raises(TypeError, match="unhashable"):
        hash(params)


def test_a_request_keeps_the_parameters_that_it_was_added_with(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine = LLMEngine.over(llm.driver)
    engine.add_request("one", "the", params)
    params.max_tokens = 2
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 6


def test_llm_engine_steps_all_clients_and_drops_what_is_aborted(llm: LLM) -> None:
    engine = llm.llm_engine
    last = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    assert engine.add_request("final", [5, 6], last) == "final"
    engine.add_request("gone", [7, 8], SamplingParams(max_tokens=50, ignore_eos=True))
    with pytest.raises(ConfigError, match="request_id: needs an id not in use"):
        engine.add_request("gone", [7, 8], last)
    with pytest.raises(ConfigError, match="lora_request"):
        engine.add_request("lora", [7, 8], last, lora_request="adapter")
    engine.step()
    engine.abort_request("gone")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.request_id for output in outputs] == ["final"]
    assert outputs[0].outputs[0].token_ids == llm.generate([[5, 6]], last, use_tqdm=False)[0].outputs[0].token_ids
    assert not llm.engine.has_unfinished
    assert engine.step() == []


def brute_force(llm: LLM, prompt: list[int], width: int, steps: int) -> list[tuple[float, list[int]]]:
    """Beam search by whole forward passes: each step's log-probabilities of each beam, prompts' and all."""
    beams = [(0.0, prompt)]
    for _ in range(steps):
        wanted = SamplingParams(max_tokens=1, logprobs=2 * width, temperature=0)
        llm.reset_prefix_cache()
        found = llm.generate([tokens for _, tokens in beams], wanted, use_tqdm=False)
        longer = [
            (score + scored.logprob, [*tokens, token])
            for (score, tokens), output in zip(beams, found, strict=True)
            for token, scored in output.outputs[0].logprobs[0].items()
        ]
        beams = sorted(longer, reverse=True)[:width]
    return beams


def test_beam_search_finds_what_scoring_every_beam_anew_finds(llm: LLM) -> None:
    (output,) = llm.beam_search([{"prompt_token_ids": [5, 6, 7]}], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    wanted = brute_force(llm, [5, 6, 7], 3, 4)
    assert [sequence.tokens for sequence in output.sequences] == [tokens for _, tokens in wanted]
    torch.testing.assert_close(
        torch.tensor([sequence.cum_logprob for sequence in output.sequences]), torch.tensor([score for score, _ in wanted])
    )
    with pytest.raises(ConfigError, match="logprobs: needs at most max_logprobs=20, got 22"):
        llm.beam_search("the", BeamSearchParams(beam_width=11, max_tokens=2))


def test_overridden_configuration_is_the_models(tiny_model_folder: Path) -> None:
    options = {"kv_cache_memory": "1MiB", "num_threads": 1}
    llm = LLM(str(tiny_model_folder), hf_overrides={"max_position_embeddings": 96}, **options)
    assert llm.model_config.max_model_len == 96
    assert llm.get_tokenizer() is not None
    with pytest.raises(ConfigError, match="hf_overrides: needs values as JSON has them"):
        LLM(str(tiny_model_folder), hf_overrides={"vocab_size": object()}, **options)


ROOT = Path(__file__).resolve().parents[2]
STABLE = ("headway", "headway.contract", "headway.testing")
PAGE = (ROOT / "docs" / "api.md").read_text()


def listed(module: str) -> set[str]:
    """The names in the first column of a module's table."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(f"{module}\n")]
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("module", STABLE)
def test_the_page_lists_each_stable_name_and_each_exists(module: str) -> None:
    loaded = importlib.import_module(module)
    assert listed(module) == set(loaded.__all__)
    for name in loaded.__all__:
        assert getattr(loaded, name) is not None


@pytest.mark.parametrize("module", STABLE)
def test_the_reference_has_each_stable_name(module: str) -> None:
    page = (ROOT / "docs" / "reference" / f"{module.rpartition('.')[2]}.md").read_text()
    described = set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", page, re.MULTILINE))
    assert described == {name for name in importlib.import_module(module).__all__ if name != "__version__"}


def test_examples_and_documents_import_stable_names_alone() -> None:
    texts = [*(ROOT / "examples").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for path in texts:
        for module, names in re.findall(r"^from (headway[\w.]*) import \(?([\w, ]+)", path.read_text(), re.MULTILINE):
            assert module in STABLE, f"{path.name} imports from {module}"
            known = getattr(importlib.import_module(module), "__all__", None)
            assert known is None or set(re.findall(r"\w+", names)) <= set(known), f"{path.name}: {names} of {module}"


def test_the_contract_loads_no_library_but_torch() -> None:
    code = """
import sys, headway.contract
heavy = {"transformers", "triton", "pluggy", "pydantic", "headway.registry", "headway.llm"} & set(sys.modules)
assert not heavy, heavy
"""
    result = run_python("-c", code, cwd=ROOT)
    assert result.code == 0, result
