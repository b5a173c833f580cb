"""Tokens of decoders whose ranks are processes, over gloo: every family's are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hybrid_models
import plain_models
from engine_logits import save_random
from headway.core.sampling.params import SamplingParams
from headway.models.families.families import FAMILIES
from quantized_models import FORMATS, GPT_OSS, QWEN3_MOE, save_both, save_mxfp4
from ranked_decoder import decoder_engine
from run_engine import Written, drain
from transformers_release import needs

ROWS = {**plain_models.ROWS, **hybrid_models.ROWS}
EVERY_DAY = {"qwen3_next"}
"""With experts, and a state beside attention."""
OFTEN = {
    2: {
        "qwen3_moe",
        "gemma3",
        "gpt2",
        "gpt_oss",
        "phi3",
        "olmo2",
        "deepseek_v3",
        "falcon_h1",
        "kimi_linear",
        "minimax",
        "jamba",
        "lfm2",
    },
    4: {"llama", "deepseek_v3", "nemotron_h, experts", "qwen3_next"},
}
"""Those of the slow tests, by the number of ranks: each is divided in another way. Logits of all are compared in test_cut.py, and
the others' tokens in `make soak`."""


def _marks(name: str, size: int) -> tuple[pytest.MarkDecorator, ...]:
    if size == 2 and name in EVERY_DAY:
        return ()
    return (pytest.mark.slow,) if name in OFTEN[size] else (pytest.mark.slow, pytest.mark.soak)


CASES = [pytest.param(name, size, marks=_marks(name, size)) for size in OFTEN for name in ROWS]
WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 1.2, "n": 2},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
    {"top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0, "prompt_logprobs": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), CASES)
def test_several_processes_write_what_one_writes(tmp_path: Path, name: str, size: int) -> None:
    needs(FAMILIES[ROWS[name].model_type].architecture)
    save_random(ROWS[name], tmp_path)
    expected, found = write(tmp_path, 1), write(tmp_path, size)
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        assert found[key].token_ids == one.token_ids, key
        for mine, theirs in zip(
            [*found[key].logprobs, *found[key].prompt_logprobs], [*one.logprobs, *one.prompt_logprobs], strict=True
        ):
            assert mine.token_ids == theirs.token_ids
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe, fp8 blocks", "gpt_oss, mxfp4"])
def test_two_processes_read_their_parts_of_quantised_experts(tmp_path: Path, name: str) -> None:
    if name == "gpt_oss, mxfp4":
        folder = save_mxfp4(tmp_path, GPT_OSS)[0]
    else:
        folder = save_both(tmp_path, FORMATS["fp8 blocks"], QWEN3_MOE, plain=lambda module: module.endswith("mlp.gate"))[0]
    expected, found = write(folder, 1), write(folder, 2)
    assert {key: each.token_ids for key, each in found.items()} == {key: each.token_ids for key, each in expected.items()}


def write(folder: Path, size: int) -> dict[tuple[str, int], Written]:
    """What an engine of so many ranks writes after prompts of which some are longer than a step."""
    engine = decoder_engine(folder, size)
    try:
        vocab_size = engine.limits.vocab_size
        for number, wish in enumerate(WISHES):
            prompt = [3 + (7 * place + number) % (vocab_size - 7) for place in range(5 + 9 * number)]
            params = SamplingParams(max_tokens=8, seed=number, ignore_eos=True, **wish)
            engine.add_request(str(number), engine.limits.checked(prompt, params))
        return drain(engine)
    finally:
        engine.executor.shutdown()
