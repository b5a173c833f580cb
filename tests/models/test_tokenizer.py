"""A model folder's tokenizer is the one that transformers takes, without the import of the model's configuration class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from headway.core.system.files import cache_folder
from headway.models.checkpoints.tokenizer import PlainTokenizer, read_tokenizer, transformers_tokenizer
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
    """Return the comparable results of a tokenizer; None if it cannot be loaded."""
    try:
        tokenizer = load(folder)
    except Exception:
        return None
    try:
        ids = tokenizer.encode(TEXT)
        told = ids, tokenizer.decode(ids)
    except Exception as error:  # not every class finds its own words in this vocabulary
        told = str(error)
    return type(transformers_tokenizer(tokenizer)), told, tokenizer.special_tokens_map, tokenizer.model_max_length


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_transformers_takes(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    change(folder / "config.json", model_type=kind)
    found = set()
    for name in CLASSES:
        change(folder / "tokenizer_config.json", tokenizer_class=name)
        expected = outcome(AutoTokenizer.from_pretrained, folder)
        assert outcome(read_tokenizer, folder) == outcome(read_tokenizer, folder) == expected, name
        found.add(expected is None)
    assert False in found


TEMPLATE = "{% for m in messages %}{{ '<' + m.role + '>' + m['content'].strip() + eos_token }}\n{% endfor %}"
PLAIN = (
    TEMPLATE,
    TEMPLATE + "{% if add_generation_prompt %}<assistant>{% endif %}",
    "{%- for m in messages %}{% break %}{% endfor -%} x",
)
RICH = (
    TEMPLATE + "{{ tools | length }}",
    TEMPLATE + "{{ messages | tojson }}",
    "{% set x = namespace(a=1) %}{{ x.a }}",
    TEMPLATE + "{{ ",
)
CHAT = [{"role": "system", "content": " fox "}, {"role": "user", "content": "the <eos> quick\n"}]


@pytest.mark.parametrize("template", [None, *PLAIN])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_a_plain_one_says_what_transformers_says(tmp_path: Path, name: str, template: str | None) -> None:
    folder = save_tiny_model(tmp_path)
    change(folder / "tokenizer_config.json", tokenizer_class=name)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    theirs, plain = read_tokenizer(folder), read_tokenizer(folder)
    assert not isinstance(theirs, PlainTokenizer)
    assert isinstance(plain, PlainTokenizer)
    assert len(plain) == len(theirs)
    names = [f"{kind}_token" for kind in ("bos", "eos", "pad", "unk")]
    for attribute in (
        *names,
        *(f"{each}_id" for each in names),
        "special_tokens_map",
        "chat_template",
        "model_max_length",
        "is_fast",
    ):
        assert getattr(plain, attribute) == getattr(theirs, attribute), attribute
    assert plain.get_vocab() == theirs.get_vocab()
    assert {i: str(each) for i, each in plain.added_tokens_decoder.items()} == {
        i: str(each) for i, each in theirs.added_tokens_decoder.items()
    }
    for text in (TEXT, "", "<eos> quick<eos>", "\0 \N{PILE OF POO} e\u0301"):
        ids = theirs.encode(text)
        assert plain(text)["input_ids"] == plain.encode(text) == ids
        assert plain.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert plain([text, text])["input_ids"] == [ids, ids]
        for skip in (False, True):
            assert plain.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert plain.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert plain.convert_ids_to_tokens(3) == theirs.convert_ids_to_tokens(3)
    assert plain.padding_side == theirs.padding_side  # one that only transformers has
    if template is not None:
        for options in (
            {"add_generation_prompt": True},
            {"tools": [{"type": "function"}]},
            {"chat_template": "{{ messages | length }}"},
            {"continue_final_message": True, "add_generation_prompt": False},
            {"add_generation_prompt": False, "tools": None, "x": 3},
        ):
            for chat in (CHAT, [{**CHAT[1], "content": None, "tool_calls": []}], [*CHAT, {"role": "user", "content": 5}]):
                assert result(plain, chat, options) == result(theirs, chat, options), (chat, options)


def result(tokenizer: Any, chat: list[dict[str, Any]], options: dict[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template(chat, **options, tokenize=False))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("changes", [{"clean_up_tokenization_spaces": True}, {"split_special_tokens": True}], ids=str)
def test_one_that_changes_texts_is_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = save_tiny_model(tmp_path)
    change(folder / "tokenizer_config.json", tokenizer_class="TokenizersBackend", **changes)
    assert not any(isinstance(read_tokenizer(folder), PlainTokenizer) for _ in range(2))


@pytest.mark.parametrize("template", RICH)
def test_one_whose_template_needs_more_is_transformers(tmp_path: Path, template: str) -> None:
    folder = save_tiny_model(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    assert not any(isinstance(read_tokenizer(folder), PlainTokenizer) for _ in range(2))


def test_a_kept_one_is_read_anew_when_its_files_change(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    read_tokenizer(folder)
    assert isinstance(read_tokenizer(folder), PlainTokenizer)
    change(folder / "tokenizer_config.json", pad_token="<pad>")
    assert not isinstance(read_tokenizer(folder), PlainTokenizer)
    assert read_tokenizer(folder).pad_token == "<pad>"
    for damage in (lambda content: content[:100], lambda content: content.replace(b"eos", b"sos")):
        for cached in (cache_folder() / "tokenizers").glob(f"{folder.name}-*"):
            cached.write_bytes(damage(cached.read_bytes()))
        assert not isinstance(read_tokenizer(folder), PlainTokenizer)
        assert isinstance(read_tokenizer(folder), PlainTokenizer)


def test_a_template_that_moves_is_another_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    read_tokenizer(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").rename(folder / "additional_chat_templates" / "chat_template.jinja")
    assert not isinstance(read_tokenizer(folder), PlainTokenizer)


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
