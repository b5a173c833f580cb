"""Conversations rendered in a model's chat template, and texts encoded so that names of control tokens in them stay text."""

from __future__ import annotations

import inspect
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from jinja2 import TemplateSyntaxError

from headway.core.chat.template import is_control, rendered
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.system.json_text import parse_json
from headway.requests.chats import TEXTS, prepared, template_text
from headway.requests.prompts import BYTES, Message, Prompt, whole_text
from headway.requests.tool_use import with_parameters

_TRUSTED: Final = frozenset(("system", "developer", "assistant"))  # Roles whose messages the application or the model writes


class ControlTokens:
    """Encoder for texts in which the names of control tokens, such as "<|im_end|>", are text.

    A copy of the tokenizer, otherwise identical, has unguessable names for the control tokens. The chat template still writes its
    own control tokens. `protect` hides names within messages before the template is applied. `encode` then gives the template's
    tokens their secret names and restores the messages' text before the copy encodes both. The whole text is encoded at once, so
    a text without such names gets the same tokens as from the original tokenizer.

    Control tokens are special tokens, and added tokens that the chat template writes. Thread-safe.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Copy a transformers tokenizer (up to a second). :raises ConfigError: if the tokenizer is not based on the tokenizers
        library."""
        self._nonce = secrets.token_hex(16)
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        template = str(getattr(tokenizer, "chat_template", None) or "")
        if not hasattr(backend, "to_str"):
            raise _unable(f"a {type(tokenizer).__name__}")
        described = parse_json(backend.to_str(), "tokenizer", any_number=True)
        ids = {
            each["content"]: each["id"]
            for each in described["added_tokens"]
            if is_control(each["content"], each["special"], template)
        }
        self._secrets = {name: f"{self._nonce}t{token}t" for name, token in ids.items()}
        self._tokenizer = _renamed(described, self._secrets)
        for name, token in ids.items():
            if self._tokenizer.token_to_id(self._secrets[name]) != token:
                raise _unable(f"one whose token {name!r} cannot be told from others")
        names = sorted(self._secrets, key=len, reverse=True)
        self._starts = {name[:end] for name in names for end in range(1, len(name))}
        self._ends = {name[start:] for name in names for start in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        listed = "|".join(map(re.escape, names)) or "(?!)"
        hidden = rf"{self._nonce}h([0-9a-f]*)h"
        self._name = re.compile(listed)
        self._hidden = re.compile(hidden)
        self._either = re.compile(f"{hidden}|({listed})")

    def protect(self, messages: Iterable[Message]) -> list[Mapping[str, Any]]:
        """Hide the names of control tokens in the messages whose role is not system, developer or assistant."""
        return [
            {key: self._hide(value) if isinstance(value, str) and key != "role" else value for key, value in each.items()}
            if each["role"] not in _TRUSTED
            else each
            for each in messages
        ]

    def encode(self, rendered: str) -> tuple[str, list[int]]:
        """Return the rendered text with the original words of protected messages, and its token ids."""

        def replaced(found: re.Match[str]) -> str:
            return bytes.fromhex(found[1]).decode() if found[2] is None else self._secrets[found[2]]

        ids = self._tokenizer.encode(self._either.sub(replaced, rendered), add_special_tokens=False).ids
        return self._hidden.sub(lambda found: bytes.fromhex(found[1]).decode(), rendered), ids

    def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids without encoding any part of the text as a control token. add_special_tokens: add the
        tokenizer's own special tokens, such as BOS."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return found

    def _hide(self, text: str) -> str:
        """Hide control token names, and partial names at either end that adjacent text could complete."""
        words = text.strip()
        before, _, after = text.partition(words) if words else ("", "", text)
        head = next((words[:size] for size in self._sizes(words) if words[:size] in self._ends), "")
        words = words[len(head) :]
        tail = next((words[-size:] for size in self._sizes(words) if words[-size:] in self._starts), "")
        words = words[: len(words) - len(tail)]
        return before + self._mark(head) + self._name.sub(lambda found: self._mark(found[0]), words) + self._mark(tail) + after

    def _sizes(self, words: str) -> Sequence[int]:
        return range(min(self._longest, len(words)), 0, -1)

    def _mark(self, text: str) -> str:
        """Return a replacement for a text, made of lower-case letters and digits, which templates do not change."""
        return f"{self._nonce}h{text.encode().hex()}h" if text else ""


def _renamed(described: dict[str, Any], names: Mapping[str, str]) -> Any:
    """Return a tokenizer made from its description, with some tokens renamed. The tokenizer's model cannot produce the renamed
    tokens from text."""
    from tokenizers import Tokenizer

    model = described["model"]
    described["truncation"] = described["padding"] = None
    for each in described["added_tokens"]:
        each["content"] = names.get(each["content"], each["content"])
    vocab = model.get("vocab", {})
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    else:  # Unigram: pairs of a token and its score
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [each for each in model["merges"] if _joined(each) not in names]
    try:
        return Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library raises nothing more specific
        raise _unable(f"one that does not let itself be copied: {error}") from error


def _joined(merge: str | Sequence[str]) -> str:
    return merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)


