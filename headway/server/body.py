"""Reading the body of a request: no more than is allowed, in no more time than is allowed."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from headway.server.errors import ApiError
from headway.server.service import ServerOptions

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, kind: type[Body], options: ServerOptions) -> Body:
    """The body as an object of `kind`; it raises as `read_text`.

    :raises pydantic.ValidationError: it is not JSON, or a field has a wrong type.
    """
    return kind.model_validate_json(await read_text(request, options))


async def read_text(request: Request, options: ServerOptions) -> bytes:
    """The body.

    :raises ApiError: it is too large, too slow, or incomplete.
    """
    most = options.max_body_bytes
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise _too_large(most)
    parts, size = [], 0
    try:
        async with asyncio.timeout(options.read_timeout):
            async for part in request.stream():
                size += len(part)
                if size > most:  # a body in chunks does not say how long it is
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body has taken longer than {options.read_timeout:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has gone") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body: needs at most {most} bytes (max_body_bytes)", code="body_too_large")
