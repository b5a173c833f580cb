"""docs/models.md says which architectures run, as tiny models of each show."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from architecture_table import BEGIN, END, adapt, outcomes, render, replace_in, tiny
from engine_logits import logits_of, watched
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineParts, make_engine
from headway.core.sampling.params import SamplingParams
from headway.models.families.families import FAMILIES
from headway.registry import Registry
from tiny_engine import generate

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
ROWS = {name: (native, adapter) for name, native, adapter in re.findall(r"^\| `(\w+)` \| (✓|–) \| (✓|–) \|$", PAGE, re.MULTILINE)}

SAME_RELEASE = pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in PAGE, reason="the page is of another release of transformers"
)


def test_the_page_has_what_the_decoder_computes() -> None:
    assert {name for name, (native, _) in ROWS.items() if native == "✓"} == {family.architecture for family in FAMILIES.values()}


def test_a_table_replaces_the_one_before() -> None:
    assert replace_in(f"a {BEGIN} b {END} c", "new") == f"a {BEGIN}\n\nnew\n\n{END} c"


@pytest.mark.slow
@SAME_RELEASE
def test_the_page_says_what_tiny_models_show() -> None:
    assert replace_in(PAGE, render(outcomes())) == PAGE, "run: python docs/_tools/architecture_table.py --docs docs/models.md"


def class_of(architecture: str) -> tuple[Any, Any]:
    """The class of a model, and of its configuration for text alone."""
    found = [
        (model_class, config_class)
        for config_class in CONFIG_MAPPING.values()
        if (model_class := MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)) is not None
        and model_class.__name__ == architecture
    ]
    return next((pair for pair in found if tiny(*pair) is not None), found[0])


@pytest.mark.slow
@SAME_RELEASE
@pytest.mark.parametrize("architecture", [name for name, (_, adapter) in ROWS.items() if adapter == "✓"])
def test_what_the_page_accepts_computes_what_transformers_does(registry: Registry, architecture: str) -> None:
    torch.manual_seed(0)
    model = tiny(*class_of(architecture))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    config = EngineConfig(attn_backend="sdpa", max_num_batched_tokens=16, max_num_seqs=8, block_size=8, kv_cache_memory="16MiB")
    adapted = adapt(model)
    engine = make_engine(EngineParts(model=adapted, source=registry, config=config))
    take = watched(engine)
    prompts = [torch.randint(1, adapted.vocab_size, (length,)).tolist() for length in (13, 10, 31)]
    for _ in range(2):
        written = generate(engine, prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        logits = take()
        for prompt, one in zip(prompts, written, strict=True):
            assert one.error is None
            expected = logits_of(reference, prompt, one.token_ids)
            found = logits[tuple(one.token_ids)]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))