def _unable(got: str) -> ConfigError:
    return ConfigError("split_special_tokens", "a tokenizer of the tokenizers library (tokenizer.json)", got, "leave it out")


_VARIABLES: Final = frozenset(("documents", "tools", "add_generation_prompt", "continue_final_message"))
"""Template variables that are also arguments of transformers' apply_chat_template."""
_RENDERING: Final = frozenset(("self", "messages", "conversations"))  # Further names that rendering uses
_READS_PARTS: Final = re.compile(r"for\s+\w+\s+in\s+(?:\w+\.|\w+\[['\"])?content\b")
"""Matches a template that writes the parts of a message's content itself, without separators."""


def chat_prompt(
    tokenizer: Any,
    model: str,
    messages: str | Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    control_tokens: ControlTokens | None = None,
) -> Prompt:
    """Return a conversation in the tokenizer's chat template, as {"prompt": text, "prompt_token_ids": ids}.

    messages: a user's message, or a list of {"role": ..., "content": ...}. The template writes the special tokens, so the
    tokenizer adds none; otherwise prompts could begin with two BOS tokens.
    chat_template_kwargs: further template variables.
    control_tokens: encoder that treats names of control tokens in messages of users and tools as text; None encodes these names
    as tokens.
    Other arguments: as in transformers' apply_chat_template.
    :raises ConfigError: if the tokenizer has no chat template, or a variable has a reserved name.
    :raises PromptError: if messages are invalid or rejected by the template, or the template does not end.
    """
    if not (getattr(tokenizer, "chat_template", None) or (chat_template and tokenizer is not None)):
        raise ConfigError("chat", "a model whose tokenizer has a chat template", model, "leave --chat out")
    template = chat_template or template_text(tokenizer)
    read = partial(_message, between=_between(template))
    listed = (
        [{"role": "user", "content": messages}]
        if isinstance(messages, str)
        else list(map(read, prepared(list_of_messages(messages), template)))
    )
    if not listed:
        raise PromptError("messages", "at least one message", "none")
    for number, each in enumerate(listed):
        whole_text(each["content"], f"messages.{number}.content")
    options = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template": chat_template,
        "tools": None if tools is None else list(map(with_parameters, tools)),
        **_variables(tokenizer, chat_template_kwargs or {}),
    }
    try:
        text = rendered(tokenizer, listed if control_tokens is None else control_tokens.protect(listed), **options)
    except PromptError:
        raise
    except Exception as error:  # a template is the model's own program and may raise anything
        line = " ".join(str(error).split())
        if isinstance(error, TemplateSyntaxError):
            got, hint = f"{line} in line {error.lineno}", "correct the model's chat_template.jinja or tokenizer_config.json"
            raise PromptError("chat template", "a template that Jinja reads", got, hint) from error
        raise PromptError(
            "messages", "a conversation that the chat template accepts", f"{type(error).__name__}: {line}"
        ) from error
    whole_text(text, "messages")
    if control_tokens is None:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    else:
        text, ids = control_tokens.encode(text)
    return {"prompt": text, "prompt_token_ids": ids}


def list_of_messages(given: object) -> list[Any]:
    """Return a list of messages or conversations. :raises PromptError: if the argument is not a list, for example a single
    message."""
    if isinstance(given, (Mapping, *BYTES)) or not isinstance(given, Iterable):
        raise PromptError("messages", "a list of messages", f"a {type(given).__name__}")
    return list(given)


def _variables(tokenizer: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a template's additional variables. :raises ConfigError: if a name is reserved or `given` is not a mapping."""
    if not isinstance(given, Mapping):
        raise ConfigError("chat_template_kwargs", "a mapping from names to values", f"a {type(given).__name__}")
    if not given:
        return given
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *_RENDERING} - _VARIABLES
    wrong = next((str(name) for name in given if name in taken or not isinstance(name, str)), None)
    if wrong is not None:
        raise ConfigError("chat_template_kwargs", "variables of the chat template", f"{wrong!r}, which is none", "leave it out")
    return given


@lru_cache(maxsize=16)
def _between(template: str) -> str:
    """Return the separator between the text parts of a message: empty if the template writes the parts itself, else a line
    break."""
    return "" if _READS_PARTS.search(template) else "\n"


def _message(message: Mapping[str, Any], between: str) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str):
        content = between.join(part if isinstance(part, str) else part[TEXTS[part["type"]]] for part in content)
    return {**message, "content": content}
