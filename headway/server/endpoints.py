"""Methods as endpoints of an application that does not outlive their object."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakMethod

Answer = TypeVar("Answer")


def endpoint(method: Callable[..., Awaitable[Answer]]) -> Callable[..., Awaitable[Answer]]:
    """A function that does what a bound method does, for as long as somebody else holds the method's object.

    FastAPI keeps the endpoints that it has classified in a cache of its module. A bound method there would hold the engine, its
    weights and its cache after the application is gone.
    """
    held = WeakMethod(method)

    async def answer(*arguments: Any, **named: Any) -> Answer:
        found = held()
        assert found is not None, "the application holds its routes"
        return await found(*arguments, **named)

    answer.__name__, answer.__doc__ = method.__name__, method.__doc__
    answer.__signature__ = inspect.signature(method, eval_str=True)  # type: ignore[attr-defined]
    return answer
