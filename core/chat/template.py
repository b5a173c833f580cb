"""Rendering of a model's chat template, which is somebody else's program: its time and its output are limited."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from types import FrameType
from typing import Any, Final

from headway.core.contract.errors import PromptError

SECONDS: Final = 2.0
"""Seconds of processor time for one conversation; templates need less than a hundredth of that."""
CHARACTERS: Final = 2**26
"""Characters of the whole text: four times as many as a request may hold."""
_LARGEST: Final = 1_000_000
"""Largest number beside a multiplication: `"a" * 10000000000` is one operation, which nothing interrupts."""
_CLOCK_INTERVAL: Final = 32
"""Lines of a template between two readings of the clock."""
_CODE: Final = "<template>"
"""File name that Jinja gives to a template that came as a text."""


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


def is_control(name: str, special: bool, template: str) -> bool:
    """Return whether an added token is a control token. White space that a template writes, such as Gemma's "\\n\\n", is text."""
    return bool(name) and (special or (name in template and not name.isspace()))


_ANSWER: Final = "wordsofananswer"
"""Content of an assistant's message that templates pass on unchanged."""


def token_after_answer(tokenizer: Any, chat_template: str | None = None) -> int | None:
    """Return the control token that a chat template writes after the content of an assistant's message.

    In a conversation that ends with the message, or else in one that goes on: some templates end a turn with the next one's
    beginning. chat_template: the tokenizer's own by default. None if there is no such token, or the template fails.
    """
    template = str(chat_template or getattr(tokenizer, "chat_template", None) or "")
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    controls: dict[str, int] = {
        name: token for token, each in added.items() if is_control(name := each.content, each.special, template) and name.strip()
    }
    if not template or not controls:
        return None
    ask, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}
    for conversation in ([ask, answer], [ask, answer, ask]):
        try:
            text = rendered(tokenizer, conversation, chat_template=chat_template, add_generation_prompt=False)
        except Exception:  # a template is the model's own program, and may raise anything
            continue
        _, found, rest = text.rpartition(_ANSWER)
        following = [name for name in controls if found and (rest.startswith(name) or rest.lstrip().startswith(name))]
        if following:
            return controls[max(following, key=len)]
    return None
