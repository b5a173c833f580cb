"""Conformance tests for backends. The names in `__all__` are public; the submodules may change."""

from typing import TYPE_CHECKING, Any

__all__ = ["Case", "CheckReport", "Kit", "Wanted", "check", "load_subject", "make_case", "parse_case", "read_check", "reference"]

if TYPE_CHECKING:
    from headway.core.oracle.cases import Case, make_case, parse_case, reference
    from headway.testing.kit.checking import Wanted, check
    from headway.testing.kit.kit import Kit
    from headway.testing.kit.report import CheckReport, read_check
    from headway.testing.kit.subject import load_subject

_HOME = {
    "Case": "headway.core.oracle.cases",
    "CheckReport": "headway.testing.kit.report",
    "Kit": "headway.testing.kit.kit",
    "Wanted": "headway.testing.kit.checking",
    "check": "headway.testing.kit.checking",
    "load_subject": "headway.testing.kit.subject",
    "make_case": "headway.core.oracle.cases",
    "parse_case": "headway.core.oracle.cases",
    "read_check": "headway.testing.kit.report",
    "reference": "headway.core.oracle.cases",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use. Names are imported late because pytest imports this package in every test session."""
    if name not in _HOME:
        raise AttributeError(f"module 'headway.testing' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
