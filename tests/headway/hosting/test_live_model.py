"""A running engine's model: asleep and awake, with other weights as a fresh engine, and with a draft model that guesses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, MixtralConfig

from graph_stub import PiecesTape
from headway import LLM, AsyncLLM, SamplingParams
from headway.core.contract.errors import ConfigError, ModelError, UnsupportedError
from headway.core.contract.metadata import Phase
from headway.core.engine.execution.memory import ReleasedMemory
from headway.core.system.held_tensors import held_tensors
from headway.hosting.assembly import DraftModel
from hybrid_models import ROWS

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4], [9, 8]]


def engine_of(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), kv_cache_memory="8MiB", num_threads=1, max_num_seqs=16, **options)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def changed(folder: Path) -> dict[str, torch.Tensor]:
    """Other weights of a model's shapes; norms stay near 1."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: each + 0.1 * torch.randn(each.shape, generator=generator) if each.dim() < 2 or each.std() == 0
        else torch.randn(each.shape, generator=generator) * each.std()
        for name, each in load_file(folder / "model.safetensors").items()
    }  # fmt: skip


def with_weights(folder: Path, weights: dict[str, torch.Tensor], to: Path) -> Path:
    shutil.copytree(folder, to)
    save_file(weights, to / "model.safetensors")
    return to


@pytest.fixture
def own(tiny_model_folder: Path) -> LLM:
    return engine_of(tiny_model_folder)


def test_an_engine_that_slept_writes_what_it_wrote_before(own: LLM) -> None:
    before = tokens_of(own)
    for level in (1, 2):
        caches = held_tensors(own.engine.executor.caches)  # type: ignore[attr-defined]
        assert any(each.any() for each in caches.values())
        own.sleep(level)
        assert own.is_sleeping()
        with pytest.raises(ConfigError, match=r"the engine: needs to be awake, got one whose weights and kv_cache sleep"):
            tokens_of(own)
        own.wake_up(tags=["weights"])
        with pytest.raises(ConfigError, match="whose kv_cache sleep"):
            tokens_of(own)
        own.wake_up()
        assert not own.is_sleeping()
        assert not any(each.any() for each in caches.values())
        assert own.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
        assert tokens_of(own) == before
    own.wake_up()  # which is awake


def test_weights_of_level_2_are_gone_in_between(own: LLM) -> None:
    decoder: Any = own.model.decoder
    own.sleep(level=2)
    assert not decoder.layers[1].mlp.norm.weight.any()
    assert held_tensors(decoder.operations)  # rope's tables stay
    own.wake_up()
    assert decoder.layers[1].mlp.norm.weight.all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.sleep(3), "level: needs 1 .* or 2 .*, got 3"),
        (lambda llm: llm.wake_up(tags=["graphs"]), "tags: needs a list of weights and kv_cache, got 'graphs'"),
        (
            lambda llm: llm.collective_rpc("update_config", args=({"seed": 1},)),
            "overrides of update_config: needs load_config with load_format",
        ),
        (lambda llm: llm.wake_up(tags="weights"), "tags: needs a list of weights and kv_cache, got 'weights'"),
        (lambda llm: llm.collective_rpc("sleep", args=(True,)), "level of sleep: needs 1 .*, got True"),
        (
            lambda llm: llm.collective_rpc("reload_weights", kwargs={"x" * 500: 1}),
            r"args and kwargs: needs those of reload_weights\(\), got reload_weights\(x{30}=1\), .{,200}$",
        ),
        (lambda llm: llm.collective_rpc("frob"), "method: needs get_model, reload_weights, sleep, .* got 'frob'"),
        (lambda llm: llm.apply_model(lambda model: model.load_weights([("nope", torch.zeros(1))])), "got nope"),
    ],
)
def test_what_cannot_be_done_is_refused(llm: LLM, call: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call(llm)
    assert not llm.is_sleeping()


def test_an_engine_with_requests_does_not_sleep(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], GREEDY)
    next(stream)
    with pytest.raises(ConfigError, match="sleep: needs an engine without requests, got 1 unfinished"):
        llm.sleep()
    stream.close()


def test_a_tensor_of_another_shape_changes_nothing(llm: LLM) -> None:
    before = tokens_of(llm)
    with pytest.raises(ModelError, match=r"model.norm.weight needs shape \[32\], got \[3\]"):
        llm.apply_model(lambda model: model.load_weights([("model.norm.weight", torch.zeros(3))]))
    assert tokens_of(llm) == before


class CountingTape(PiecesTape):
    count = 0

    def begin(self) -> None:
        self.count += 1
        super().begin()


