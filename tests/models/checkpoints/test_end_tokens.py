"""The tokens that end an answer are all those that a model's files, its tokenizer and its chat template name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway import LLM, SamplingParams, StructuredOutputsParams
from headway.core.chat.template import token_after_answer
from headway.core.contract.errors import ModelError
from headway.models.checkpoints.tokenizer import read_tokenizer
from headway.models.loader import LoadedModel, load_model
from headway.server.options import ServerOptions
from sandbox import save_tiny_model
from server_thread import running

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|return|>", "<|user|>", "<|assistant|>", "<pad>"]
"""With the ids 1 to 6, after <eos>."""
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LAST_DIFFERS = "{% for m in messages %}<|user|>{{ m.content }}{{ '<|return|>' if loop.last else '<|im_end|>' }}{% endfor %}"
HEADERS = "{% for m in messages %}{{ '<|' + m.role + '|>' }}\n{{ m.content | trim }}{% endfor %}"
SPACED = "{% for m in messages %}[{{ m.content }} {{ '<|im_end|>' }}]{% endfor %}"
WORDS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n###{% endfor %}<|im_end|>"
REFUSES = "{{ raise_exception('no conversations today') }}<|im_end|>"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("made"), special=SPECIAL)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A model whose files name no end yet; a change of one of its files is one of its own."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return write(tmp_path, config={"eos_token_id": None}, generation_config={}, tokenizer_config={"eos_token": None})


def write(folder: Path, **files: dict[str, Any] | None) -> Path:
    """Change values of files; None: remove the file."""
    for name, values in files.items():
        path = folder / f"{name}.json"
        kept = json.loads(path.read_text()) if name != "generation_config" else {}
        path.unlink()
        if values is not None:
            path.write_text(json.dumps({**kept, **values}))
    return folder


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(str(folder), device="cpu", load_format="dummy", **options)


def test_all_sources_are_united_and_told_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(folder).eos_token_ids == frozenset()
    write(folder, config={"eos_token_id": [9]}, generation_config={"eos_token_id": 8}, tokenizer_config={"eos_token": "<eos>"})
    (folder / "chat_template.jinja").write_text(CHATML)
    with caplog.at_level(logging.INFO, "headway"):
        assert load(folder).eos_token_ids == {0, 2, 8, 9}
    (line,) = [record.getMessage() for record in caplog.records if "end an answer" in record.getMessage()]
    for told in ("0 '<eos>' (tokenizer)", "2 '<|im_end|>' (chat template)", "8 ", "(generation_config.json)", "(config.json)"):
        assert told in line
    assert load(folder, skip_tokenizer_init=True).eos_token_ids == {8, 9}
    assert load(folder, model_impl="transformers").eos_token_ids == {0, 2, 8, 9}


def test_a_token_that_several_places_name_counts_once(folder: Path) -> None:
    write(
        folder,
        config={"eos_token_id": 2},
        generation_config={"eos_token_id": [2, 2]},
        tokenizer_config={"eos_token": "<|im_end|>"},
    )
    assert load(folder).eos_token_ids == {2}


@pytest.mark.parametrize(
    ("template", "token"),
    [(CHATML, 2), (LAST_DIFFERS, 3), (HEADERS, 4), (SPACED, 2), (WORDS, None), (REFUSES, None), ("{% broken", None)],
)
def test_the_control_token_after_an_answer(made: Path, template: str, token: int | None) -> None:
    tokenizer = read_tokenizer(made)
    assert token_after_answer(tokenizer) is None, "there is no template"
    assert token_after_answer(tokenizer, template) == token
    tokenizer.chat_template = template
    assert token_after_answer(tokenizer) == token


@pytest.mark.parametrize("value", ["<eos>", 2.0, True, -1, [[2]], [2, None], {"id": 2}, [False]], ids=str)
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_what_is_no_token_id_is_refused_with_the_file(folder: Path, file: str, value: object) -> None:
    write(folder, **{file: {"eos_token_id": value}})
    with pytest.raises(ModelError, match=rf"{file}\.json.*eos_token_id|eos_token_id.*{file}\.json"):
        load(folder)


def test_tokens_beyond_the_vocabulary_are_left_out_with_a_word(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, config={"eos_token_id": [2, 10**30]}, generation_config={"eos_token_id": []})
    write(folder, tokenizer_config={"eos_token": "<not in the vocabulary>"})
    assert load(folder).eos_token_ids == {2}
    assert caplog.text.count("outside the vocabulary") == 2


def test_the_default_of_a_class_counts_only_where_nothing_is_named(folder: Path) -> None:
    kept = json.loads((folder / "config.json").read_text())
    del kept["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(kept))
    assert load(folder).eos_token_ids == {2}, "that of LlamaConfig"
    write(folder, generation_config={"eos_token_id": 8})
    assert load(folder).eos_token_ids == {8}, "2 may be any word of this vocabulary"
    write(folder, generation_config={"eos_token_id": None})
    assert load(folder).eos_token_ids == frozenset()


def test_an_answer_ends_at_the_token_after_a_turn(folder: Path) -> None:
    """Also with guesses and after a form; and it does not where ends are ignored."""
    write(folder, config={"eos_token_id": 8}, tokenizer_config={"eos_token": "<eos>"})
    (folder / "chat_template.jinja").write_text(CHATML)
    llm = LLM(str(folder), kv_cache_memory="8MiB", num_threads=1, speculate="suffix")

    def ended(**more: Any) -> tuple[list[int], str | None, object]:
        params = SamplingParams(temperature=0, max_tokens=5, logit_bias={2: 100.0}, **more)
        (output,) = llm.chat([{"role": "user", "content": "the fox"}], params, use_tqdm=False)[0].outputs
        return output.token_ids, output.finish_reason, output.stop_reason

    assert ended() == ([2], "stop", None)
    assert ended(ignore_eos=True) == ([2] * 5, "length", None)
    assert ended(stop_token_ids=[2], ignore_eos=True) == ([2], "stop", 2)
    tokens, reason, _ = ended(min_tokens=3)
    assert (len(tokens), tokens[-1], reason) == (4, 2, "stop")
    assert not set(tokens[:-1]) & {0, 2, 8}
    tokens, reason, _ = ended(structured_outputs=StructuredOutputsParams(choice=["the"]))
    assert (tokens[-1], reason, llm.get_tokenizer().decode(tokens[:-1])) == (2, "stop", "the")
    with running(llm, ServerOptions(chat_template=HEADERS)) as served:
        body = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 5, "temperature": 0}
        for biased, ignored, expected in ((2, False, "stop"), (4, False, "stop"), (4, True, "length")):
            asked = {**body, "logit_bias": {biased: 100}, "ignore_eos": ignored}
            answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=30).json()
            assert answer["choices"][0]["finish_reason"] == expected
