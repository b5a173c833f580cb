"""Writing a conversation in a model's chat template, which is somebody else's program: its time and its output are limited."""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from types import FrameType
from typing import Any, Final

from headway.core.contract.errors import ConfigError, PromptError
from headway.requests.control_tokens import ControlTokens
from headway.requests.conversation import TEXTS, prepared, template_text
from headway.requests.prompts import BYTES, Message, Prompt, whole_text
from headway.requests.tool_use import with_parameters

SECONDS: Final = 2.0
"""Seconds of processor time for one conversation; templates need less than a hundredth of that."""
CHARACTERS: Final = 2**26
"""Characters of the whole text: four times as many as a request may hold."""
_LARGEST: Final = 1_000_000
"""Largest number beside a multiplication: `"a" * 10000000000` is one operation, which nothing interrupts."""
_CLOCK_INTERVAL: Final = 32
"""Lines of a template between two readings of the clock."""
_VARIABLES: Final = frozenset(("documents", "tools", "add_generation_prompt", "continue_final_message"))
"""Variables of templates that are arguments of transformers' apply_chat_template, too."""
_RENDERING: Final = frozenset(("self", "messages", "conversations"))
"""Further names that transformers and Jinja use where they render a template."""
_READS_PARTS: Final = re.compile(r"for\s+\w+\s+in\s+(?:\w+\.|\w+\[['\"])?content\b")
"""A template that writes the parts of a message's content itself, one behind the other."""
_CODE: Final = "<template>"
"""File name that Jinja gives to a template that came as a text."""


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
    """A conversation in the tokenizer's chat template, as {"prompt": text, "prompt_token_ids": ids}.

    messages: a user's message, or a list of {"role": ..., "content": ...}. The template writes the special tokens itself, so the
    tokenizer adds none: a text passed on would begin with two BOS tokens where both add one. chat_template_kwargs: further
    variables of the template. control_tokens: the tokenizer's, where their names in messages of users and tools are to be text;
    None: they become tokens. The others: as in transformers' apply_chat_template.

    :raises ConfigError: the tokenizer brings no chat template, or a further variable has a name that is taken.
    :raises PromptError: messages of another form, or that the template refuses; or a template that never ends.
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
    except Exception as error:  # a template is the model's own program, and may raise anything
        line = " ".join(str(error).split())
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
    """The items of a list of messages, or of conversations.

    :raises PromptError: the argument is no list; a single message is none.
    """
    if isinstance(given, (Mapping, *BYTES)) or not isinstance(given, Iterable):
        raise PromptError("messages", "a list of messages", f"a {type(given).__name__}")
    return list(given)


def _variables(tokenizer: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The further variables of a template, unchanged.

    :raises ConfigError: the name of one is an argument of what renders the template; or the variables are no mapping.
    """
    if not isinstance(given, Mapping):
        raise ConfigError("chat_template_kwargs", "a mapping from names to values", f"a {type(given).__name__}")
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *_RENDERING} - _VARIABLES
    wrong = next((str(name) for name in given if name in taken or not isinstance(name, str)), None)
    if wrong is not None:
        raise ConfigError("chat_template_kwargs", "variables of the chat template", f"{wrong!r}, which is none", "leave it out")
    return given


@lru_cache(maxsize=16)
def _between(template: str) -> str:
    """What stands between the texts of one message: nothing where the template writes them itself, else a line break."""
    return "" if _READS_PARTS.search(template) else "\n"


def _message(message: Mapping[str, Any], between: str) -> dict[str, Any]:
    """Return a message from `prepared` with one text as its content. between: separator of the texts of its parts."""
    content = message["content"]
    if not isinstance(content, str):
        content = between.join(part if isinstance(part, str) else part[TEXTS[part["type"]]] for part in content)
    return {**message, "content": content}


class _TooMuch(Exception):
    """A template was stopped."""


class _Limits:
    """A trace function (`sys.settrace`) that stops a template's own code; other code runs on untraced.

    Why it stays: transformers' ImmutableSandboxedEnvironment bounds each `range`, but renders two nested loops over range(99999),
    or a macro that calls itself twice, for hours, in one of the two threads that tokenise. A loop of the template is a loop of
    Python's, and a piece of its text what a generator yields: tracing shows both, at no cost for other threads.
    """

    def __init__(self) -> None:
        self._ends = time.thread_time() + SECONDS
        self._lines = self._characters = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != _CODE:
            return None
        if event == "line":
            self._lines += 1
            if not self._lines % _CLOCK_INTERVAL and time.thread_time() > self._ends:
                raise _TooMuch(f"more than {SECONDS:g} s of processor time")
        elif event == "return" and isinstance(arg, str):
            self._characters += len(arg)
            if self._characters > CHARACTERS:
                raise _TooMuch(f"more than {CHARACTERS:,} characters")
        return self


def rendered(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """Render a conversation, within the limits. options: of transformers' apply_chat_template, whose errors come through.

    Not limited: a single operation of a template, such as a format of a billion places or a text that is doubled forty times;
    and, where a debugger traces this thread already, time and characters.

    :raises PromptError: the template takes too long, writes too much, or computes with numbers that no text needs.
    """
    _check_arithmetic(tokenizer.get_chat_template(options.get("chat_template"), options.get("tools")))
    before = sys.gettrace()
    if before is None:
        sys.settrace(_Limits())
    try:
        return str(tokenizer.apply_chat_template(messages, **options, tokenize=False))
    except (_TooMuch, RecursionError) as error:
        got = "macros that call each other without end" if isinstance(error, RecursionError) else str(error)
        raise _refused(got) from None
    finally:
        sys.settrace(before)


@lru_cache(maxsize=16)
def _check_arithmetic(template: str) -> None:
    """Check the numbers of a template before Jinja compiles the template and computes its constants.

    :raises PromptError: a power, or a product with a huge number.
    """
    from jinja2 import Environment

    tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    for before, token in pairwise(tokens):
        if token == ("operator", "**") and before[1] not in "(,":  # else it hands on the arguments of a call
            raise _refused("a power (**)")
    if ("operator", "*") in tokens:
        for kind, text in tokens:
            if kind in ("integer", "float") and (len(text) > 20 or float(int(text, 0) if kind == "integer" else text) > _LARGEST):
                raise _refused(f"a product (*) and the number {text[:20]}")


def _refused(got: str) -> PromptError:
    need = f"at most {SECONDS:g} s of processor time and {CHARACTERS:,} characters for a conversation"
    return PromptError("chat template", need, got, "correct the model's chat_template.jinja or tokenizer_config.json")
