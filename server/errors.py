"""Error responses in the format of each path's API, and handling of unknown fields in request bodies."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headway.core.contract.errors import ConfigError, HeadwayError, PluginError
from headway.core.system.json_text import BODY, JsonError
from headway.core.system.text import harmless, shown, truncated
from headway.hosting.host import EngineDeadError

log = logging.getLogger("headway")

HEADER: Final = b"x-headway-ignored"
"""Response header that lists the ignored fields of the request."""
_MOST_NAMED: Final = 20
_MOST_LOGGED: Final = 1000  # Maximum number of names to log, each once, since clients choose them

_REFUSED: Final = {
    "use_beam_search": "false, because tokens are drawn or chosen one by one",
    "logits_processors": "none in a request; a server's are options of its engine",
    "functions": "none; tools has taken its place in OpenAI's API",
    "function_call": "none; tool_choice has taken its place in OpenAI's API",
    "audio": "none, because models here write text",
    "web_search_options": "none, because this server searches nothing",
    **dict.fromkeys(("image_data", "video_data", "audio_data", "multi_modal_data"), "none, because models here read text alone"),
    "lora_path": "none; the model that a request to /v1/completions names may be an adapter",
    "custom_logit_processor": "none in a request; a server's are options of its engine",
    "thinking_token_budget": "none; max_tokens bounds reasoning and answer together",
    "prompt_embeds": "none in a chat; /v1/completions takes them",
}
"""Fields of OpenAI's, vLLM's and SGLang's APIs that cannot be ignored without changing the answer -> the values allowed here."""
_WITHOUT_EFFECT: Final = frozenset(
    (
        *("metadata", "store", "service_tier", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prediction", "length_penalty", "early_stopping", "request_id", "betas", "guided_decoding_backend"),
        "spaces_between_special_tokens",
    )
)
"""Fields that do not affect the answer here: the caller's identity, billing and storage, and unused beam search parameters."""


class Fields(BaseModel):
    """A request body that keeps unknown fields."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    known_extras: ClassVar[frozenset[str]] = frozenset()
    """Names of additional fields that are used."""

    def unknown(self) -> Sequence[str]:
        """Return the names of ignored fields that have a value. :raises ConfigError: if a field would change the answer."""
        extra = self.model_extra
        if not extra:
            return ()
        for name, need in _REFUSED.items():
            if extra.get(name):
                raise ConfigError(name, need, shown(extra[name], 60))
        known = _WITHOUT_EFFECT | _REFUSED.keys() | self.known_extras
        return [name for name, value in extra.items() if value is not None and name not in known]


class IgnoredFields:
    """Reporter of the request fields that a server ignores. Each name is logged once, and a response header lists the names."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def header(self, names: Sequence[str], path: str) -> list[tuple[bytes, bytes]]:
        """Return the response header for a request's ignored fields. path: the request's path."""
        if not names:
            return []
        shown_names = [re.sub(r"[^a-zA-Z0-9_.-]", "?", name[:60]) for name in names[:_MOST_NAMED]]
        new = [name for name in shown_names if name not in self._logged]
        if new and len(self._logged) < _MOST_LOGGED:
            self._logged.update(new)
            log.warning("%s: unknown fields are ignored: %s", path, ", ".join(new))
        more = [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        return [(HEADER, ", ".join([*shown_names, *more]).encode("latin-1"))]


_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""HTTP status -> OpenAI's error type. Other statuses are `invalid_request_error` below 500 and `server_error` from 500."""

ANTHROPIC = "/v1/messages"
"""Prefix of the paths that use Anthropic's error format."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status -> Anthropic's error type. Other statuses are `invalid_request_error` below 500 and `api_error` from 500."""

_KINDS = re.compile(r"str|bool|(list\[|dict\[|function-|\[key\]).*", re.DOTALL)  # Parts of pydantic's locations that name a type

_NEEDS = {
    "model_type": "input should be an object",
    "dict_type": "input should be an object",
    "list_type": "input should be an array",
}
"""Type of a pydantic error -> the error's text in JSON's terms."""


_LONGEST_MESSAGE = 1000  # Characters of an error message, which may repeat the client's input
_LONGEST_PARAM = 200


class ApiError(Exception):
    """An error response to a request."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        """status: HTTP status. param: the invalid field. code: OpenAI's error code. retry_after: seconds."""
        super().__init__(truncated(harmless(message, keep="\n"), _LONGEST_MESSAGE))
        self.status = status
        self.param = None if param is None else truncated(harmless(param), _LONGEST_PARAM)
        self.code = code
        self.headers: dict[str, str] = {} if retry_after is None else {"retry-after": str(retry_after)}
        if status in (408, 413):
            self.headers["connection"] = "close"  # the rest of the body is not read

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the error."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The JSON object of the error in Anthropic's format, in which only the message names the field."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def response(self, path: str = "") -> Response:
        """Return the error as a response. path: the request's path, which determines the error format."""
        body = self.anthropic_body if path.startswith(ANTHROPIC) else self.body
        return Response(orjson.dumps(body), self.status, self.headers, "application/json")

    def event(self) -> bytes:
        """Return the error as an event for a stream that has begun, since the response's status can no longer be changed."""
        return b"data: " + orjson.dumps(self.body) + b"\n\n"


def api_error(error: BaseException) -> ApiError:
    """Return the error response for any exception raised while handling a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # for an unknown path or method
        found = ApiError(error.status_code, str(error.detail))
        found.headers.update(error.headers or {})
        return found
    if isinstance(error, ValidationError):
        return _invalid(error)
    if isinstance(error, RequestValidationError):  # for a query parameter
        first = error.errors()[0]
        return ApiError(400, f"{first['loc'][-1]}: {first['msg']}", str(first["loc"][-1]))
    if isinstance(error, ConfigError):
        too_long = error.reason.got.endswith("tokens") and error.reason.need.startswith("at most")
        what = error.reason.what  # "prompt 3" is an item of a field
        field = what.partition(": ")[0] if isinstance(error, JsonError) else what.partition(" ")[0]
        return ApiError(400, str(error), None if what == BODY else field, "context_length_exceeded" if too_long else None)
    if isinstance(error, PluginError):  # not the caller's fault
        return ApiError(500, str(error))
    if isinstance(error, HeadwayError):
        return ApiError(400, str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error))
    return ApiError(500, f"{type(error).__name__}: {error}")


def _invalid(error: ValidationError) -> ApiError:
    faults = error.errors(include_url=False, include_context=False)
    first = faults[0]
    place = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or not _KINDS.fullmatch(part))
    more = f" ({len(faults)} faults)" if len(faults) > 1 else ""
    got = repr(first["input"])
    shown = got if len(got) <= 60 else f"{got[:60]}..."
    need = _NEEDS.get(first["type"]) or first["msg"][:1].lower() + first["msg"][1:]
    return ApiError(400, f"{place or 'the body'}: {need}, got {shown}{more}", place or None)
