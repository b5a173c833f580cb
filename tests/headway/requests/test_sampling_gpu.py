"""Parameters of requests on a GPU: under graphs and overlap they write what one request after the other writes on a CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import torch

from headway import LLM, SamplingParams, StructuredOutputsParams
from headway.core.engine.data.step import StartedRow
from headway.core.engine.execution.host_rows import HostRows
from headway.core.engine.execution.token_sampler import TokenSampler
from headway.core.sampling.logits_shaper import LogitsShaper, Shaped
from headway.core.sampling.sampler import SHAPING, need_of
from headway.kernels.sampling import fastest_sampling
from tiny_engine import generate

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def odd_after_even(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    logits[(output[-1] if output else 0) % 2 :: 2] = -torch.inf
    return logits


WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"logit_bias": {3: 2.0, 9: -100.0}, "bad_words_token_ids": [[4], [2, 3]]},
    {"allowed_token_ids": list(range(0, 250, 3)), "top_k": 5},
    {"min_tokens": 9, "stop_token_ids": list(range(0, 250, 2))},
    {"top_p": 0.8, "min_p": 0.02, "logprobs": 3},
    {"logits_processors": [odd_after_even], "repetition_penalty": 1.2},
    {"prompt_logprobs": 2, "logprobs": 1, "temperature": 0},
]


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    random = Random(1)
    prompts = [[random.randrange(300) for _ in range(random.randint(2, 90))] for _ in range(40)]
    wishes = [SamplingParams(seed=seed, max_tokens=30, **WISHES[seed % len(WISHES)]) for seed in range(40)]
    return prompts, wishes


@pytest.fixture(scope="module")
def on_cpu(tiny_model_folder: Path) -> LLM:
    return LLM(str(tiny_model_folder), device="cpu", dtype="float32", attn_backend="sdpa.math", kv_cache_memory="16MiB")


def test_a_batch_under_graphs_and_overlap_writes_what_a_cpu_writes_one_by_one(
    on_cpu: LLM, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    prompts, wishes = requests()
    expected = [generate(on_cpu.engine, [prompt], wish)[0] for prompt, wish in zip(prompts, wishes, strict=True)]
    llm = LLM(str(tiny_model_folder), device="cuda", dtype="float32", kv_cache_memory="16MiB")
    written = generate(llm.engine, prompts, wishes)
    same = [one.token_ids == other.token_ids for one, other in zip(written, expected, strict=True)]
    assert sum(same) >= len(same) - 1, [WISHES[n % len(WISHES)] for n, equal in enumerate(same) if not equal]
    for one, other in zip(written, expected, strict=True):
        if one.token_ids == other.token_ids:
            ours = [value for each in (*one.prompt_logprobs, *one.logprobs) for value in each.logprobs]
            theirs = [value for each in (*other.prompt_logprobs, *other.logprobs) for value in each.logprobs]
            assert ours == pytest.approx(theirs, abs=2e-3)
    stats = llm.engine.stats
    assert stats.steps_waiting["logits_processors"] > 0
    assert not stats.compilations, "nothing is compiled for a request"


def test_logits_change_as_on_a_cpu() -> None:
    generator, random = torch.Generator().manual_seed(0), Random(0)
    logits = torch.randn(200, 5000, generator=generator) * 3
    plain = [{**wish, "logits_processors": None} for wish in WISHES if need_of(SamplingParams(**wish)) & SHAPING]
    wishes = [SamplingParams(**random.choice(plain)) for _ in range(200)]
    tokens = [[random.randrange(5000) for _ in range(random.randint(1, 300))] for _ in wishes]
    found = []
    for device in (torch.device("cpu"), CUDA):
        shaper = LogitsShaper(5000, device)
        for row, (wish, known) in enumerate(zip(wishes, tokens, strict=True)):
            shaper.start(row, wish, need_of(wish), known, len(known) // 2, [1, 2])
        at = numpy.arange(200)
        needs = numpy.array([need_of(wish) & SHAPING for wish in wishes], dtype=numpy.int32)
        shaped = Shaped(at, at, numpy.array([len(known) for known in tokens]), needs)
        found.append(shaper.shape(logits.to(device), shaped, None, None).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_choosing_never_waits_for_the_device() -> None:
    """But for what must see the token before."""
    wishes = [SamplingParams(**wish) for wish in WISHES if "logits_processors" not in wish]
    sampler = TokenSampler(fastest_sampling(CUDA, 5000), len(wishes), 5000, CUDA, HostRows(None, {}))
    rows = numpy.arange(len(wishes), dtype=numpy.int32)
    logits = torch.randn(len(wishes), 5000, device=CUDA)
    started = [StartedRow(row, wish, row, (1, 2, 3), 2, (7,)) for row, wish in enumerate(wishes)]
    sampler.update(started)
    sampler.sample(logits, rows, numpy.full(len(wishes), 3, dtype=numpy.int32))  # whatever is loaded at first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.update(started)
        for place in (3, 4, 5):
            sampler.sample(logits, rows, numpy.full(len(wishes), place, dtype=numpy.int32))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_structured_outputs_hold_on_a_gpu(tiny_model_folder: Path) -> None:
    pytest.importorskip("llguidance")
    llm = LLM(str(tiny_model_folder), device="cuda", dtype="float32", kv_cache_memory="16MiB")
    form = StructuredOutputsParams(regex=r"[a-d]{3,9}:[0-9]{2}")
    wishes = [
        SamplingParams(seed=n, max_tokens=40, structured_outputs=form if n % 3 else None, repetition_penalty=1 + n % 2 / 10)
        for n in range(24)
    ]
    outputs = llm.generate([[n + 1, 5] for n in range(24)], wishes, use_tqdm=False)
    for number, output in enumerate(outputs):
        if number % 3:
            assert re.fullmatch(r"[a-d]{3,9}:[0-9]{2}", output.outputs[0].text)
    assert llm.engine.stats.steps_waiting["structured_outputs"] > 0
