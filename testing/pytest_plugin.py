"""The pytest plugin of the conformance kit: `pytest --attn-plugin NAME` or `FILE.py:CLASS` makes one test of each cell.

It is found by its entry point wherever Headway is installed, and loads nothing until the option is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headway.testing.kit.runner import CellProcess

_TARGET = "--attn-plugin"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the kit."""
    group = parser.getgroup("headway", "Headway's conformance kit")
    group.addoption(_TARGET, default="", metavar="NAME|FILE.py:CLASS", help="attention backend to hold to the contract")
    group.addoption("--attn-device", default="cpu", choices=("cpu", "cuda"), help="where the backend runs")
    group.addoption("--attn-full", action="store_true", help="try every pair of values in place of every value")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the cells to what was collected."""
    if config.getoption(_TARGET):
        items.extend(KitCollector.from_parent(session, name=config.getoption(_TARGET)).collect())


class KitCollector(pytest.Collector):
    """The cells of one subject, run in one child process."""

    def collect(self) -> Iterable[pytest.Item]:
        """One test a cell."""
        from headway.core.contract.errors import HeadwayError
        from headway.testing.kit.runner import TIMEOUT, CellProcess

        device = self.config.getoption("--attn-device")
        child = CellProcess(self.name, device, 1, TIMEOUT[device])
        self.config.add_cleanup(child.stop)
        try:
            listed = child.list(quick=not self.config.getoption("--attn-full"))
        except HeadwayError as error:
            raise pytest.UsageError(f"{_TARGET}: {error}") from error
        if listed.unavailable:
            raise pytest.UsageError(f"{_TARGET} {self.name} is not available here: {listed.unavailable}")
        return [CellItem.from_parent(self, name=cell, child=child) for cell in listed.cells]


class CellItem(pytest.Item):
    """One cell."""

    def __init__(self, child: CellProcess, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._child = child

    def runtest(self) -> None:
        """Run the cell; a process that died fails it."""
        from dataclasses import fields

        from headway.core.contract.errors import with_arguments
        from headway.core.engine.data.config import EngineConfig
        from headway.core.system.child import ChildDied

        try:
            result = self._child.run(self.name)
        except ChildDied as died:
            raise CellFailed(f"{died}: the backend takes the process with it") from None
        reason = with_arguments(result.reason, [field.name for field in fields(EngineConfig)])
        if result.status == "skipped":
            pytest.skip(reason)
        if result.status == "failed":
            guess = f"\nlooks like: {result.guess}" if result.guess else ""
            again = f"\nheadway check {self.parent.name if self.parent else ''} --cell {self.name}"
            raise CellFailed(f"{reason}{guess}{again}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The finding alone: the traceback would be of the kit."""
        return str(excinfo.value) if isinstance(excinfo.value, CellFailed) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where the test stands in pytest's listing."""
        return "headway check", None, self.name


class CellFailed(Exception):
    """A cell that failed."""
