"""pytest plugin of the conformance kit: `pytest --attn-plugin NAME` (or `FILE.py:CLASS`) creates one test per cell.

pytest loads the plugin through its entry point wherever Headway is installed. The plugin imports the kit only when the option is
used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headway.testing.kit.runner import CellProcess

_TARGET = "--attn-plugin"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the conformance kit's options."""
    group = parser.getgroup("headway", "Headway's conformance kit")
    group.addoption(_TARGET, default="", metavar="NAME|FILE.py:CLASS", help="attention backend to test against the contract")
    group.addoption("--attn-device", default="cpu", choices=("cpu", "cuda"), help="device to run the backend on")
    group.addoption("--attn-full", action="store_true", help="test every pair of values instead of every value")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the kit's cells to the collected tests."""
    if config.getoption(_TARGET):
        items.extend(KitCollector.from_parent(session, name=config.getoption(_TARGET)).collect())


class KitCollector(pytest.Collector):
    """Collector of the cells of one subject, which run in one child process."""

    def collect(self) -> Iterable[pytest.Item]:
        """Return one test item per cell."""
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
    """Test item of one cell."""

    def __init__(self, child: CellProcess, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._child = child

    def runtest(self) -> None:
        """Run the cell. The test fails if the process dies."""
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
        """Return only the finding, because a traceback would show the kit's code."""
        return str(excinfo.value) if isinstance(excinfo.value, CellFailed) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return the location shown in pytest's listing."""
        return "headway check", None, self.name


class CellFailed(Exception):
    """Raised when a cell fails."""