def test_captured_graphs_are_captured_anew(own: LLM) -> None:
    tape = CountingTape()
    own.engine.executor.capture(tape)  # type: ignore[call-arg]
    recorded = tape.count
    own.sleep()
    own.wake_up(["weights"])
    assert tape.count == recorded > 0
    own.wake_up()
    assert tape.count == 2 * recorded


def one_by_one(llm: LLM, weights: dict[str, torch.Tensor]) -> None:
    for pair in weights.items():
        llm.collective_rpc(lambda worker, each: worker.model_runner.model.load_weights([each]), args=(pair,))


def all_at_once(llm: LLM, weights: dict[str, torch.Tensor]) -> None:
    llm.apply_model(lambda model: model.load_weights(iter(weights.items())))


@pytest.mark.parametrize("how", [one_by_one, all_at_once])
def test_new_weights_are_those_of_a_fresh_engine(own: LLM, tiny_model_folder: Path, tmp_path: Path, how: Any) -> None:
    before, weights = tokens_of(own), changed(tiny_model_folder)
    how(own, weights)
    fresh = engine_of(with_weights(tiny_model_folder, weights, tmp_path / "new"))
    assert tokens_of(own) == tokens_of(fresh) != before
    own.collective_rpc("reload_weights")
    assert tokens_of(own) == before


SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
FAMILIES = {
    "gemma2": Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=16),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "mixtral": MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(pytest.param(name, marks=() if place % 5 == 0 else pytest.mark.soak) for place, name in enumerate(ROWS))],
)
def test_new_weights_of_a_family(family: str, tmp_path: Path) -> None:
    config = {**FAMILIES, **ROWS}[family]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "old")
    own = engine_of(tmp_path / "old", skip_tokenizer_init=True, dtype="float32", model_impl="headway")
    before, weights = tokens_of(own), changed(tmp_path / "old")
    all_at_once(own, weights)
    fresh = engine_of(
        with_weights(tmp_path / "old", weights, tmp_path / "new"), skip_tokenizer_init=True, dtype="float32", model_impl="headway"
    )
    assert tokens_of(own) == tokens_of(fresh)
    own.collective_rpc("reload_weights")
    assert tokens_of(own) == before


class Extension:
    """Methods of a program's own, which the worker gets."""

    def double(self, name: str) -> str:
        own: Any = self
        found = dict(own.model_runner.model.named_parameters())
        own.model_runner.model.load_weights([(name, torch.linspace(-2, 2, 32))])
        return f"{own.device} {own.rank} {len(found) > 10}"


def test_worker_has_the_methods_of_its_extension(tiny_model_folder: Path) -> None:
    llm = engine_of(tiny_model_folder, worker_extension_cls=f"{__name__}.Extension")
    before = tokens_of(llm)
    assert llm.collective_rpc("double", args=("model.norm.weight",)) == ["cpu 0 True"]
    assert tokens_of(llm) != before
    assert llm.model.decoder.norm.weight[0] == -2  # type: ignore[union-attr]
    bad = engine_of(tiny_model_folder, worker_extension_cls="no_such.Thing")
    with pytest.raises(ConfigError, match=r"worker_extension_cls: needs a class as MODULE.CLASS, got no_such.Thing"):
        bad.collective_rpc("double")


async def test_an_async_engine_sleeps(own: LLM) -> None:
    async with AsyncLLM.from_llm(own) as served:
        await served.sleep()
        assert await served.is_sleeping()
        with pytest.raises(ConfigError, match="needs to be awake"):
            [output async for output in served.generate([1, 2], GREEDY)]
        await served.wake_up(["weights", "kv_cache"])
        assert [output async for output in served.generate([1, 2], GREEDY)]
        assert await served.collective_rpc(num_layers) == [2]


def num_layers(worker: Any) -> int:
    return int(worker.get_model().config.num_layers)


@pytest.mark.gpu
def test_memory_of_a_gpu_comes_back_with_what_was_kept() -> None:
    kept, lost = torch.randn(2**20, device="cuda"), torch.randn(2**20, device="cuda")
    view, expected = kept[100:], kept.cpu()
    before = torch.cuda.memory_allocated()
    memory = ReleasedMemory(stored=[kept, view], lost=[lost])
    assert torch.cuda.memory_allocated() <= before - 8 * 2**20
    memory.restore()
    assert torch.equal(kept.cpu(), expected)
    assert torch.equal(view.cpu(), expected[100:])
    assert not lost.any()


