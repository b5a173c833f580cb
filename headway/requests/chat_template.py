"""Conversations in a model's chat template: the messages that templates read, and the prompt that they make."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from headway.core.chat.template import rendered
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown
from headway.requests.control_tokens import ControlTokens
from headway.requests.prompts import BYTES, Message, Prompt, whole_text
from headway.requests.tool_use import with_parameters

Messages = Sequence[Mapping[str, Any]]
_WRITES_TEXT: Final = re.compile(r"\+\s*\w+(?:\['function'\]|\.function)?(?:\['arguments'\]|\.arguments)(?!\s*\|)")
"""A template that joins arguments to a text, as that of DeepSeek V3 does, and so wants them as one."""
TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Field with the text of a part of content, by the part's type."""
_NO_SYSTEM: Final = re.compile(r"system role.{0,20}not supported", re.IGNORECASE)
"""What a template says that knows no messages of the system."""
_DESCRIPTION: Final = """\
You may call functions to help with the user's request. These are the functions, as JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between these marks, once for each call:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>
The results follow between <tool_response> and </tool_response>. Call no function where none is needed."""


def template_text(tokenizer: Any) -> str:
    """A tokenizer's chat templates as one text; empty without one."""
    given = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, given.values())) if isinstance(given, Mapping) else str(given)


def text_field(part: Mapping[str, Any], name: str, place: str, optional: bool = False) -> str:
    """Return a field that must be a text. place: of the part in its request. optional: absent and null are an empty text.

    :raises PromptError: it is something else; the error names the field.
    """
    value = part.get(name)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise PromptError(f"{place}.{name}", "a text", shown(value, 60) if name in part else "none")
    return value


def prepared(messages: Messages, template: str) -> list[dict[str, Any]]:
    """Messages for a template: content that is null becomes empty, arguments of calls objects, and reasoning has both its names.

    A developer's messages are the system's where the template does not know developers.

    :raises PromptError: a message, or a part of one, of the wrong kind; the error names its place.
    """
    as_text = _WRITES_TEXT.search(template) is not None
    role = "developer" if "developer" in template else "system"
    return [_prepared(message, f"messages.{number}", as_text, role) for number, message in enumerate(messages)]


def _prepared(message: Any, place: str, as_text: bool, developer: str) -> dict[str, Any]:
    """Check a message, and make it one for a template. developer: the role of a developer's messages."""
    if not isinstance(message, Mapping):
        raise PromptError(place, 'a message such as {"role": "user", "content": "Hello"}', shown(message, 60))
    made = dict(message)
    role = text_field(message, "role", place)
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        text_field(message, name, place, optional=True)
    if role == "developer":
        made["role"] = developer
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if made.get(name) is not None and made.get(other) is None:
            made[other] = made[name]
    calls = made.get("tool_calls")
    if calls is None:
        made.pop("tool_calls", None)
    elif isinstance(calls, Sequence) and not isinstance(calls, str):
        made["tool_calls"] = [_call(call, f"{place}.tool_calls.{number}", as_text) for number, call in enumerate(calls)]
    else:
        raise PromptError(f"{place}.tool_calls", "a list of calls", shown(calls, 60))
    if made.get("content") is None and (role == "assistant" or calls is not None):
        made["content"] = ""
    _check_content(made.get("content"), f"{place}.content")
    return made


def _check_content(content: Any, place: str) -> None:
    """Check that a message's content is a text, or parts that are texts."""
    if isinstance(content, str):
        return
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise PromptError(place, "a text or a list of parts", shown(content, 60))
    for number, part in enumerate(content):
        if isinstance(part, Mapping):
            kind = text_field(part, "type", f"{place}.{number}")
            if kind not in TEXTS:
                raise PromptError(f"{place}.{number}", f"a part that is a text ({', '.join(TEXTS)})", shown(kind, 60))
            text_field(part, TEXTS[kind], f"{place}.{number}")
        elif not isinstance(part, str):
            raise PromptError(f"{place}.{number}", 'a part such as {"type": "text", "text": "Hello"}', shown(part, 60))


def _call(call: Any, place: str, as_text: bool) -> dict[str, Any]:
    """Check a call, and make it one for a template."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        need = 'a call such as {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'
        raise PromptError(
            place if function is None else f"{place}.function", need, shown(call if function is None else function, 60)
        )
    if call.get("type") not in (None, "function"):
        raise PromptError(f"{place}.type", "function, the one type of calls that models make here", shown(call["type"], 60))
    text_field(call, "id", place, optional=True)
    text_field(function, "name", f"{place}.function")
    given = function.get("arguments")
    read = call_arguments(given, f"{place}.function.arguments")
    arguments = (given if isinstance(given, str) else json.dumps(read, ensure_ascii=False)) if as_text else read
    return {**call, "function": {**function, "arguments": arguments}}


def call_arguments(given: Any, place: str) -> Mapping[str, Any]:
    """Return the arguments of a call, an object or its JSON. An empty text is no arguments.

    :raises PromptError: they are something else; the error names the place.
    """
    read = given
    if isinstance(given, str):
        try:
            read = parse_json(given or "{}", place, any_number=True)
        except ValueError:
            raise PromptError(place, "arguments that are JSON", shown(given, 60)) from None
    if not isinstance(read, Mapping):
        raise PromptError(place, "arguments that are a JSON object", shown(given, 60))
    return read


def described(messages: Messages, tools: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages for a template without tools: a description of the tools in the first, and calls and results as text."""
    listed = [_as_text(message) for message in messages]
    if not tools:
        return listed
    description = _DESCRIPTION.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    role = "user" if _NO_SYSTEM.search(template) else "system"
    first = listed[0] if listed else {}
    if first.get("role") != role:
        return [{"role": role, "content": description}, *listed] if role == "system" else listed
    return [{**first, "content": _joined(description, first.get("content"))}, *listed[1:]]


def _joined(description: str, content: Any) -> Any:
    if isinstance(content, str):
        return f"{description}\n\n{content}"
    return [{"type": "text", "text": f"{description}\n"}, *content] if isinstance(content, Sequence) else description


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        content = message.get("content")
        return {"role": "user", "content": f"<tool_response>\n{_words(content)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    written = [
        "<tool_call>\n"
        + json.dumps({key: call["function"].get(key) for key in ("name", "arguments")}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in message["tool_calls"]
    ]
    said = _words(message.get("content"))
    return {"role": message.get("role"), "content": "\n".join([said, *written] if said else written)}


def _words(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


_VARIABLES: Final = frozenset(("documents", "tools", "add_generation_prompt", "continue_final_message"))
"""Variables of templates that are arguments of transformers' apply_chat_template, too."""
_RENDERING: Final = frozenset(("self", "messages", "conversations"))
"""Further names that transformers and Jinja use where they render a template."""
_READS_PARTS: Final = re.compile(r"for\s+\w+\s+in\s+(?:\w+\.|\w+\[['\"])?content\b")
"""A template that writes the parts of a message's content itself, one behind the other."""


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
