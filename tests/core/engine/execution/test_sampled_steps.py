"""Parameters of requests through an engine: however the work is cut, a request's tokens and log-probabilities are its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from graph_backend import Again, Walk
from headway.core.contract.errors import ConfigError
from headway.core.contract.text_plugins import LogitsProcessorInfo
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.host_rows import HostRows
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.logprobs import TokenLogprobs
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from sample_tokens import DRAWS_INSIDE, FILTERS_INSIDE
from tiny_engine import TinyModel, Written, drain, generate, made_engine, registering, tokens_of

SMALL = EngineConfig(block_size=8, kv_cache_memory=2**20)


def next_is_odd(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Odd after even, even after odd: the mask depends on the token before."""
    last = output[-1] if output else 0
    logits[last % 2 :: 2] = -torch.inf
    return logits


def far_from_prompt(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    bonus = torch.zeros_like(logits)
    bonus[prompt[0]] = -100.0
    bonus[(sum(output) + prompt[-1]) % len(logits)] = 3.0
    return logits + bonus


WISHES = [
    {"temperature": 0, "repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "logprobs": 2},
    {"logit_bias": {3: 2.0, 9: -100.0}, "bad_words_token_ids": [[4], [2, 3]]},
    {"temperature": 0},
    {"allowed_token_ids": list(range(0, 50, 3)), "top_k": 5, "bad_words_token_ids": [[6, 9], [3, 3]]},
    {"min_tokens": 9, "stop_token_ids": list(range(0, 50, 2))},
    {"logits_processors": [next_is_odd], "logprobs": 0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"top_p": 0.8, "repetition_penalty": 1.3},
    {"top_k": 10, "min_tokens": 4, "stop_token_ids": list(range(1, 50, 4)), "logprobs": 1},
    {"logits_processors": [far_from_prompt, next_is_odd], "repetition_penalty": 1.2, "prompt_logprobs": 1},
    {"logits_processors": ["named"], "extra_args": {"token": 7}},
    {"prompt_logprobs": 3, "logprobs": 4},
]


def make(arguments: Mapping[str, Any]) -> Any:
    def every_third(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) % 3 == 2:
            logits[arguments["token"]] += 200
        return logits

    return every_third


def refuse(arguments: Mapping[str, Any]) -> Any:
    raise RuntimeError("not today")


NAMED = {
    "named": LogitsProcessorInfo("named", "for tests", lambda: make),
    "refuses": LogitsProcessorInfo("refuses", "", lambda: refuse),
}


def engine(registry: Registry, config: EngineConfig, **options: Any) -> EngineLoop:
    return made_engine(TinyModel(), registry, config, hosts=HostRows(None, NAMED), **options)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    random = Random(3)
    prompts = [[random.randrange(50) for _ in range(random.randint(2, 30))] for _ in WISHES]
    prompts[1] = [*prompts[0][:9], 1, 2]
    wishes = [SamplingParams(seed=seed, max_tokens=18, **wish) for seed, wish in enumerate(WISHES)]
    return prompts, wishes


def told(written: Sequence[Written]) -> list[Any]:
    """Tokens, ends and ranks, to be compared exactly."""

    def ranks(found: Sequence[TokenLogprobs]) -> list[tuple[int, int]]:
        return [(each.token_ids[0], each.rank) for each in found]

    return [(one.token_ids, one.finish_reason, ranks(one.logprobs), ranks(one.prompt_logprobs)) for one in written]


def values(written: Sequence[Written]) -> list[float]:
    """All log-probabilities, which may differ in the last digits."""
    return [value for one in written for each in (*one.prompt_logprobs, *one.logprobs) for value in each.logprobs]


@pytest.fixture(scope="module")
def alone(registry: Registry) -> list[Written]:
    return [generate(engine(registry, SMALL), [prompt], wish)[0] for prompt, wish in zip(*requests(), strict=True)]


@pytest.mark.sampled(5, 3)
@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("how", ["together", "chunked", "tight", "graphs", "graphs that draw", "graphs that filter", "drafts"])
def test_neither_batches_nor_graphs_nor_drafts_change_it(
    registry: Registry, alone: list[Written], how: str, overlapped: bool
) -> None:
    config = replace(SMALL, async_scheduling=overlapped)
    if how == "chunked":
        config = replace(config, max_num_batched_tokens=7)
    graphs = how.startswith("graphs")
    if how == "tight" or graphs:
        config = replace(config, max_model_len=64, kv_cache_memory=13 * 8 * 512, max_num_batched_tokens=40)
    prompts, wishes = requests()
    answers = {tuple(prompt): one.token_ids for prompt, one in zip(prompts, alone, strict=True)}

    def propose(tokens: Sequence[int]) -> list[int]:
        """Right at first, wrong then."""
        for prompt, answer in answers.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                rest = answer[len(tokens) - len(prompt) :]
                return [*rest[: len(tokens) % 4], 1, 2][:5]
        raise AssertionError

    options: dict[str, Any] = {"proposer": propose} if how == "drafts" else {}
    if graphs:
        config = replace(config, attn_backend="walk")
        registry = registering(walk=Walk)
    if how in (inside := {"graphs that draw": DRAWS_INSIDE, "graphs that filter": FILTERS_INSIDE}):
        options["sampling"] = inside[how]
    made = engine(registry, config, **options)
    if graphs:
        made.executor.capture(Again())
    written = generate(made, prompts, wishes)
    assert told(written) == told(alone)
    assert values(written) == pytest.approx(values(alone), abs=1e-4)
    assert (made.stats.num_preemptions > 0) == (how == "tight" or graphs)
    assert (made.stats.num_graph_steps > 20) == graphs
    assert (made.stats.steps_in_pieces["prompt_logprobs"] > 0) == graphs


def test_what_is_done_after_the_model_is_counted_by_reason(registry: Registry) -> None:
    made = engine(registry, replace(SMALL, async_scheduling=True))
    generate(made, [[1, 2, 3]] * 2, [SamplingParams(max_tokens=5), SamplingParams(temperature=0, max_tokens=9)])
    assert not made.stats.steps_after_model
    generate(made, [[1, 2, 3]] * 2, [SamplingParams(top_p=0.5, max_tokens=5), SamplingParams(logprobs=1, max_tokens=9)])
    assert made.stats.steps_after_model == {"top_k or top_p": 5, "logprobs": 9}
    assert not made.stats.steps_waiting
    generate(made, [[1, 2, 3]] * 2, [SamplingParams(logits_processors=[next_is_odd], max_tokens=7), SamplingParams(min_tokens=3)])
    assert made.stats.steps_after_model["logits_processors"] == 7
    assert made.stats.steps_after_model["min_tokens"] in (3, 4)
    assert made.stats.steps_waiting == {"logits_processors": 7}


@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
def test_a_processor_that_raises_ends_its_request_alone(registry: Registry, overlapped: bool) -> None:
    def raises(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 4:
            raise ValueError("no fifth token")
        return logits

    def forgets(output: Sequence[int], logits: torch.Tensor) -> None:
        return None

    def narrows(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits[:10]

    def forbids(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf)

    made = engine(registry, replace(SMALL, async_scheduling=overlapped))
    good = SamplingParams(seed=1, max_tokens=12, logits_processors=[next_is_odd])
    functions = [raises, forgets, narrows, forbids, "refuses"]
    wishes = [replace(good, logits_processors=[each]) for each in functions] + [good, replace(good, logits_processors=())]
    *bad, processed, plain = generate(made, [[1, 2, 3]] * 7, wishes)
    assert [one.finish_reason for one in bad] == ["error"] * 5
    assert [len(one.token_ids) for one in bad] == [4, 0, 0, 0, 0]
    words = ["ValueError: no fifth token", "not None", "shape [50], not a tensor of shape [10]", "leaves no token", "not today"]
    for one, text in zip(bad, words, strict=True):
        assert text in (one.error or "")
    expected = generate(engine(registry, SMALL), [[1, 2, 3]] * 2, wishes[-2:])
    assert [processed.token_ids, plain.token_ids] == tokens_of(expected)
    assert all((a + b) % 2 for a, b in zip([0, *processed.token_ids], processed.token_ids, strict=False))


def test_a_name_that_nobody_registered_is_refused_before_anything_is_queued(registry: Registry) -> None:
    made = engine(registry, SMALL)
    with pytest.raises(
        ConfigError, match=r"logits_processors: needs a function, or a name that a plugin registered \(named, refuses\)"
    ):
        made.add_request("r", made.limits.checked([1], SamplingParams(logits_processors=["nameless"])))
    assert not made.has_unfinished


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"logit_bias": {50: 1.0}}, "logit_bias: needs token ids from 0 to 49, got 50"),
        ({"allowed_token_ids": [3, 99]}, "allowed_token_ids: needs token ids from 0 to 49, got 99"),
        ({"bad_words_token_ids": [[1, 60]]}, "bad_words_token_ids: needs token ids from 0 to 49, got 60"),
        ({"stop_token_ids": [77]}, "stop_token_ids: needs token ids from 0 to 49, got 77"),
        ({"logprobs": 21}, "logprobs: needs at most max_logprobs=20, got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: needs at most max_logprobs=20, got -1"),
    ],
    ids=str,
)
def test_what_the_model_does_not_have_is_refused(registry: Registry, wish: dict[str, Any], words: str) -> None:
    made = engine(registry, SMALL)
    with pytest.raises(ConfigError, match=words):
        made.add_request("r", made.limits.checked([1, 2], SamplingParams(**wish)))
    assert not made.has_unfinished


