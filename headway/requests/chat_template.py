"""Conversations rendered in a model's chat template."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from jinja2 import TemplateSyntaxError

from headway.core.chat.template import rendered
from headway.core.contract.errors import ConfigError, PromptError
from headway.requests.chats import TEXTS, prepared, template_text
from headway.requests.control_tokens import ControlTokens
from headway.requests.prompts import BYTES, Message, Prompt, whole_text
from headway.requests.tool_use import with_parameters

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
