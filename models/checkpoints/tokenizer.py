"""Tokenizer of a model: from transformers, or only from the tokenizers library if tokenizer.json is sufficient."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headway.core.contract.errors import ModelError
from headway.core.system.files import cache_folder, read_text, write_whole
from headway.core.system.json_text import parse_json
from headway.core.system.provenance import installed_versions
from headway.core.system.system_errors import is_rust_panic
from headway.core.system.text import shown

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

log = logging.getLogger("headway")
_NAMED: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
_PLAIN_VARIABLES: Final = frozenset(("messages", "add_generation_prompt", "raise_exception", *_NAMED))
"""Variables allowed in a chat template that is rendered without transformers."""
_ANSWERED: Final = (
    *("__call__", "encode", "_encode_plus", "decode", "_decode", "convert_ids_to_tokens", "get_vocab", "__len__"),
    *("get_chat_template", "apply_chat_template"),
)
"""Methods of transformers' tokenizer that `PlainTokenizer` implements, and the methods that they call."""
_CACHED: Final = ("chat_template", "model_max_length", "special_tokens_map", *_NAMED, *(f"{name}_id" for name in _NAMED))
_FORM: Final = 1
"""Version of the cached data. Increase it when the content or `_is_plain` changes."""
_MAX_CACHED: Final = 32
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_LARGEST_FILE: Final = 64 << 20
"""Size in bytes above which a file is not included in a tokenizer's digest."""


def read_tokenizer(folder: Path) -> Any:
    """Return a model folder's tokenizer: a cached `PlainTokenizer` if it gives the same results, else transformers' tokenizer.

    The data that transformers makes from the folder's files is cached, so that later starts need not import transformers.

    :raises ModelError: if the tokenizer cannot be read, or needs the model's own code.
    """
    cached = _cache_file(folder)
    plain = None if cached is None else _read_cached(cached, folder)
    if plain is not None:
        return plain
    tokenizer = read_transformers_tokenizer(folder)
    if cached is not None and _is_plain(tokenizer):
        _save(tokenizer, cached)
    return tokenizer


