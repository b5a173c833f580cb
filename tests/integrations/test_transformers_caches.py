"""Caches that are cut, repeated and put into another order, and models in turn: the tokens of transformers' own attention."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import headway.integrations.transformers  # noqa: F401 -- registers the names
from tiny_transformers import a_model, prompts
from transformers_release import needs

needs("generate with Headway's attention")


def logits_after_a_crop(model: Any) -> Tensor:
    """A step, taken back, and another of the same length."""
    cache = DynamicCache(config=model.config)
    found = []
    with torch.inference_mode():
        model(prompts((0, 0), 9)["input_ids"], past_key_values=cache)
        for token in (5, 6, 7):
            found.append(model(torch.full((2, 1), token), past_key_values=cache).logits)
            cache.crop(-1)
        found.append(model(torch.tensor([[8, 9, 10], [3, 2, 1]]), past_key_values=cache).logits[:, -1:])
    return torch.stack(found)


def test_a_cropped_cache_forgets_what_was_taken_back() -> None:
    model, _ = a_model("qwen3")
    expected = logits_after_a_crop(model)
    model.set_attn_implementation("headway")
    torch.testing.assert_close(logits_after_a_crop(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2, "early_stopping": True}, {"prompt_lookup_num_tokens": 3}],
    ids=["beams", "returned beams", "prompt lookup"],
)
def test_caches_in_another_order_and_rolled_back(name: str, options: dict[str, Any]) -> None:
    model, own = a_model(name)
    inputs = prompts((0,) if "prompt_lookup_num_tokens" in options else (4, 0))
    answers = []
    for implementation in (own, "headway"):
        model.set_attn_implementation(implementation)
        answers.append(model.generate(**inputs, do_sample=False, max_new_tokens=14, **options))
    assert torch.equal(*answers)


@pytest.mark.slow
def test_two_models_take_turns_in_a_process_and_run_in_two_threads() -> None:
    models = [a_model("qwen3"), a_model("gemma2")]
    inputs = [prompts((0, 5)), prompts((3, 0, 1), 17)]
    options = {"do_sample": False, "max_new_tokens": 14}
    expected = [model.generate(**each, **options) for (model, _), each in zip(models, inputs, strict=True)]
    for model, _ in models:
        model.set_attn_implementation("headway")

    def answers(turn: int) -> None:
        for number in (turn % 2, 1 - turn % 2):
            assert torch.equal(models[number][0].generate(**inputs[number], **options), expected[number])

    answers(0)
    answers(1)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(answers, turn) for turn in range(4)]:
            done.result()


@pytest.mark.slow
def test_under_torch_compile_attention_stands_apart() -> None:
    model, _ = a_model("qwen3")
    inputs = prompts((2, 0))
    with torch.inference_mode():
        expected = model(**inputs).logits
        model.set_attn_implementation("headway")
        found = torch.compile(model, backend="eager")(**inputs).logits
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0, 2:], expected[0, 2:], rtol=1e-4, atol=1e-4)
