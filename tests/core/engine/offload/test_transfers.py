"""Copies that fail while nobody looks: whoever waits for them is told, and nobody else is held up."""

from __future__ import annotations

import pytest
import torch

from headway.core.engine.offload.slots import HostSlots
from headway.core.engine.offload.transfers import Moved, Transfers, _Copied


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


def test_a_copy_that_failed_is_told_to_who_waits_for_its_slot_and_to_no_step() -> None:
    memory = [torch.zeros(2, 8, 64, dtype=torch.uint8)]
    transfers = Transfers(memory, HostSlots(memory, 4))
    made, under_way, failed = Event(True), Event(False), Event(RuntimeError("CUDA error: uncorrectable ECC error"))
    for number, event in enumerate((made, under_way, failed)):
        transfers._under_way.append(_Copied(event, [number], [number]))
        transfers._page_events[number] = transfers._slot_events[number] = event
    moved = transfers.move_out([(5, 3)])
    assert moved.done()
    assert [each.event for each in transfers._under_way] == [under_way]
    assert set(transfers._page_events) == {1}, "a step would wait for a copy that has ended"
    assert set(transfers._slot_events) == {1, 2}
    with pytest.raises(RuntimeError, match="ECC"):
        transfers.wait_for_slot(2)
    assert Moved(failed).done()
    assert not Moved(under_way).done()
    with pytest.raises(RuntimeError, match="ECC"):
        Moved(failed).result()
