"""What a backend is tested with. The names below are for third parties; the modules beside this one may change."""

from typing import TYPE_CHECKING, Any

__all__ = ["Case", "CheckReport", "Kit", "Wanted", "check", "load_subject", "make_case", "parse_case", "read_check", "reference"]

if TYPE_CHECKING:
    from headway.testing.cases import Case, make_case, parse_case
    from headway.testing.checking import Wanted, check
    from headway.testing.kit import Kit
    from headway.testing.reference import reference
    from headway.testing.report import CheckReport, read_check
    from headway.testing.subject import load_subject

_HOME = {
    "Case": "cases",
    "CheckReport": "report",
    "Kit": "kit",
    "Wanted": "checking",
    "check": "checking",
    "load_subject": "subject",
    "make_case": "cases",
    "parse_case": "cases",
    "read_check": "report",
    "reference": "reference",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: the pytest plugin is imported in every test session."""
    if name not in _HOME:
        raise AttributeError(f"module 'headway.testing' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headway.testing.{_HOME[name]}"), name)
