"""Adapters by way of `LLM` and `AsyncLLM`: many in one batch, separate in the cache, loaded and unloaded while requests run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, AsyncLLM, SamplingParams
from headway.beam_search import BeamSearchParams
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError
from headway.llm_engine import LLMEngine
from tiny_adapters import OPTIONS, save_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = ["the quick brown fox", "jumps over", "a lazy dog sleeps", "the quick brown fox"]


def written(
    llm: LLM, prompts: Sequence[Any], adapters: Sequence[LoRARequest | None], params: SamplingParams = GREEDY
) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    assert [output.lora_request for output in outputs] == [*adapters]
    return [output.outputs[0].token_ids for output in outputs]


def one_by_one(llm: LLM, prompts: Sequence[Any], adapters: Sequence[LoRARequest | None]) -> list[Any]:
    return [written(llm, [prompt], [adapter])[0] for prompt, adapter in zip(prompts, adapters, strict=True)]


def test_many_adapters_in_one_batch_write_what_each_writes_alone(adapted: LLM, adapters: list[LoRARequest]) -> None:
    """More of them than slots, and requests of the model itself among them."""
    prompts, wanted = PROMPTS * 3, [*adapters, None, *adapters, None, *adapters[:2]]
    together = written(adapted, prompts, wanted)
    assert together == one_by_one(adapted, prompts, wanted)
    assert len({tuple(tokens) for tokens in together[::4]}) == 3, "adapters write texts of their own"
    table = adapted.engine.adapter_table
    table.check_integrity()
    assert table.num_in_slots == 2


def test_the_model_itself_writes_what_it_writes_without_slots(adapted: LLM, base: Path, adapters: list[LoRARequest]) -> None:
    plain = LLM(str(base), **{**OPTIONS, "enable_lora": False})
    expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert written(adapted, PROMPTS, [None] * 4) == expected
    assert written(adapted, [*PROMPTS, PROMPTS[0]], [None, None, None, None, adapters[0]])[:4] == expected


def test_the_prefix_cache_is_apart_by_adapter(adapted: LLM, adapters: list[LoRARequest]) -> None:
    prompt = list(range(5, 60))

    def cached(adapter: LoRARequest | None) -> tuple[int, list[int]]:
        (output,) = adapted.generate([prompt], GREEDY, use_tqdm=False, lora_request=adapter)
        return output.num_cached_tokens, output.outputs[0].token_ids

    adapted.reset_prefix_cache()
    before = adapted.stats().totals.missed_tokens["adapter"]
    first = {None: cached(None), "a0": cached(adapters[0]), "a1": cached(adapters[1])}
    assert [count for count, _ in first.values()] == [0, 0, 0]
    assert adapted.stats().totals.missed_tokens["adapter"] - before == 2 * (len(prompt) - 1)
    again = {None: cached(None), "a0": cached(adapters[0]), "a1": cached(adapters[1])}
    assert all(count > 48 for count, _ in again.values())
    assert [tokens for _, tokens in again.values()] == [tokens for _, tokens in first.values()]
    twin = LoRARequest("twin", 77, adapters[0].lora_path)
    assert cached(twin)[0] > 48, "the same files under another name are the same adapter"
    adapted.remove_lora(77)


def test_other_files_under_an_old_name_never_meet_old_blocks(adapted: LLM, base: Path, tmp_path: Path) -> None:
    prompt, folder = list(range(7, 60)), save_adapter(tmp_path / "a", base, seed=50)
    request = LoRARequest("changing", 50, str(folder))
    before = written(adapted, [prompt], [request])
    save_adapter(folder, base, seed=51)
    assert written(adapted, [prompt], [request]) == before, "what was read is in memory"
    assert adapted.remove_lora(50)
    assert 50 not in adapted.list_loras()
    (output,) = adapted.generate([prompt], GREEDY, use_tqdm=False, lora_request=request)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids != before[0]
    adapted.remove_lora(50)


def test_files_that_have_changed_are_not_taken_for_the_old_ones(adapted: LLM, base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", base, seed=60)
    request = LoRARequest("drifting", 60, str(folder))
    written(adapted, PROMPTS[:1], [request])
    others = [LoRARequest(f"o{seed}", 100 + seed, str(save_adapter(tmp_path / f"o{seed}", base, seed=seed))) for seed in range(4)]
    written(adapted, PROMPTS, others)  # which take its place in slots and in host memory
    save_adapter(folder, base, seed=61)
    with pytest.raises(ConfigError, match="adapter drifting: needs the files that were read when it was loaded, got others"):
        written(adapted, PROMPTS[:1], [request])
    save_adapter(folder, base, seed=60)
    written(adapted, PROMPTS[:1], [request])
    for number in (60, *(each.lora_int_id for each in others)):
        assert adapted.remove_lora(number)


def test_an_adapter_that_is_unloaded_serves_the_requests_that_have_begun(adapted: LLM, adapters: list[LoRARequest]) -> None:
    expected = one_by_one(adapted, PROMPTS[:2], adapters[:2])
    shown: dict[int, list[int]] = {}
    for index, output in adapted.stream(PROMPTS[:2], GREEDY, lora_request=adapters[:2]):
        if not shown:
            assert adapted.remove_lora(1)
            assert not adapted.remove_lora(1)
            assert adapted.list_loras() >= {2}
            assert 1 not in adapted.list_loras()
        shown[int(index)] = output.outputs[0].token_ids
    assert [shown[index] for index in range(2)] == expected
    assert written(adapted, PROMPTS[:1], adapters[:1]) == expected[:1], "and is read again when it is asked for again"


def test_a_number_stands_for_one_adapter_at_a_time(adapted: LLM, adapters: list[LoRARequest], base: Path, tmp_path: Path) -> None:
    written(adapted, PROMPTS[:1], adapters[:1])
    with pytest.raises(ConfigError, match="lora_int_id: needs a number that adapter other alone has, got 1, which is adapter a0"):
        adapted.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=LoRARequest("other", 1, adapters[1].lora_path))
    other = LoRARequest("a0", 1, adapters[1].lora_path, load_inplace=True)
    assert written(adapted, PROMPTS[:1], [other]) == written(adapted, PROMPTS[:1], adapters[1:2])
    adapted.remove_lora(1)


def test_requests_are_refused_whole_before_anything_runs(adapted: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    nowhere = LoRARequest("nowhere", 90, str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="adapter nowhere: needs a folder that peft has written"):
        adapted.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=[adapters[0], nowhere])
    assert not adapted.engine.has_unfinished
    with pytest.raises(ConfigError, match="lora_request: needs one, or one for each of the 2 prompts, got 3"):
        adapted.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request=adapters[:3])
    with pytest.raises(ConfigError, match=r"lora_request: needs a LoRARequest\(name, id, path\), got 'sql'"):
        adapted.generate(PROMPTS[:2], GREEDY, use_tqdm=False, lora_request="sql")
    adapted.engine.adapter_table.check_integrity()


def test_an_engine_without_slots_takes_no_adapter(base: Path, adapters: list[LoRARequest]) -> None:
    llm = LLM(str(base), **{**OPTIONS, "enable_lora": False})
    with pytest.raises(ConfigError, match="lora_request: needs an engine that was started with enable_lora=True, got a0"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=adapters[0])
    with pytest.raises(ConfigError, match="enable_lora=True"):
        llm.add_lora(adapters[0])


def test_chats_and_searches_have_adapters(adapted: LLM, adapters: list[LoRARequest]) -> None:
    messages = [{"role": "user", "content": "the quick"}]
    plain, (output,) = (
        adapted.chat(messages, GREEDY, use_tqdm=False),
        adapted.chat(messages, GREEDY, False, lora_request=adapters[0]),
    )
    assert output.outputs[0].token_ids != plain[0].outputs[0].token_ids
    (found,) = adapted.beam_search(["the quick"], BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True), adapters[0])
    (greedy,) = written(adapted, ["the quick"], adapters[:1], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert found.sequences[0].tokens[-6:] == greedy
    twice = SamplingParams(n=2, temperature=0, max_tokens=6, ignore_eos=True)
    (several,) = adapted.generate(["the quick"], twice, use_tqdm=False, lora_request=adapters[0])
    assert [each.token_ids for each in several.outputs] == [greedy] * 2
    assert found.sequences[0].lora_request is adapters[0]


def test_llm_engine_takes_adapters_by_keyword_and_in_vllms_order(adapted: LLM, adapters: list[LoRARequest]) -> None:
    engine: LLMEngine = adapted.llm_engine
    (expected,) = written(adapted, PROMPTS[:1], adapters[:1])
    engine.add_request("named", PROMPTS[0], GREEDY, lora_request=adapters[0])
    engine.add_request("placed", PROMPTS[0], GREEDY, None, adapters[0])
    found = {}
    while engine.has_unfinished_requests():
        found.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
    assert found == {"named": expected, "placed": expected}
    assert engine.add_lora(adapters[3])
    assert engine.list_loras() >= {4}
    assert engine.remove_lora(4)


async def test_async_requests_end_without_holding_their_adapters(adapted: LLM, adapters: list[LoRARequest]) -> None:
    (expected,) = written(adapted, PROMPTS[:1], adapters[:1])
    served = AsyncLLM.from_llm(adapted)
    try:
        assert await served.add_lora(adapters[2])
        stream = served.generate(PROMPTS[1], GREEDY, lora_request=adapters[2])
        async for _ in stream:
            break
        await stream.aclose()  # a reader who leaves
        with pytest.raises(ConfigError, match="adapter nowhere"):
            async for _ in served.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("nowhere", 91, "/nowhere/at/all")):
                pass
        read = [output async for output in served.generate(PROMPTS[0], GREEDY, lora_request=adapters[0])]
        assert await served.remove_lora(3)
        assert 3 not in await served.list_loras()
        assert list(read[-1].outputs[0].token_ids) == expected
    finally:
        served.shutdown()
    adapted.engine.adapter_table.check_integrity()


FEATURES: dict[str, dict[str, Any]] = {
    "drafts": {"speculate": "ngram"},
    "small steps": {"max_num_batched_tokens": 16, "max_num_seqs": 3, "max_loras": 1},
    "few pages": {"kv_cache_memory": 16 * 8192 * 2, "max_model_len": 64},
    "bfloat16": {"dtype": "bfloat16"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("feature", [pytest.param(name, marks=() if name == "drafts" else pytest.mark.slow) for name in FEATURES])
def test_features_of_the_engine_work_with_adapters(base: Path, adapters: list[LoRARequest], feature: str) -> None:
    llm = LLM(str(base), **{**OPTIONS, "max_loras": 2, **FEATURES[feature]})
    prompts, wanted = [text + " the quick brown" * 2 for text in PROMPTS * 2], [*adapters, None, *adapters[:3]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    together = written(llm, prompts, wanted, params)
    alone = [written(llm, [prompt], [adapter], params)[0] for prompt, adapter in zip(prompts, wanted, strict=True)]
    if feature != "bfloat16":  # where rows of one batch and of another differ in their last bits, with or without adapters
        assert together == alone
    assert len({tuple(tokens) for tokens in together}) == 8
    if feature == "drafts":
        assert llm.engine.stats.num_draft_tokens


@pytest.mark.slow
def test_weights_of_few_bits_have_adapters_beside_them(base: Path, adapters: list[LoRARequest]) -> None:
    llm = LLM(str(base), **OPTIONS, max_loras=2, quantization="fp8")
    wanted = [*adapters[:2], None, adapters[2]]
    assert written(llm, PROMPTS, wanted) == one_by_one(llm, PROMPTS, wanted)
    plain = LLM(str(base), **{**OPTIONS, "enable_lora": False}, quantization="fp8")
    assert written(llm, PROMPTS, [None] * 4) == [
        each.outputs[0].token_ids for each in plain.generate(PROMPTS, GREEDY, use_tqdm=False)
    ]


@pytest.mark.slow
def test_blocks_on_disk_are_apart_by_what_an_adapter_holds(base: Path, adapters: list[LoRARequest], tmp_path: Path) -> None:
    prompt, elsewhere = list(range(5, 85)), tmp_path / "moved"
    shutil.copytree(adapters[0].lora_path, elsewhere)
    offload = {"kv_offload_size": "8MiB", "kv_offload_dir": str(tmp_path / "blocks")}
    found = []
    for adapter in (adapters[0], LoRARequest("moved", 9, str(elsewhere)), adapters[1], None):
        llm = LLM(str(base), **OPTIONS, **offload)
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=adapter)
        found.append(output)
        del llm
    first, moved, other, plain = found
    assert moved.outputs[0].token_ids == first.outputs[0].token_ids
    assert (first.num_cached_tokens, other.num_cached_tokens, plain.num_cached_tokens) == (0, 0, 0)
    assert moved.num_cached_tokens >= 64


def test_transformers_code_takes_no_adapters(base: Path) -> None:
    with pytest.raises(ConfigError, match="enable_lora: needs a model that Headway's decoder computes"):
        LLM(str(base), **OPTIONS, model_impl="transformers")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_loras": 0}, "max_loras: needs a whole number of at least 1, got 0"),
        ({"max_lora_rank": 1000}, "max_lora_rank: needs a whole number of at most 512, got 1000"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras: needs a whole number of at least max_loras=4, got 3"),
    ],
)
def test_options_that_cannot_work(base: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(base), **{**OPTIONS, **options})


def test_a_draft_model_guesses_for_requests_with_adapters_and_takes_no_slots(
    base: Path, adapted: LLM, adapters: list[LoRARequest]
) -> None:
    llm = LLM(str(base), **OPTIONS, max_loras=2, speculative_model=str(base), num_speculative_tokens=3)
    assert llm.driver.assembly.draft.engine.adapters is None
    named = [adapters[0], None]
    assert written(llm, PROMPTS[:2], named) == written(adapted, PROMPTS[:2], named)


RANKED = {"kv_cache_memory": "4MiB", "num_threads": 1, "block_size": 16, "autotune_budget": 0, "enable_lora": True}


@pytest.mark.slow
def test_two_ranks_write_what_one_writes(base: Path, adapters: list[LoRARequest]) -> None:
    prompts = ["the quick brown fox", "jumps over", "a lazy dog sleeps", "the quick"] * 2
    wanted = [*adapters, None, *adapters[:3]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for size in (1, 2):
        llm = LLM(str(base), **RANKED, max_lora_rank=8, max_loras=2, tensor_parallel_size=size)
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=wanted)
        found.append([output.outputs[0].token_ids for output in outputs])
        llm.engine.executor.shutdown()
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) == 8
