"""Rendering of a model's chat template, an untrusted program whose arithmetic is checked before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from headway.core.contract.errors import PromptError

_LARGEST: Final = 1_000_000  # Maximum factor: `"a" * 10000000000` is one operation, which cannot be interrupted


def rendered(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """Return a conversation rendered with the chat template.

    options: keywords of transformers' `apply_chat_template`, whose errors are raised unchanged.

    Jinja's sandbox limits each `range` of a template, but neither the template's run time nor the output of nested loops.

    :raises PromptError: if the template computes powers or uses huge factors, or its macros recurse without end.
    """
    _check_arithmetic(tokenizer.get_chat_template(options.get("chat_template"), options.get("tools")))
    try:
        return str(tokenizer.apply_chat_template(messages, **options, tokenize=False))
    except RecursionError:
        raise _refused("macros that call each other without end") from None


@lru_cache(maxsize=16)
def _check_arithmetic(template: str) -> None:
    """Check the numbers in a template before Jinja evaluates its constant expressions.

    :raises PromptError: if the template contains a power or a huge factor.
    """
    from jinja2 import Environment

    tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    for before, token in pairwise(tokens):
        if token == ("operator", "**") and before[1] not in "(,":  # else ** passes on the arguments of a call
            raise _refused("a power (**)")
    if ("operator", "*") in tokens:
        for kind, text in tokens:
            if kind in ("integer", "float") and (len(text) > 20 or float(int(text, 0) if kind == "integer" else text) > _LARGEST):
                raise _refused(f"a product (*) and the number {text[:20]}")


def _refused(got: str) -> PromptError:
    need = "no powers, no products of huge numbers and no endless macros"
    return PromptError("chat template", need, got, "correct the model's chat_template.jinja or tokenizer_config.json")


def is_control(name: str, special: bool, template: str) -> bool:
    """Return whether an added token is a control token. White space that a template writes, such as Gemma's "\\n\\n", is text."""
    return bool(name) and (special or (name in template and not name.isspace()))


_ANSWER: Final = "wordsofananswer"  # Content of an assistant's message that templates pass on unchanged


def token_after_answer(tokenizer: Any, chat_template: str | None = None) -> int | None:
    """Return the control token that a chat template writes after the content of an assistant's message.

    The function renders a conversation that ends with the message, then one that continues after it, because some templates end a
    message with the beginning of the next one.

    chat_template: None means the tokenizer's template.

    Returns None if no such token exists, or the template fails.
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
        except Exception:  # a template is the model's program, and may raise anything
            continue
        _, found, rest = text.rpartition(_ANSWER)
        following = [name for name in controls if found and (rest.startswith(name) or rest.lstrip().startswith(name))]
        if following:
            return controls[max(following, key=len)]
    return None