@pytest.mark.gpu
def test_an_engine_with_graphs_sleeps_on_a_gpu() -> None:
    llm = LLM("qwen3-0.6b", load_format="dummy", max_model_len=512, max_num_seqs=4, gpu_memory_utilization=0.5)
    before, taken = tokens_of(llm), torch.cuda.mem_get_info()[0]
    llm.sleep()
    assert torch.cuda.mem_get_info()[0] > taken + 2**30
    llm.wake_up()
    assert tokens_of(llm) == before


def test_what_an_async_engine_lacks_is_named(own: LLM) -> None:
    served = AsyncLLM.from_llm(own)
    with pytest.raises(AttributeError, match="AsyncLLM has no attribute 'pause_generation': .* /pause and /resume"):
        served.pause_generation  # noqa: B018
    served.shutdown()


OPTIONS: dict[str, Any] = {"kv_cache_memory": "8MiB", "num_threads": 1, "max_num_seqs": 8, "autotune_budget": 0}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, max_tokens=30, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=1.2, logprobs=1),
]
DRAFTED = [[1, 2, 3, 4], [9, 8], list(range(1, 40))]


def spoiled(folder: Path, to: Path, share: float) -> Path:
    """A copy of a model with noise on its weights: it guesses some tokens right."""
    shutil.copytree(folder, to)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: each + share * each.std() * torch.randn(each.shape, generator=generator) for name, each in weights.items()}
    save_file(noisy if share else weights, to / "model.safetensors")
    return to


def written(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(DRAFTED, PARAMS, use_tqdm=False)
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(tiny_model_folder: Path) -> list[list[list[int]]]:
    return written(LLM(str(tiny_model_folder), **OPTIONS))


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_tokens_are_those_without(tiny_model_folder: Path, tmp_path: Path, plain: list[list[list[int]]], share: float) -> None:
    draft = spoiled(tiny_model_folder, tmp_path / "draft", share)
    asked = {"attn_backend": "full=sdpa,draft:decode=sdpa.math", "kv_cache_dtype": "draft=fp8_e4m3"} if share else {}
    llm = LLM(str(tiny_model_folder), speculative_model=str(draft), num_speculative_tokens=4, **OPTIONS, **asked)
    assert written(llm) == plain
    selected = llm.driver.assembly.draft.engine.selection  # type: ignore[union-attr]
    assert selected.names[Phase.DECODE] == "sdpa.math" or not share
    counts = llm.stats().totals
    assert counts.num_accepted_tokens > 0
    assert (counts.num_accepted_tokens < counts.num_draft_tokens) or not share
    assert not llm.driver.assembly.draft.engine.has_unfinished  # type: ignore[union-attr]
    llm.engine.blocks.check_integrity([])
    llm.sleep()
    llm.wake_up()
    assert written(llm) == plain


def test_the_draft_reads_each_token_once(tiny_model_folder: Path) -> None:
    engine = LLM(str(tiny_model_folder), **OPTIONS).engine
    draft, tokens = DraftModel(engine), list(range(1, 60))
    (guess,) = draft.propose_batch([tokens], [5])
    before = engine.stats.snapshot()
    (again,) = draft.propose_batch([tokens + guess[:3]], [2])
    assert again == guess[3:]
    assert (engine.stats - before).num_prefill_tokens <= 2
    assert draft.propose_batch([[1] * 255, [1] * 250], [5, 5])[0] == []  # a sequence as long as the draft's longest


def test_a_draft_of_another_vocabulary_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_model_folder, tmp_path / "other"))
    (other / "config.json").write_text(json.dumps({**json.loads((other / "config.json").read_text()), "vocab_size": 320}))
    with pytest.raises(
        ConfigError, match="speculative_model: needs a model with the vocabulary of .*, 300 tokens, got .*with 320"
    ):
        LLM(str(tiny_model_folder), speculative_model=str(other), load_format="dummy", **OPTIONS)
    with pytest.raises(ConfigError, match="attn_backend draft: needs a draft model, which has these layers, got none"):
        LLM(str(tiny_model_folder), attn_backend="draft:decode=sdpa", **OPTIONS)
    with pytest.raises(UnsupportedError, match="draft model: .*hopper"):
        LLM(str(tiny_model_folder), speculative_model=str(tiny_model_folder), attn_backend="draft:decode=hopper", **OPTIONS)
    with pytest.raises(ConfigError, match="speculative_model: needs tensor_parallel_size=1, got 2"):
        LLM(str(tiny_model_folder), speculative_model=str(other), tensor_parallel_size=2, **OPTIONS)
