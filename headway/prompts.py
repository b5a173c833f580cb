"""From what a caller passes as prompts to texts and token ids: the forms that vLLM's offline API takes, and arrays of ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, TypedDict

from headway.chat_template import rendered
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.system.text import shown

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids (also as a numpy array or a torch tensor), {"prompt": text}, {"prompt_token_ids": ids}, or what a tokenizer
returns."""


class TextPrompt(TypedDict):
    """A prompt as a text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Message = Mapping[str, Any]
"""A message of a conversation: {"role": "user", "content": "Hello"}."""

BYTES: Final = (bytes, bytearray, memoryview)
"""What would pass for token ids, and never is meant as such."""
FORMS: Final = 'a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}'
_IGNORED_KEYS: Final = frozenset({"attention_mask", "token_type_ids", "special_tokens_mask", "length", "position_ids"})
"""What a tokenizer returns beside the ids."""


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt in one form, whatever form the caller gave it."""

    text: str | None
    """None where the caller brought token ids alone."""
    token_ids: list[int] | None
    """None: the text is still to be tokenised."""


def parse_prompts(prompts: object) -> list[ParsedPrompt]:
    """Read one prompt, or several in any iterable.

    :raises PromptError: naming the prompt's index and the type that was found.
    """
    if isinstance(prompts, (str, Mapping)) or _dimensions(prompts) is not None:
        return _parse(prompts, 0)
    if not isinstance(prompts, Iterable) or isinstance(prompts, BYTES):
        raise PromptError("prompt", f"{FORMS}, or a list of these", f"a {type(prompts).__name__}")
    items = list(prompts)
    if items and isinstance(items[0], Integral):
        return [ParsedPrompt(None, _token_ids(items, 0))]
    parsed = []
    for index, item in enumerate(items):
        found = _parse(item, index)
        if len(found) != 1:
            raise PromptError(f"prompt {index}", "one prompt in each place of the list", f"a batch of {len(found)}")
        parsed += found
    return parsed


def alone(prompt: Prompt) -> list[Prompt]:
    """A list of one prompt.

    :raises PromptError: a number, which in a list would be a prompt of one token.
    """
    if isinstance(prompt, Integral):
        raise PromptError("prompt", FORMS, f"a {type(prompt).__name__}")
    return [prompt]


def is_one(prompts: object) -> bool:
    """Whether what `parse_prompts` has made one prompt of is a prompt, and no list of one."""
    listed = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    return not isinstance(prompts, Sequence) or not listed or isinstance(prompts[0], Integral)


def _parse(item: object, index: int) -> list[ParsedPrompt]:
    """The prompts of one argument: one, unless it is a tokenizer's batch or an array of two dimensions."""
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
    surplus = [str(key) for key, value in item.items() if key not in ("prompt", "prompt_token_ids") and value is not None]
    if surplus:
        raise PromptError(f"prompt {index}", FORMS, f"a {type(item).__name__} with {', '.join(map(repr, surplus))}")
    if text is not None and not isinstance(text, str):
        raise PromptError(f"prompt {index}", 'a text under "prompt"', f"a {type(text).__name__}")
    if ids is not None:
        return [ParsedPrompt(text, _token_ids(ids, index))]
    if text is None:
        raise PromptError(f"prompt {index}", FORMS, f"a {type(item).__name__} without either key")
    return [ParsedPrompt(text, None)]


def _tokenized(item: Mapping[str, Any], index: int) -> list[list[int]]:
    """The rows of a tokenizer's output; the tokens that its attention mask hides are padding."""
    unknown = [str(key) for key in item if key not in _IGNORED_KEYS and key != "input_ids"]
    if unknown:
        raise PromptError(f"prompt {index}", "a tokenizer's output of text alone", f"one with {', '.join(map(repr, unknown))}")
    ids, mask = _listed(item["input_ids"]), item.get("attention_mask")
    batched = isinstance(ids, list) and bool(ids) and not isinstance(ids[0], Integral)
    rows = ids if batched else [ids]
    if mask is None:
        return [_token_ids(row, index) for row in rows]
    masks = _listed(mask) if batched else [_listed(mask)]
    return [
        [token for token, kept in zip(_token_ids(row, index), _listed(seen), strict=True) if kept]
        for row, seen in zip(rows, masks, strict=True)
    ]


