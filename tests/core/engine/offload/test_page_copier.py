"""Copies that fail unnoticed: the failure is raised where their slot is waited for, and nothing else is held up."""

from __future__ import annotations

import pytest

from headway.core.engine.offload.page_copier import CopyEvents, CopyInFlight


class Event:
    """Stands for one of the device's, whose copies are made, under way, or have failed."""

    def __init__(self, state: bool | Exception) -> None:
        self.state = state

    def query(self) -> bool:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def synchronize(self) -> None:
        self.query()


def test_failed_copy_is_raised_where_its_slot_is_waited_for_and_holds_up_no_step() -> None:
    made, under_way, failed = Event(True), Event(False), Event(RuntimeError("CUDA error: uncorrectable ECC error"))
    events = CopyEvents()
    for number, event in enumerate((made, under_way, failed)):
        events.add(event, [number], [number])  # type: ignore[arg-type]
    events.forget_done()
    assert events.of_pages(range(3)) == [under_way], "a step would wait for a copy that has ended"
    assert events.of_copies([], range(3)) == [under_way, failed]
    events.wait_for_slot(0)
    with pytest.raises(RuntimeError, match="ECC"):
        events.wait_for_slot(2)


def test_copies_of_one_event_are_waited_for_once() -> None:
    events, event = CopyEvents(), Event(False)
    events.add(event, [3, 4], [0, 1])  # type: ignore[arg-type]
    assert events.of_copies([3, 4, 5], [0, 1]) == [event]


def test_copy_in_flight_reports_its_end_and_its_failure() -> None:
    assert CopyInFlight(None).done()
    assert not CopyInFlight(Event(False)).done()  # type: ignore[arg-type]
    failed = CopyInFlight(Event(RuntimeError("CUDA error: uncorrectable ECC error")))  # type: ignore[arg-type]
    assert failed.done()
    with pytest.raises(RuntimeError, match="ECC"):
        failed.result()
