"""The tools that a request offers to a model, and whether they may or must be called. OpenAI's names, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any, Final, Literal

from headway.core.contract.errors import ConfigError
from headway.core.system.text import shown

Choice = Literal["none", "auto", "required"]
NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a tool that gives none: its calls have the arguments {}."""
_CHOICES = 'none, auto, required or {"type": "function", "function": {"name": NAME}}'


@dataclass(frozen=True)
class ToolUse:
    """Tools, checked."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that may be called: {"type": "function", "function": {"name", "description", "parameters", "strict"}}.

    The parameters of each are the JSON schema of an object."""
    choice: Choice = "none"
    """Whether calls may come, or must."""
    parallel: bool = True
    """Whether an answer may have several calls; a choice of one tool asks for one call."""

    @classmethod
    def of(cls, tools: Sequence[Any] | None, tool_choice: Any = None, parallel_tool_calls: bool | None = None) -> ToolUse:
        """Check what a request says of tools.

        :raises ConfigError: a tool without a name, a schema that is none, two tools of one name, or a choice of a tool that is
            not there.
        """
        listed = [_tool(tool, f"tools.{number}") for number, tool in enumerate(tools or ())]
        names = [tool["function"]["name"] for tool in listed]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("tools", "names that differ", f"two tools called {shown(name)}")
        choice, chosen = _choice(tool_choice, bool(listed))
        for name in chosen or ():
            if name not in names:
                raise ConfigError("tool_choice", f"one of the tools ({', '.join(names) or 'there are none'})", shown(name))
        if choice == "required" and not listed:
            raise ConfigError("tool_choice", "tools beside it", "none")
        kept = [tool for tool in listed if chosen is None or tool["function"]["name"] in chosen]
        one = parallel_tool_calls is False or (isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function")
        return cls(tuple(kept) if choice != "none" else (), choice if kept else "none", not one)

    @cached_property
    def schemas(self) -> dict[str, Any]:
        """JSON schema of the parameters, by each tool's name."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}

    @cached_property
    def strict(self) -> frozenset[str]:
        """Names of the tools whose calls must keep their schema."""
        return frozenset(tool["function"]["name"] for tool in self.tools if tool["function"].get("strict"))


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        got = tool.get("type") if isinstance(tool, Mapping) else tool
        place = f"{where}.type" if isinstance(tool, Mapping) else where
        raise ConfigError(place, "function, the one type of tools that models call here", shown(got, 80))
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ConfigError(f"{where}.function", 'an object such as {"name": "f", "parameters": {...}}', shown(function, 80))
    check_function(function, f"{where}.function")
    checked: Mapping[str, Any] = with_parameters({"type": "function", **tool})
    return checked


def check_function(function: Mapping[str, Any], place: str, parameters: str = "parameters") -> None:
    """Check a function: {"name", "description", "strict"} and its parameters.

    place: of the function in its request. parameters: the name of that field there.

    :raises ConfigError: a field of the wrong kind; the error names it.
    """
    name, description, strict = (function.get(field) for field in ("name", "description", "strict"))
    if not isinstance(name, str) or not 0 < len(name) <= 256 or any(sign.isspace() or sign in "\"'<>{}" for sign in name):
        raise ConfigError(f"{place}.name", "a name without blanks, quotes and brackets", shown(name, 80))
    if not isinstance(description, (str, NoneType)):
        raise ConfigError(f"{place}.description", "a text", shown(description, 80))
    if not isinstance(strict, (bool, NoneType)):
        raise ConfigError(f"{place}.strict", "true or false", shown(strict, 80))
    schema = function.get(parameters)
    if schema is not None and not (isinstance(schema, Mapping) and schema.get("type", "object") == "object"):
        raise ConfigError(f"{place}.{parameters}", "a JSON schema of an object", shown(schema, 80))
    properties = (schema or {}).get("properties", {})
    if not isinstance(properties, Mapping) or not all(isinstance(each, (Mapping, bool)) for each in properties.values()):
        raise ConfigError(f"{place}.{parameters}.properties", "an object of JSON schemas", shown(properties, 80))


def with_parameters(tool: Any) -> Any:
    """Return a tool whose parameters are the JSON schema of an object, or what is not such a tool as it is.

    A tool without parameters (none, null or {}) takes none, as in OpenAI's API.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    schema = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(schema or {}, Mapping):
        return tool
    return {**tool, "function": {**function, "parameters": {"type": "object", **schema} if schema else NO_PARAMETERS}}


def _choice(given: Any, any_tools: bool) -> tuple[Choice, list[str] | None]:
    """Whether calls may come or must, and the names of the only tools that may be called; None: all."""
    if given is None:
        return ("auto" if any_tools else "none"), None
    if given in ("none", "auto", "required"):
        return given, None
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        raise ConfigError("tool_choice.type" if isinstance(given, Mapping) else "tool_choice", _CHOICES, shown(given, 80))
    if given["type"] == "function":
        return "required", [_name_in(given, "tool_choice")]
    if given["type"] != "allowed_tools":
        raise ConfigError("tool_choice", _CHOICES, shown(given, 80))
    allowed, place = given.get("allowed_tools"), "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping):
        raise ConfigError(place, 'an object such as {"mode": "auto", "tools": [...]}', shown(allowed, 80))
    if allowed.get("mode") not in ("auto", "required"):
        raise ConfigError(f"{place}.mode", "auto or required", shown(allowed.get("mode"), 80))
    tools = allowed.get("tools")
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ConfigError(f"{place}.tools", "a list of tools", shown(tools, 80))
    return allowed["mode"], [_name_in(tool, f"{place}.tools.{number}") for number, tool in enumerate(tools)]


def _name_in(choice: Any, place: str) -> str:
    """Return the name of the function of a choice. place: of the choice in its request."""
    if isinstance(choice, Mapping) and choice.get("type", "function") != "function":
        raise ConfigError(f"{place}.type", "function", shown(choice["type"], 80))
    for name in ("function", "name"):
        if not isinstance(choice, Mapping):
            raise ConfigError(place, _CHOICES, shown(choice, 80))
        choice, place = choice.get(name), f"{place}.{name}"
    if not isinstance(choice, str):
        raise ConfigError(place, "the name of a tool", shown(choice, 80))
    return choice