def read_transformers_tokenizer(folder: Path) -> Any:
    """Return the transformers tokenizer of a model folder.

    :raises ModelError: if the tokenizer cannot be read, or needs the model's own code.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, config=_naming_config(folder), trust_remote_code=False)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_rust_panic(error):
            raise
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"model {folder}: the tokenizer needs code of the model's own (auto_map in tokenizer_config.json), which Headway "
                "never runs; skip_tokenizer_init=True takes token ids instead of texts"
            ) from error
        _check_templates(folder)  # transformers does not name the faulty file
        raise ModelError(f"model {folder}: the tokenizer cannot be read ({first_line(error)})") from error
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float) or not longest > 0:
        raise ModelError(
            f"model {folder}: the tokenizer cannot be read: model_max_length in tokenizer_config.json needs a number above 0, "
            f"got {shown(longest)}"
        )
    return tokenizer


def transformers_tokenizer(tokenizer: Any) -> Any:
    """Return the transformers tokenizer that corresponds to a result of `read_tokenizer`; None if the argument is None."""
    return tokenizer.transformers_tokenizer if isinstance(tokenizer, PlainTokenizer) else tokenizer


class PlainTokenizer:
    """Tokenizer that needs only the tokenizers library: importing transformers adds two seconds to a start.

    It has the attributes of transformers' tokenizer that generation reads, with the same values. Any other attribute comes from
    transformers' tokenizer of the same folder, which is loaded on first use.
    """

    is_fast = True
    clean_up_tokenization_spaces = False

    def __init__(self, folder: Path, backend: Tokenizer, attributes: Mapping[str, Any]) -> None:
        """attributes: values of the attributes in `_CACHED`, read from the transformers tokenizer."""
        self._folder = folder
        self.backend_tokenizer = backend
        self.chat_template: str | None = attributes["chat_template"]
        self.model_max_length: float = attributes["model_max_length"]
        self.special_tokens_map: dict[str, Any] = attributes["special_tokens_map"]
        for name in _NAMED:
            setattr(self, name, attributes[name])
            setattr(self, f"{name}_id", attributes[f"{name}_id"])

    @cached_property
    def transformers_tokenizer(self) -> Any:
        """The folder's transformers tokenizer, loaded on first use."""
        return read_transformers_tokenizer(self._folder)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the transformers tokenizer. Python calls this method only for attributes that this class
        lacks."""
        if name.startswith("__"):  # looked up by copy and pickle
            raise AttributeError(name)
        return getattr(self.transformers_tokenizer, name)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: Any, **options: Any) -> Any:
        """Return {"input_ids": ...} for one text; the transformers tokenizer handles other arguments."""
        if not isinstance(text, str) or options.keys() - {"add_special_tokens"}:
            return self.transformers_tokenizer(text, **options)
        return {"input_ids": self.encode(text, options.get("add_special_tokens", True))}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode token ids to text."""
        listed = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self.backend_tokenizer.decode(listed, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the vocabulary entry of one id, or of each id in a sequence; None for an unused id."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(token) for token in ids]

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary: token ids keyed by token text."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens, keyed by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Return the given chat template, or the tokenizer's template if none is given."""
        if self.chat_template is None or chat_template is not None:
            return str(self.transformers_tokenizer.get_chat_template(chat_template, tools))
        return self.chat_template

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return a conversation rendered as text with the tokenizer's chat template, with only the option
        `add_generation_prompt`.

        transformers renders conversations whose messages contain more than text, and reports templates that fail.
        """
        asked = {name: value for name, value in options.items() if value is not None and value is not False}
        plain = (
            options.get("tokenize") is False
            and self.chat_template is not None
            and not asked.keys() - {"add_generation_prompt", "tools", "documents"}
            and bool(conversation)
            and all(type(value) is str for message in conversation for value in message.values())
            and not any("reasoning" in key or key == "thinking" for message in conversation for key in message)
        )
        if plain:
            try:
                return _compiled(self.chat_template).render(
                    messages=conversation,
                    add_generation_prompt=options.get("add_generation_prompt", False),
                    **self.special_tokens_map,
                )
            except Exception:  # transformers' error describes a template that fails
                pass
        return self.transformers_tokenizer.apply_chat_template(conversation, **options)


def _is_plain(tokenizer: Any) -> bool:
    """Return whether a `PlainTokenizer` would give the same results as this transformers tokenizer."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind, template = type(tokenizer), tokenizer.chat_template
    return (
        isinstance(tokenizer, Fast)
        and all(getattr(kind, name, None) is getattr(Fast, name, None) for name in _ANSWERED)
        and not tokenizer.clean_up_tokenization_spaces
        and not getattr(tokenizer, "split_special_tokens", False)
        and all(isinstance(getattr(tokenizer, name), str | None) for name in _NAMED)
        and (template is None or (isinstance(template, str) and _is_plain_template(template)))
    )


def _cache_file(folder: Path) -> Path | None:
    """Return the path of a tokenizer's cache file, named after a digest of the tokenizer's files; None if these files are
    unreadable."""
    digest = hashlib.sha256(os.fsencode(f"{_FORM} {installed_versions(('transformers', 'tokenizers'))} {folder.resolve()}"))
    try:
        for path in sorted((*folder.glob("*"), *folder.glob("additional_chat_templates/*"))):
            if path.suffix not in _WEIGHTS and path.is_file() and path.stat().st_size <= _LARGEST_FILE:
                content = path.read_bytes()
                digest.update(os.fsencode(f"{path.relative_to(folder)} {len(content)} ") + content)
    except OSError:
        return None  # transformers reports the error
    return cache_folder() / "tokenizers" / f"{folder.name}-{digest.hexdigest()[:16]}.json"


def _save(tokenizer: Any, path: Path) -> None:
    """Cache the data that a `PlainTokenizer` needs from the transformers tokenizer; a failed write is logged."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    try:
        content = json.dumps({"tokenizer": backend.to_str(), **{name: getattr(tokenizer, name) for name in _CACHED}})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"sha256": _sha256(content), "content": content}).encode())
        for old in sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-_MAX_CACHED]:
            old.unlink()
    except (OSError, TypeError, ValueError) as error:
        log.debug("model: the tokenizer cannot be cached (%s)", error)


def _read_cached(path: Path, folder: Path) -> PlainTokenizer | None:
    """Return a cached tokenizer; None if the cache file does not exist or is damaged."""
    from tokenizers import Tokenizer

    try:
        written = parse_json(read_text(path), path.name, dict)
        if written["sha256"] != _sha256(written["content"]):
            return None
        cached = parse_json(written["content"], path.name, dict, any_number=True)
        os.utime(path)  # the least recently used are removed first
        return PlainTokenizer(folder, Tokenizer.from_str(cached["tokenizer"]), cached)
    except Exception:  # the library raises nothing more precise; the file is rewritten
        return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_plain_template(template: str) -> bool:
    """Return whether a chat template reads only messages and special tokens, and uses no transformers extension."""
    from jinja2 import TemplateError
    from jinja2.meta import find_undeclared_variables
    from jinja2.nodes import Filter

    try:
        tree = _environment().parse(template)
    except TemplateError:
        return False
    return find_undeclared_variables(tree) <= _PLAIN_VARIABLES and all(each.name != "tojson" for each in tree.find_all(Filter))


@lru_cache(maxsize=1)
def _environment() -> Any:
    """Return the sandboxed Jinja environment that transformers renders chat templates in, without transformers' extensions."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals.clear()  # a call fails, and transformers renders the conversation
    return environment


@lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def _naming_config(folder: Path) -> Any:
    """Return a configuration that is sufficient for AutoTokenizer, if tokenizer_config.json names the tokenizer's class.

    Otherwise, return None. transformers then imports the model's configuration class and torch's distributed tensors, which takes
    most of a second.
    """
    from transformers import PreTrainedConfig

    try:
        names = ("config.json", "tokenizer_config.json")
        stated, tokenizer = (parse_json(read_text(folder / name), name, any_number=True) for name in names)
    except (OSError, ValueError):
        return None  # transformers reports the error
    if not (isinstance(stated, dict) and isinstance(tokenizer, dict)) or "auto_map" in {**stated, **tokenizer}:
        return None
    if not all(isinstance(name, str) for name in (stated.get("model_type"), tokenizer.get("tokenizer_class"))):
        return None
    kind: Any = PreTrainedConfig  # its constructor takes any name, unlike its type hints
    config = kind(name_or_path=str(folder), tokenizer_class=stated.get("tokenizer_class"))
    config.model_type = stated["model_type"]
    if "model_name" in stated:
        config.model_name = stated["model_name"]
    return config


def _check_templates(folder: Path) -> None:
    """Check that the chat templates can be read. :raises ModelError: if a template is unreadable or not UTF-8."""
    for path in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        try:
            read_text(path)
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"model {folder}: the chat template {path.name} cannot be read ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message, plus the second line if the first only introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {text}"
