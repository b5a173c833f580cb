"""Random examples in two counts: a few in the everyday subset, many among the slow tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def examples(few: int, many: int, **strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Return a decorator that checks `few` examples every day and `many` with the slow tests.

    No example has a deadline, which would fail on a busy machine.
    """

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])
        def test(count: int) -> None:
            settings(max_examples=count, deadline=None)(given(**strategies)(check))()

        test.__name__ = check.__name__
        test.__qualname__ = check.__qualname__
        test.__module__ = check.__module__
        test.__doc__ = check.__doc__
        return test

    return decorate
