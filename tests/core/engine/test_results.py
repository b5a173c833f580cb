"""Memory for what steps bring is taken again once a step has been read, and never before."""

from __future__ import annotations

import torch

from headway.core.engine.launched import Launched
from headway.core.engine.results import HostResults


def test_memory_is_taken_again_once_its_step_has_been_read() -> None:
    results, tokens = HostResults(4, torch.device("cpu")), torch.arange(3)
    first, second = results.copy(tokens), results.copy(tokens + 10)
    tokens.fill_(99)  # as the next replay does
    assert first.wait().tolist() == [0, 1, 2]
    third = results.copy(tokens)
    assert third._memory.data_ptr() == first._memory.data_ptr() != second._memory.data_ptr()
    assert second.wait().tolist() == [10, 11, 12]


def test_what_a_step_has_brought_stays_when_its_memory_is_taken_again() -> None:
    results = HostResults(4, torch.device("cpu"))
    launched = Launched(results.copy(torch.tensor([5, 6])), None)
    sampled = launched.wait()
    results.copy(torch.tensor([7, 8]))
    assert launched.wait() is sampled
    assert sampled.plain_tokens() == [5, 6]


def test_what_nobody_waits_for_is_not_taken_again() -> None:
    results = HostResults(4, torch.device("cpu"))
    lost = results.copy(torch.tensor([1]))
    assert results._free == []
    assert results.copy(torch.tensor([2]))._memory.data_ptr() != lost._memory.data_ptr()


def test_after_a_large_step_there_is_room_for_as_many() -> None:
    results, tokens = HostResults(4, torch.device("cpu")), torch.arange(12).view(3, 4)
    small, large = results.copy(torch.tensor([5])), results.copy(tokens)
    assert large.wait().tolist() == tokens.tolist()
    assert small.wait().tolist() == [5]
    again = results.copy(tokens + 1)
    assert again._memory.data_ptr() == large._memory.data_ptr()
    assert again.wait().tolist() == (tokens + 1).tolist()
