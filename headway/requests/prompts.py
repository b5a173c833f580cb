"""Parsing of prompts: the formats of vLLM's offline API and arrays of token ids become texts and lists of ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, TypedDict

from torch import Tensor

from headway.core.contract.errors import PromptError
from headway.core.engine.data.sequence import EmbeddedPrompt
from headway.core.system.text import shown

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids (also as an array or tensor), {"prompt": text}, {"prompt_token_ids": ids}, or a tokenizer's output."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings."""

    prompt_embeds: Tensor


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Message = Mapping[str, Any]
"""A message of a conversation: {"role": "user", "content": "Hello"}."""

BYTES: Final = (bytes, bytearray, memoryview)
"""Types that look like sequences of token ids but are rejected."""
FORMS: Final = 'a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}'
_IGNORED_KEYS: Final = frozenset({"attention_mask", "token_type_ids", "special_tokens_mask", "length", "position_ids"})
"""Keys of a tokenizer's output that are ignored. Only the ids are used."""


_LACKING: Final = dict.fromkeys(("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids"), "models read text alone")
"""Key of vLLM's prompts -> reason why the key is not supported."""


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt, independent of the format in which the caller passed it."""

    text: str | None
    """Text of the prompt. None if the caller passed only token ids."""
    token_ids: list[int] | None
    """Token ids of the prompt. None until the text is tokenized."""
    cache_salt: str | None = None
    """Salt that the caller gave with the prompt; see `SamplingParams.cache_salt`."""


def parse_prompts(prompts: object) -> list[ParsedPrompt]:
    """Return one or several prompts, parsed. :raises PromptError: if a prompt is invalid; the error has the prompt's index and
    type."""
    if isinstance(prompts, (str, Mapping)) or _dimensions(prompts) is not None:
        return _parse(prompts, 0)
    if not isinstance(prompts, Iterable) or isinstance(prompts, BYTES):
        raise PromptError("prompt", f"{FORMS}, or a list of these", f"a {type(prompts).__name__}")
    items = _items(prompts, "prompts")
    if items and isinstance(items[0], Integral):
        return [ParsedPrompt(None, _token_ids(items, 0))]
    parsed = []
    for index, item in enumerate(items):
        found = _parse(item, index)
        if len(found) != 1:
            raise PromptError(f"prompt {index}", "one prompt in each place of the list", f"a batch of {len(found)}")
        parsed += found
    return parsed


def list_of_one(prompt: Prompt) -> list[Prompt]:
    """Return a list of one prompt. :raises PromptError: if the prompt is a number, which a list would turn into a token id."""
    if isinstance(prompt, Integral):
        raise PromptError("prompt", FORMS, f"a {type(prompt).__name__}")
    return [prompt]


def is_one(prompts: object) -> bool:
    """Return whether the argument is a single prompt rather than a list of prompts."""
    listed = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    return not isinstance(prompts, Sequence) or not listed or isinstance(prompts[0], Integral)


def _parse(item: object, index: int) -> list[ParsedPrompt]:
    """Return the prompts of one argument: one prompt, or several from a tokenizer's batch or a two-dimensional array."""
    if isinstance(item, str):
        return [ParsedPrompt(item, None)]
    if isinstance(item, Mapping):
        return _parse_mapping(item, index)
    dimensions = _dimensions(item)
    if dimensions == 2:
        return [ParsedPrompt(None, _token_ids(row, index)) for row in item]  # type: ignore[attr-defined]
    return [ParsedPrompt(None, _token_ids(item, index))]


