"""Every configuration field that transformers reads is computed as transformers computes it, or refused by its name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

import hybrid_models
import plain_models
from config_changes import changes, fields_read
from dense_attention import DenseAttention
from engine_logits import save_random
from headway import LLM
from headway.core.contract.errors import HeadwayError
from headway.models.families.families import FAMILIES
from headway.models.loader import load_model
from tiny_encoders import EMBEDDERS, save, vector
from transformers_release import needs

ROWS: Mapping[str, PretrainedConfig] = {**plain_models.ROWS, **hybrid_models.ROWS}
ENCODERS = ("bert", "modernbert", "roberta", "xlm-roberta")
NUM_TOKENS = 40
"""More than any window."""
SAMPLE: tuple[tuple[str, str, Any, str], ...] = (
    ("minimax", "sliding_window", 5, "equal"),
    ("qwen3_5", "hidden_act", "gelu", "refused"),
    ("nemotron_h", "mamba_hidden_act", "gelu", "refused"),
    ("gpt2", "activation_function", "quick_gelu", "refused"),
    ("deepseek_v2", "mlp_bias", True, "refused"),
    ("deepseek_v2", "n_shared_experts", 0, "equal"),
    ("nemotron_h, experts", "mlp_bias", True, "refused"),
    ("mixtral", "hidden_act", "gelu", "refused"),
    ("gemma2", "final_logit_softcapping", 2.0, "equal"),
)
"""Row, field and value, and what becomes of it: one of each kind, for every day."""

Pair = Callable[[PretrainedConfig, Path], tuple[Tensor, Callable[[], Tensor]]]
"""What transformers computes with a model of random weights, which is saved in a folder, and what makes Headway compute it."""


def decoders(config: PretrainedConfig, folder: Path) -> tuple[Tensor, Callable[[], Tensor]]:
    """Logits of one text."""
    ids = torch.randint(3, 90, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    reference = save_random(config, folder)

    def ours() -> Tensor:
        model: Any = load_model(str(folder), "float32", skip_tokenizer_init=True, model_impl="headway").decoder
        attention = DenseAttention(model)
        attention.begin([(0, NUM_TOKENS)])
        return model.compute_logits(model(ids, torch.arange(NUM_TOKENS), attention))

    return reference(ids[None], use_cache=False).logits[0], ours


def encoders(config: PretrainedConfig, folder: Path) -> tuple[Tensor, Callable[[], Tensor]]:
    """The embedding of one text."""
    ids = [*range(3, 3 + NUM_TOKENS // 2)]
    name = config.model_type
    reference = save(EMBEDDERS[name][0], config, folder)

    def ours() -> Tensor:
        llm = LLM(str(folder), autotune_budget=0)
        return torch.tensor(llm.embed({"prompt_token_ids": ids}, use_tqdm=False)[0].outputs.embedding)

    return vector(reference, ids, EMBEDDERS[name][2]), ours


def verdict(pair: Pair, config: PretrainedConfig, field: str, value: Any, folder: Path) -> str:
    """Return equal, refused, none (transformers makes no model of it, or one whose logits are no numbers), or what is wrong."""
    stated = json.dumps({**json.loads(config.to_json_string(use_diff=False)), field: value})
    (folder / "config.json").write_text(stated)
    with torch.inference_mode():
        try:
            expected, ours = pair(AutoConfig.from_pretrained(folder), folder)
        except Exception:  # whatever transformers raises for values that do not go together
            return "none"
        (folder / "config.json").write_text(stated)
        try:
            found = ours()
        except HeadwayError as error:
            return _refused(error, field, value, stated, folder)
    if not expected.isfinite().all():
        return "none"
    apart = float((found - expected).abs().max())
    return "equal" if apart < 1e-4 else f"{apart:.2g} apart"


def _refused(error: HeadwayError, field: str, value: Any, stated: str, folder: Path) -> str:
    """The verdict of a refusal. It names the field, or one that does not go with the field's new value."""
    config = AutoConfig.from_pretrained(folder)
    names = {field, *_keys(value), *_keys(json.loads(stated)), *config.attribute_map, *config.attribute_map.values()}
    named = re.search(r"(\w+)(: needs| needs|=)", str(error))
    if named is not None and named[1] in names:
        return "refused"
    if re.search(r"needs shape .* by config.json, got", str(error)):
        return "refused"  # transformers writes three convolutions of Olmo-Hybrid in equal thirds, whatever their sizes
    return f"refused without the field's name: {error}"


def _keys(value: object) -> Iterator[str]:
    for key, each in value.items() if isinstance(value, dict) else ():
        yield key
        yield from _keys(each)


@pytest.mark.parametrize(("name", "field", "value", "expected"), SAMPLE, ids=lambda value: str(value))
def test_a_field_is_computed_or_refused_by_name(tmp_path: Path, name: str, field: str, value: Any, expected: str) -> None:
    needs(FAMILIES[ROWS[name].model_type].architecture)
    assert verdict(decoders, ROWS[name], field, value, tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ROWS, *ENCODERS])
def test_each_field_that_transformers_reads_is_computed_or_refused_by_name(tmp_path: Path, name: str) -> None:
    if name in ENCODERS:
        model_class, config, _ = EMBEDDERS[name]
        pair: Pair = encoders
    else:
        config, pair = ROWS[name], decoders
        needs(FAMILIES[config.model_type].architecture)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    verdicts = {}
    for field in fields_read(type(config), model_class):
        for number, value in enumerate(changes(config, field)):
            folder = tmp_path / f"{field}-{number}"
            folder.mkdir()
            verdicts[field, str(value)] = verdict(pair, config, field, value, folder)
    wrong = {change: found for change, found in verdicts.items() if found not in ("equal", "refused", "none")}
    assert not wrong
    assert Counter(verdicts.values())["equal"] > 4, verdicts