def reference(tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities after every token, of the model over the whole sequence at once."""
    model = TinyModel()

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        return out[0].transpose(0, 1)

    ids = torch.tensor(tokens)
    return model.compute_logits(model(ids, torch.arange(len(ids)), attention)).log_softmax(-1)


@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, max_num_batched_tokens=5, async_scheduling=True)], ids=["whole", "chunked"]
)
def test_logprobs_are_the_models_own_whatever_shapes_the_draw(registry: Registry, config: EngineConfig) -> None:
    made, random = engine(registry, replace(config, max_logprobs=-1)), Random(8)
    shared = [random.randrange(50) for _ in range(20)]
    prompts = [[*shared, 1], [*shared, 2], [5, 6]]
    wish = {"temperature": 1.4, "top_k": 20, "repetition_penalty": 1.4, "max_tokens": 9, "seed": 4}
    wishes = [SamplingParams(logprobs=k, prompt_logprobs=k, **wish) for k in (3, 0, -1)]
    for _ in range(2):  # the second time over a warm prefix cache
        for prompt, params, one in zip(prompts, wishes, generate(made, prompts, wishes), strict=True):
            expected = reference([*prompt, *one.token_ids])
            k = 50 if params.logprobs == -1 else params.logprobs
            found = [*one.prompt_logprobs, *one.logprobs]
            assert len(one.prompt_logprobs) == len(prompt) - 1
            assert len(one.logprobs) == len(one.token_ids) == 9
            for place, (token, each) in enumerate(zip([*prompt[1:], *one.token_ids], found, strict=True)):
                row = expected[place]
                assert each.token_ids[0] == token
                assert len(each.token_ids) == k + 1
                torch.testing.assert_close(torch.tensor(each.logprobs), row[list(each.token_ids)], rtol=1e-4, atol=1e-4)
                assert each.rank == int((row > row[token] + 1e-5).sum()) + 1
                assert sorted(each.logprobs[1:], reverse=True) == list(each.logprobs[1:])
            assert one.num_cached_tokens == 0, "logits are wanted after every token of the prompt"


@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
def test_the_prompt_of_several_completions_is_computed_once(registry: Registry, overlapped: bool) -> None:
    prompt, config = list(range(3, 42)), replace(SMALL, async_scheduling=overlapped)
    made = engine(registry, config)
    params = SamplingParams(n=5, seed=11, temperature=2.0, max_tokens=10)
    made.add_request("r", made.limits.checked(prompt, params))
    while not any(delta.completion for delta in made.step()):
        pass
    live = sorted(made.scheduler.running, key=lambda seq: seq.index)
    assert len(live) == 5
    shared = live[0].tables[0].pages[: len(prompt) // 8]
    assert all(seq.tables[0].pages[: len(shared)] == shared for seq in live), "full blocks are one another's"
    assert len({seq.tables[0].pages[len(shared)] for seq in live}) == 5, "the part of a block is copied"
    written = drain(made)
    assert made.stats.num_prefill_tokens == len(prompt)
    assert made.stats.num_decode_tokens >= 4
    again = engine(registry, replace(config, enable_prefix_caching=False))
    again.add_request("r", again.limits.checked(prompt, params))
    expected = drain(again)
    assert again.stats.num_prefill_tokens == 5 * len(prompt)
    for key, one in written.items():
        assert expected[key].token_ids[-len(one.token_ids) :] == one.token_ids


def test_completions_wait_for_no_sibling_that_is_gone(registry: Registry) -> None:
    """Aborted, finished at once, or failed: the others go on."""
    made = engine(registry, replace(SMALL, max_num_batched_tokens=8))
    params = SamplingParams(n=3, seed=1, max_tokens=4)
    made.add_request("half", made.limits.checked(list(range(30)), params))
    made.add_request("gone", made.limits.checked(list(range(20)), params))
    made.step()
    made.abort("half", 0)
    made.abort("gone")
    made.add_request("short", made.limits.checked([1, 2, 3], replace(params, max_tokens=1)))
    written = drain(made)
    assert sorted(written) == [("half", 1), ("half", 2), *(("short", index) for index in range(3))]
    assert {len(one.token_ids) for key, one in written.items() if key[0] == "half"} == {4}


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_prompts_logprobs_come_although_its_last_chunk_has_none(registry: Registry, overlapped: bool) -> None:
    made = engine(registry, replace(SMALL, max_num_batched_tokens=8, async_scheduling=overlapped))
    (one,) = generate(made, [list(range(9))], SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1))
    assert [each.token_ids[0] for each in one.prompt_logprobs] == list(range(1, 9))
