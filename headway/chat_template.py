"""Writing a conversation in a model's chat template, which is somebody else's program: it gets so much time and paper."""

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
"""Of processor time for one conversation, of which templates need less than a hundredth."""
CHARACTERS: Final = 2**26
"""Of the whole text: four times what a request may hold."""
_LARGEST: Final = 1_000_000
"""A whole number beside a multiplication: `"a" * 10000000000` is one operation, which nobody interrupts."""
_LOOK: Final = 32
"""Lines of a template between two looks at the clock."""
_CODE: Final = "<template>"
"""What Jinja calls the file of a template that came as a text."""


class _TooMuch(Exception):
    """A template was stopped."""


class _Limits:
    """A trace function (`sys.settrace`) that stops a template's own code; other code runs on untraced.

    Jinja's sandbox bounds `range`, but neither nested loops nor what macros call. A loop of the template is a loop of Python's,
    and a piece of its text what a generator yields: tracing shows both, in the thread that renders, at no cost for the others.
    """

    def __init__(self) -> None:
        self._ends = time.thread_time() + SECONDS
        self._lines = self._characters = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != _CODE:
            return None
        if event == "line":
            self._lines += 1
            if not self._lines % _LOOK and time.thread_time() > self._ends:
                raise _TooMuch(f"more than {SECONDS:g} s of processor time")
        elif event == "return" and isinstance(arg, str):
            self._characters += len(arg)
            if self._characters > CHARACTERS:
                raise _TooMuch(f"more than {CHARACTERS:,} characters")
        return self


def rendered(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """The text of a conversation. options: of transformers' apply_chat_template, whose errors come through.

    Not bounded: what one operation of a template does, such as a format of a billion places or a text that is doubled
    forty times; and where a debugger traces this thread already, time and characters.

    :raises PromptError: the template takes too long, writes too much, or reckons with numbers that no text needs.
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
    """Look at numbers before Jinja, which computes constants when it compiles.

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
