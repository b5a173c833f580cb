"""End-of-text tokens: the union of the ids named by a model's files, its tokenizer and its chat template."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.core.chat.template import token_after_answer
from headway.core.contract.errors import ModelError
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown

_KEY = "eos_token_id"
_FILE = "generation_config.json"
_GGUF_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
"""End-of-text, end-of-turn and end-of-message keys of a .gguf file; `save_gguf_ends` copies them into generation_config.json."""

log = logging.getLogger("headway")


def read_end_tokens(folder: Path, stated: Mapping[str, Any], config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the token ids that end a response, and log each id with the files or objects that name it.

    stated: config.json as written.
    config: config.json with the defaults of its class. A default id is used only if the files name no id, because an additional
    default could be an ordinary word.
    tokenizer: None if the model has none.

    :raises ModelError: if a file names something that is not a token id.
    """
    sources: dict[int, list[str]] = {}
    for source, value in _named(folder, stated, config, tokenizer):
        for token in _ids(folder, source, value):
            if token >= config.vocab_size:
                text = "model: %s %s (%s) is outside the vocabulary of %d tokens; it is ignored"
                log.warning(text, _KEY, shown(token), source, config.vocab_size)
            elif source not in (places := sources.setdefault(token, [])):
                places.append(source)
    listed = [f"{token}{_text(tokenizer, token)} ({', '.join(places)})" for token, places in sorted(sources.items())]
    log.info("model: end-of-text tokens: %s", ", ".join(listed) or "none")
    return frozenset(sources)


def save_gguf_ends(header: Any, folder: Path) -> None:
    """Copy the end tokens of a .gguf file into the generation_config.json of its converted folder. header: a gguf `Header`."""
    path = folder / _FILE
    existing = _read(path)
    existing.update({key: value for key in _GGUF_KEYS if (value := header.general(key)) is not None})
    path.write_text(json.dumps(existing))


def _named(folder: Path, stated: Mapping[str, Any], config: Any, tokenizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of each file or object that may name end tokens, with the value found in it."""
    generation, text = _read(folder / _FILE), stated.get("text_config")
    files = {"config.json": stated.get(_KEY)}
    if isinstance(text, Mapping):
        files["text_config of config.json"] = text.get(_KEY)
    files[_FILE] = generation.get(_KEY)
    files |= {key: generation[key] for key in _GGUF_KEYS if key in generation}
    if _KEY not in stated and _KEY not in generation and all(value is None for value in files.values()):
        files[f"default of {config.model_type}"] = getattr(config, _KEY, None)
    yield from files.items()
    if tokenizer is not None:
        name, token = getattr(tokenizer, "eos_token", None), getattr(tokenizer, _KEY, None)
        if token is not None and token == getattr(tokenizer, "unk_token_id", None) and name != tokenizer.unk_token:
            log.warning("model: the tokenizer's eos_token %s is not in its vocabulary; it is ignored", shown(name))
        else:
            yield "tokenizer", token
        yield "chat template", token_after_answer(tokenizer)


def _ids(folder: Path, source: str, value: Any) -> list[int]:
    """Return the token ids in `value`. source: origin of the value, for errors. :raises ModelError: if anything else is found."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in listed):
        raise ModelError(f"model {folder}: {_KEY} ({source}) needs token ids, got {shown(value)}")
    return listed


def _text(tokenizer: Any, token: int) -> str:
    """Return a token's text with a leading space, for the log; empty without a tokenizer."""
    return "" if tokenizer is None else f" {shown(tokenizer.convert_ids_to_tokens(token))}"


def _read(path: Path) -> dict[str, Any]:
    """Return the content of generation_config.json; an empty mapping if the file does not exist.

    :raises ModelError: if the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        read: dict[str, Any] = parse_json(read_text(path), path.name, dict, any_number=True)
    except ValueError as error:
        raise ModelError(f"model {path.parent}: {error}") from error
    return read
