"""A conversation's messages as chat templates read them: calls of tools, reasoning, and tools for templates that have none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headway.core.contract.errors import ConfigError
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown

Messages = Sequence[Mapping[str, Any]]
_WRITES_TEXT: Final = re.compile(r"\+\s*\w+(?:\['function'\]|\.function)?(?:\['arguments'\]|\.arguments)(?!\s*\|)")
"""A template that joins arguments to a text, as that of DeepSeek V3 does, and so wants them as one."""
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


def prepared(messages: Messages, template: str) -> list[dict[str, Any]]:
    """Messages for a template: content that is null becomes empty, arguments of calls objects, and reasoning has both its names.

    A developer's messages are the system's where the template does not know developers.

    :raises ConfigError: a call whose arguments are no JSON object.
    """
    as_text = _WRITES_TEXT.search(template) is not None
    role = "developer" if "developer" in template else "system"
    return [_prepared(message, as_text, role) if isinstance(message, Mapping) else message for message in messages]


def _prepared(message: Mapping[str, Any], as_text: bool, developer: str) -> dict[str, Any]:
    """A message for a template. developer: the role of a developer's messages."""
    made = dict(message)
    if made.get("role") == "developer":
        made["role"] = developer
    if made.get("role") == "assistant" and made.get("content") is None:
        made["content"] = ""
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if isinstance(made.get(name), str) and made.get(other) is None:
            made[other] = made[name]
    calls = made.get("tool_calls")
    if calls is None:
        made.pop("tool_calls", None)
    elif isinstance(calls, Sequence) and not isinstance(calls, str):
        made["tool_calls"] = [_call(call, as_text) for call in calls]
        made["content"] = made.get("content") or ""
    else:
        raise ConfigError("messages", "tool_calls that are a list", shown(calls))
    return made


def _call(call: Any, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    read = given
    if isinstance(given, str):
        try:
            read = parse_json(given or "{}", "messages", any_number=True)
        except ValueError:
            raise ConfigError("messages", "tool calls whose arguments are JSON", repr(given[:60])) from None
    if not isinstance(read, Mapping):
        raise ConfigError("messages", "tool calls whose arguments are a JSON object", shown(given))
    arguments = (given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)) if as_text else read
    return {**call, "function": {**function, "arguments": arguments}}


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
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    ]
    said = _words(message.get("content"))
    return {"role": message.get("role"), "content": "\n".join([said, *written] if said else written)}


def _words(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