def _token_ids(value: object, index: int) -> list[int]:
    value = _listed(value)
    if not isinstance(value, Iterable) or isinstance(value, (str, *BYTES, Mapping)):
        raise PromptError(f"prompt {index}", FORMS, f"a {type(value).__name__}")
    items: list[Any] = list(value)
    kinds = set(map(type, items))  # to ask the abstract class about each of a hundred thousand tokens takes 0.1 s
    if kinds <= {int}:
        return items
    wrong = next((kind for kind in kinds if kind is bool or not issubclass(kind, Integral)), None)
    if wrong is not None:
        raise PromptError(f"prompt {index}", FORMS, f"a {type(value).__name__} of {wrong.__name__}")
    return [int(token) for token in items]


def _dimensions(value: object) -> int | None:
    """Of a numpy array or a torch tensor; None for anything else."""
    if isinstance(value, BYTES):
        return None
    dimensions = getattr(value, "ndim", None)
    return dimensions if isinstance(dimensions, int) and hasattr(value, "tolist") else None


def _listed(value: Any) -> Any:
    """An array's elements as Python's own numbers, in one go."""
    return value.tolist() if _dimensions(value) is not None else value


def whole_text(text: str, what: str = "prompt") -> str:
    """The same text.

    :raises PromptError: it holds half of a surrogate pair, as Python reads bytes of a command line that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{shown(text[max(error.start - 10, 0) : error.end + 10], 60)} at character {error.start}"
        raise PromptError(what, "Unicode text", got, "encode it as UTF-8") from None
    return text


def chat_prompt(
    tokenizer: Any, model: str, messages: str | Sequence[Message], add_generation_prompt: bool = True, **options: Any
) -> Prompt:
    """A conversation in the tokenizer's chat template, as {"prompt": text, "prompt_token_ids": ids}.

    messages: a user's message, or a list of {"role": ..., "content": ...}. The template writes the special tokens itself, so the
    tokenizer adds none: a text passed on would begin with two BOS tokens where both add one. options: of transformers'
    apply_chat_template.

    :raises ConfigError: the tokenizer brings no chat template.
    :raises PromptError: messages of another form, or that the template refuses; or a template that never ends.
    """
    if not (getattr(tokenizer, "chat_template", None) or (options.get("chat_template") and tokenizer is not None)):
        raise ConfigError("chat", "a model whose tokenizer has a chat template", model, "leave --chat out")
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else [_message(each) for each in messages]
    if not listed:
        raise PromptError("messages", "at least one message", "none")
    try:
        text = rendered(tokenizer, listed, **{"add_generation_prompt": add_generation_prompt, **options})
    except PromptError:
        raise
    except Exception as error:  # a template is the model's own program, and raises what it likes
        line = " ".join(str(error).split())
        raise PromptError(
            "messages", "a conversation that the chat template accepts", f"{type(error).__name__}: {line}"
        ) from error
    return {
        "prompt": text,
        "prompt_token_ids": list(tokenizer(whole_text(text, "messages"), add_special_tokens=False)["input_ids"]),
    }


def _message(message: object) -> dict[str, Any]:
    need = 'a message such as {"role": "user", "content": "Hello"}'
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        got = "a mapping without a role" if isinstance(message, Mapping) else f"a {type(message).__name__}"
        raise PromptError("messages", need, got)
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):  # OpenAI's parts
        parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) != len(content):
            raise PromptError("messages", need, "content with parts that are no texts")
        content = "".join(texts)
    if not isinstance(content, str):
        raise PromptError("messages", need, f"content of the type {type(content).__name__}")
    return {**message, "content": content}
