"""transformers' generate with Headway's backends: the tokens of its own attention, or an error in one line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import headway.integrations.transformers as integration
from headway.core.contract.errors import ConfigError, HeadwayError
from tiny_transformers import CONFIGS, a_model, prompts, same
from transformers_release import needs

needs("generate with Headway's attention")

EVERY_DAY = [pytest.param(name, marks=[] if name == "gemma2" else pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", EVERY_DAY)
def test_padded_prompts_give_the_same_tokens(name: str, cache: str) -> None:
    model, own = a_model(name)
    same(model, own, "headway", prompts((5, 0, 1)), cache_implementation=cache)


@pytest.mark.slow
def test_a_backend_by_name_and_a_pair() -> None:
    model, own = a_model("gemma2")
    for implementation in ("headway:SDPA.MATH", integration.register("prefill=sdpa,decode=sdpa.math")):
        same(model, own, implementation, prompts((0,)))


def test_a_second_turn_goes_on_with_the_cache_of_the_first() -> None:
    model, own = a_model("gemma2")
    answers = []
    for implementation in (own, "headway"):
        model.set_attn_implementation(implementation)
        first = model.generate(**prompts((0, 3)), do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, torch.full((2, 5), 7)], 1)
        mask = torch.cat([prompts((0, 3))["attention_mask"], torch.ones(2, 11, dtype=torch.int64)], 1)
        more = {"past_key_values": first.past_key_values, "attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
        answers.append(model.generate(ids, **more))
    assert torch.equal(*answers)


@pytest.mark.slow  # a thread of transformers' own
@pytest.mark.parametrize("name", CONFIGS)
def test_continuous_batching_gives_the_same_tokens(name: str) -> None:
    needs("continuous batching with Headway's attention")
    from transformers import ContinuousBatchingConfig

    model, own = a_model(name)
    generator = torch.Generator().manual_seed(2)
    requests = [torch.randint(1, 97, (count,), generator=generator).tolist() for count in (5, 17, 9)]
    wanted = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = []
    for implementation in (own, "headway"):
        model.set_attn_implementation(implementation)
        config = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=24, page_size=16)
        found = model.generate_batch(requests, generation_config=wanted, continuous_batching_config=config, progress_bar=False)
        answers.append([found[key].generated_tokens for key in sorted(found)])
    assert model.config._attn_implementation == "headway"
    assert answers[0] == answers[1]
    assert all(len(tokens) == 8 for tokens in answers[1])


def test_padding_behind_a_prompt_changes_none_of_its_tokens() -> None:
    model, own = a_model("qwen3")
    inputs = prompts((0, 0))
    inputs["attention_mask"][1, 9:] = 0
    answers = []
    for implementation in (own, "headway"):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            answers.append(model(**inputs).logits)
    torch.testing.assert_close(answers[0][0], answers[1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(answers[0][1, :9], answers[1][1, :9], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        ({"attention_mask": torch.ones(1, 1, 13, 13, dtype=torch.bool)}, {}, "a mask of its own"),
        ({"attention_mask": torch.tensor([[1] * 6 + [0] * 2 + [1] * 5])}, {}, "padding inside it"),
        (
            {"position_ids": torch.tensor([[*range(6), *range(7)]]), "attention_mask": None},
            {"use_cache": False},
            "packed sequences",
        ),
        ({}, {"output_attentions": True}, "output_attentions"),
    ],
    ids=["a mask of 4 dimensions", "padding inside", "packed sequences", "attention weights"],
)
def test_what_headway_does_not_compute_is_an_error_in_one_line(
    inputs: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    model, _ = a_model("qwen3")
    model.set_attn_implementation("headway")
    with torch.inference_mode(), pytest.raises(HeadwayError, match=words) as error:
        model(**{**prompts((0,)), **inputs}, **options)
    assert "\n" not in str(error.value)


def test_training_is_refused() -> None:
    model, _ = a_model("qwen3")
    model.set_attn_implementation("headway")
    with pytest.raises(ConfigError, match="needs inference, got gradients"):
        model(**prompts((0,)))
    gpt2, _ = a_model("gpt2")
    gpt2.set_attn_implementation("headway")
    with torch.inference_mode(), pytest.raises(ConfigError, match="dropout"):
        gpt2.train()(**prompts((0,)))


def test_every_backend_has_a_name_that_transformers_accepts() -> None:
    names = integration.names()
    assert names["headway"] == "auto"
    assert names["headway:triton"] == "triton"
    assert names["headway:FLASH_ATTN_3"] == "flash_attn_3"
    assert not any("flash" in name for name in names)
    with pytest.raises(HeadwayError, match="nobody registered"):
        integration.register("nothing")


@pytest.mark.slow
def test_another_transformers_is_refused_in_one_line() -> None:
    code = """
import transformers.masking_utils as masks
masks.sdpa_mask = lambda mask: mask
try: import headway.integrations.transformers
except ValueError as error: print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = found.stdout.strip().splitlines()
    assert "needs transformers 5.17 to 5.24" in line


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_says_the_same() -> None:
    from transformers import AutoTokenizer

    from headway.models.checkpoints.locate import locate

    folder = locate("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    inputs = dict(
        tokenizer(["The capital of France is", "Once upon a time, in a", "def fibonacci(n):"], return_tensors="pt", padding=True)
    )
    for cache in ("dynamic", "static"):
        same(model, "sdpa", "headway", inputs, max_new_tokens=24, cache_implementation=cache)
