"""transformers' generate with Headway's backends: the tokens of its own attention, or an error in one line."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, chunked_causal_mask_function
from transformers.masking_utils import sliding_window_causal_mask_function as sliding

import headway.integrations.transformers  # noqa: F401 -- registers the names
import headway.integrations.transformers as integration
from headway.backends.sdpa import SDPA
from headway.core.contract.errors import ConfigError, HeadwayError, UnsupportedError
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.support import Support
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


def both(model: Any, own: str, call: Callable[[], Any]) -> list[Any]:
    """What a call returns with transformers' own attention and with Headway's."""
    return [(model.set_attn_implementation(implementation), call())[1] for implementation in (own, "headway")]


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
    answers = both(model, own, torch.inference_mode()(lambda: model(**inputs).logits))
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
    assert torch.equal(*both(model, own, lambda: model.generate(**inputs, do_sample=False, max_new_tokens=14, **options)))


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


MODULE = SimpleNamespace(is_causal=True, layer_idx=0)


class Operators(TorchDispatchMode):
    """Counts what is dispatched, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function).removeprefix("aten.").partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def layer(mask: Any, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """A layer's call as transformers makes it; [batch, q_length, heads, dim]."""
    attend: Callable[..., tuple[Tensor, None]] = AttentionInterface()["headway"]
    return attend(MODULE, query, key, value, mask, **{"dropout": 0.0, "scaling": 0.3, **options})[0]


def mask_of(batch: int, queries: int, keys: int, padding: Tensor | None = None, window: int | None = None) -> Any:
    """A step's mask as transformers asks for it; the queries are the last ones."""
    rule = causal_mask_function if window is None else sliding(window)
    make = AttentionMaskInterface()["headway"]
    return make(batch, queries, keys, keys - queries, 0, mask_function=rule, attention_mask=padding, local_size=window)


def tensors(batch: int, queries: int, keys: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value of a layer with 4 and 2 heads of 8 elements."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes]


def exact(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None, window: int | None = None, scale: float = 0.3
) -> Tensor:
    """The same by the definition, in float64; rows of padding are left out by the caller."""
    queries, keys = query.shape[2], key.shape[2]
    at = torch.arange(keys - queries, keys)[:, None]
    seen = torch.arange(keys)[None] <= at
    if window is not None:
        seen &= torch.arange(keys)[None] > at - window
    seen = seen.expand(len(query), 1, queries, keys)
    if padding is not None:
        seen = seen & padding.bool()[:, None, None]
    k, v = (t.double().repeat_interleave(2, 1) for t in (key, value))
    scores = (query.double() @ k.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def right(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_decode_is_planned_once_for_all_layers_with_four_views_each(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[AttentionMetadata] = []
    monkeypatch.setattr(SDPA, "plan", lambda _, metadata: planned.append(metadata))
    monkeypatch.setattr(SDPA, "decode", lambda *_: None)
    mask = mask_of(2, 1, 9, torch.ones(2, 9, dtype=torch.bool)) if masked else None
    layers = [tensors(2, 1, 9, seed) for seed in range(6)]
    layer(mask, *layers[0])
    with Operators() as operators:
        for each in layers[1:]:
            layer(mask, *each)
    assert operators.seen == {"new_empty": 5, "select": 5, "as_strided": 10, "view": 5}
    assert len(planned) == 1


@pytest.mark.parametrize("queries", [1, 5, 9])
def test_another_mask_over_the_same_tensors_is_another_plan(queries: int) -> None:
    each = tensors(2, queries, 9)
    padding = torch.ones(2, 9, dtype=torch.bool)
    for count in (0, 3, 1):
        padding[1, :count] = False  # the same tensor, changed in place
        padding[1, count:] = True
        live = torch.arange(9 - queries, 9) >= count
        found, expected = layer(mask_of(2, queries, 9, padding), *each), exact(*each, padding)
        right(found[0], expected[0])
        right(found[1, live], expected[1, live])
        assert not found[1, ~live].any()


def test_mask_keeps_a_copy_of_the_padding() -> None:
    each, padding = tensors(1, 1, 9), torch.ones(1, 9, dtype=torch.bool)
    padding[0, :4] = False
    then = padding.clone()
    mask = mask_of(1, 1, 9, padding)
    padding.fill_(True)
    right(layer(mask, *each), exact(*each, then))
    assert mask.to("meta") is mask


def test_layers_of_one_mask_that_differ_are_kinds_of_their_own() -> None:
    mask, roomy = mask_of(2, 1, 9), tensors(2, 1, 40, 3)
    for _ in range(2):
        for seed in range(2):
            each = tensors(2, 1, 9, seed)
            right(layer(mask, *each), exact(*each))
            right(layer(mask, *each, scaling=0.7), exact(*each, scale=0.7))
            half = [t.half() for t in each]
            torch.testing.assert_close(layer(mask, *half).double(), exact(*each), rtol=1e-2, atol=1e-2)
            query = each[0]
            views = [t[:, :, 31:] for t in roomy[1:]]  # the end of longer rows, and then the same strides before their end
            right(layer(mask, query, *views), exact(query, *views))
            views = [t[:, :, 5:14] for t in roomy[1:]]
            right(layer(mask, query, *views), exact(query, *views))
            turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in each[1:]]
            right(layer(mask, query, *turned), exact(*each))
            assert not torch.allclose(layer(mask, *each, softcap=0.2).double(), exact(*each), atol=1e-3)
    assert len(mask.visibility.calls) == 7


def test_windows_and_full_attention_take_turns() -> None:
    full, near = mask_of(2, 1, 30), mask_of(2, 1, 30, None, 7)
    for seed in range(4):
        each, window = tensors(2, 1, 30, seed), (None, 7)[seed % 2]
        right(layer((full, near)[seed % 2], *each), exact(*each, None, window))


def test_calls_without_a_mask_of_other_sizes() -> None:
    for batch, queries, keys in ((1, 1, 9), (2, 1, 9), (1, 1, 10), (1, 9, 9), (1, 1, 9), (1, 1, 1)):
        for seed in range(2):
            each = tensors(batch, queries, keys, seed)
            right(layer(None, *each), exact(*each))
    with pytest.raises(ConfigError, match="none for 3 queries of 9 keys"):
        layer(None, *tensors(1, 3, 9))


def test_a_backend_that_cannot_read_blocks_that_overlap_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Support.no("cache", "blocks that follow one another", "gaps between them")
    monkeypatch.setattr(SDPA, "accepts", classmethod(lambda _, cache: answer))
    each = tensors(1, 9, 9)
    right(layer(mask_of(1, 9, 9), *each), exact(*each))  # a prompt reads no cache
    with pytest.raises(UnsupportedError, match="needs blocks that follow one another"):
        layer(mask_of(1, 1, 9), *tensors(1, 1, 9))


def test_a_rule_that_only_looks_like_one_is_tried_out() -> None:
    make = AttentionMaskInterface()["headway"]
    strange = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    mask = make(1, 1, 9, 8, 0, mask_function=strange, attention_mask=None, local_size=None)
    with pytest.raises(ConfigError, match="neither causal nor causal within a window"):
        layer(mask, *tensors(1, 1, 9))
    wrong = make(1, 1, 9, 8, 0, mask_function=sliding(3), attention_mask=None, local_size=4)
    with pytest.raises(ConfigError, match="neither causal nor causal within a window"):
        layer(wrong, *tensors(1, 1, 9))
    plain = make(1, 1, 9, 8, 0, mask_function=lambda _, __, q, k: k <= q, attention_mask=None, local_size=None)
    each = tensors(1, 1, 9)
    right(layer(plain, *each), exact(*each))
