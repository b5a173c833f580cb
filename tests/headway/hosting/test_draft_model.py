"""A draft model guesses and the larger model verifies: the tokens are those of the larger model alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway import LLM, SamplingParams
from headway.core.contract.errors import ConfigError
from headway.hosting.assembly import DraftModel

OPTIONS: dict[str, Any] = {"kv_cache_memory": "8MiB", "num_threads": 1, "max_num_seqs": 8, "autotune_budget": 0}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, max_tokens=30, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=1.2, logprobs=1),
]
PROMPTS = [[1, 2, 3, 4], [9, 8], list(range(1, 40))]


def spoiled(folder: Path, to: Path, share: float) -> Path:
    """A copy of a model with noise on its weights: it guesses some tokens right."""
    shutil.copytree(folder, to)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    noisy = {name: each + share * each.std() * torch.randn(each.shape, generator=generator) for name, each in weights.items()}
    save_file(noisy if share else weights, to / "model.safetensors")
    return to


def written(llm: LLM) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(tiny_model_folder: Path) -> list[list[list[int]]]:
    return written(LLM(str(tiny_model_folder), **OPTIONS))


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_tokens_are_those_without(tiny_model_folder: Path, tmp_path: Path, plain: list[list[list[int]]], share: float) -> None:
    draft = spoiled(tiny_model_folder, tmp_path / "draft", share)
    llm = LLM(str(tiny_model_folder), speculative_model=str(draft), num_speculative_tokens=4, **OPTIONS)
    assert written(llm) == plain
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
    with pytest.raises(ConfigError, match="speculative_model: needs tensor_parallel_size=1, got 2"):
        LLM(str(tiny_model_folder), speculative_model=str(other), tensor_parallel_size=2, **OPTIONS)
