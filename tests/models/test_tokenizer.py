"""A model folder's tokenizer is the one that transformers takes, without the import of the model's configuration class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headway.models.loader import read_tokenizer
from sandbox import run_python, save_tiny_model

TEXT = "the quick fox, über naïve 12345"
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "phi3", "glm4", "olmo2")
CLASSES = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "LlamaTokenizerFast",
    "LlamaTokenizer",
    "Qwen2Tokenizer",
    "GemmaTokenizer",
)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def outcome(load: Any, folder: Path) -> object:
    """What there is to compare of a tokenizer; None: it cannot be loaded."""
    try:
        tokenizer = load(folder)
    except Exception:
        return None
    try:
        ids = tokenizer.encode(TEXT)
        told = ids, tokenizer.decode(ids)
    except Exception as error:  # not every class finds its own words in this vocabulary
        told = str(error)
    return type(tokenizer), told, tokenizer.special_tokens_map, tokenizer.model_max_length


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_transformers_takes(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    change(folder / "config.json", model_type=kind)
    found = set()
    for name in CLASSES:
        change(folder / "tokenizer_config.json", tokenizer_class=name)
        expected = outcome(AutoTokenizer.from_pretrained, folder)
        assert outcome(read_tokenizer, folder) == expected, name
        found.add(expected is None)
    assert False in found


@pytest.mark.slow
def test_a_start_imports_neither_distributed_tensors_nor_a_compiler(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    code = f"""
import sys
from headway import LLM
LLM({str(folder)!r}, device="cpu", autotune_budget=0).generate("the quick fox", use_tqdm=False)
assert "torch" in sys.modules
heavy = {{"torch.distributed.tensor", "torch._dynamo", "torch._inductor", "accelerate"}} & set(sys.modules)
assert not heavy, heavy
"""
    result = run_python("-c", code, cwd=tmp_path)
    assert result.code == 0, result