def _parse_mapping(item: Mapping[str, Any], index: int) -> list[ParsedPrompt]:
    text, ids = item.get("prompt"), item.get("prompt_token_ids")
    if "input_ids" in item:
        return [ParsedPrompt(None, row) for row in _tokenized(item, index)]
    for key, reason in _LACKING.items():
        if item.get(key) is not None and item.get(key) != {}:
            raise PromptError(f"prompt {index}", FORMS, f"a {type(item).__name__} with {key!r}", reason)
    salt = item.get("cache_salt")
    if item.get("prompt_embeds") is not None:
        return [ParsedPrompt(None, EmbeddedPrompt.of(item["prompt_embeds"]), salt)]
    known = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", *_LACKING)
    surplus = [str(key) for key, value in item.items() if key not in known and value is not None]
    if surplus:
        raise PromptError(f"prompt {index}", FORMS, f"a {type(item).__name__} with {', '.join(map(repr, surplus))}")
    if text is not None and not isinstance(text, str):
        raise PromptError(f"prompt {index}", 'a text under "prompt"', f"a {type(text).__name__}")
    if ids is not None:
        return [ParsedPrompt(text, _token_ids(ids, index), salt)]
    if text is None:
        raise PromptError(f"prompt {index}", FORMS, f"a {type(item).__name__} without either key")
    return [ParsedPrompt(text, None, salt)]


def _tokenized(item: Mapping[str, Any], index: int) -> list[list[int]]:
    """Return the rows of a tokenizer's output, without the padding that its attention mask hides."""
    unknown = [str(key) for key in item if key not in _IGNORED_KEYS and key != "input_ids"]
    if unknown:
        raise PromptError(f"prompt {index}", "a tokenizer's output of text alone", f"one with {', '.join(map(repr, unknown))}")
    ids, mask = _listed(item["input_ids"]), item.get("attention_mask")
    batched = isinstance(ids, list) and bool(ids) and not isinstance(ids[0], Integral)
    rows = ids if batched else [ids]
    if mask is None:
        return [_token_ids(row, index) for row in rows]
    masks = _listed(mask) if batched else [_listed(mask)]
    parsed = [_token_ids(row, index) for row in rows]
    seen = [_listed(row) for row in masks] if isinstance(masks, list) else []
    if [len(row) if isinstance(row, Sequence) else None for row in seen] != [len(row) for row in parsed]:
        raise PromptError(f"prompt {index}", "an attention_mask with a number for each of input_ids", "another shape")
    return [
        [token for token, kept in zip(row, kept_of_row, strict=True) if kept]
        for row, kept_of_row in zip(parsed, seen, strict=True)
    ]


def _token_ids(value: object, index: int) -> list[int]:
    value = _listed(value)
    if not isinstance(value, Iterable) or isinstance(value, (str, *BYTES, Mapping)):
        raise PromptError(f"prompt {index}", FORMS, f"a {type(value).__name__}")
    items = _items(value, f"prompt {index}")
    kinds = set(map(type, items))  # isinstance(token, Integral) for each of a hundred thousand tokens takes 0.1 s
    if kinds <= {int}:
        return items
    wrong = next((kind for kind in kinds if kind is bool or not issubclass(kind, Integral)), None)
    if wrong is not None:
        raise PromptError(f"prompt {index}", FORMS, f"a {type(value).__name__} of {wrong.__name__}")
    return [int(token) for token in items]


def _items(value: Iterable[Any], what: str) -> list[Any]:
    """Return the items of an iterable. :raises PromptError: if the items do not fit in memory, for example the items of a huge
    range."""
    try:
        return list(value)
    except (MemoryError, OverflowError):
        raise PromptError(what, FORMS, f"{shown(value)}, longer than memory holds") from None


def _dimensions(value: object) -> int | None:
    """Return the number of dimensions of a numpy array or torch tensor; None for anything else."""
    if isinstance(value, BYTES):
        return None
    dimensions = getattr(value, "ndim", None)
    return dimensions if isinstance(dimensions, int) and hasattr(value, "tolist") else None


def _listed(value: Any) -> Any:
    """Return an array's elements as Python numbers, other values unchanged. :raises PromptError: if the array is on device
    meta."""
    if _dimensions(value) is None:
        return value
    try:
        return value.tolist()
    except (NotImplementedError, RuntimeError) as error:
        line = " ".join(str(error).split())
        raise PromptError("prompt", FORMS, f"a {type(value).__name__} that cannot be read ({line})") from None


def whole_text(text: str, what: str = "prompt") -> str:
    """Return a text that is valid Unicode. :raises PromptError: if the text is not valid, for example from a non-UTF-8 command
    line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{shown(text[max(error.start - 10, 0) : error.end + 10], 60)} at character {error.start}"
        raise PromptError(what, "Unicode text", got, "encode it as UTF-8") from None
    return text
