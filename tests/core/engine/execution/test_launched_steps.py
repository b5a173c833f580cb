"""Pinned memory for a step's tokens is reused once the step has been read, and never before."""

from __future__ import annotations

import torch

from headway.core.engine.execution.host_rows import HostResults, Launched


def test_memory_is_reused_once_its_step_has_been_read() -> None:
    results, tokens = HostResults(4, torch.device("cpu")), torch.arange(3)
    first, second = results.copy(tokens), results.copy(tokens + 10)
    tokens.fill_(99)  # as the next replay does
    assert first.wait().tolist() == [0, 1, 2]
    third = results.copy(tokens)
    assert third.memory.data_ptr() == first.memory.data_ptr() != second.memory.data_ptr()
    assert second.wait().tolist() == [10, 11, 12]


def test_tokens_of_a_step_stay_when_its_memory_is_reused() -> None:
    results = HostResults(4, torch.device("cpu"))
    launched = Launched(results.copy(torch.tensor([5, 6])), None)
    sampled = launched.wait()
    results.copy(torch.tensor([7, 8]))
    assert launched.wait() is sampled
    assert sampled.plain_tokens() == [5, 6]


def test_memory_of_a_step_nobody_waited_for_is_not_reused() -> None:
    results = HostResults(4, torch.device("cpu"))
    lost = results.copy(torch.tensor([1]))
    assert results.num_free == 0
    assert results.copy(torch.tensor([2])).memory.data_ptr() != lost.memory.data_ptr()


def test_memory_grows_to_the_largest_step() -> None:
    results, tokens = HostResults(4, torch.device("cpu")), torch.arange(12).view(3, 4)
    small, large = results.copy(torch.tensor([5])), results.copy(tokens)
    assert large.wait().tolist() == tokens.tolist()
    assert small.wait().tolist() == [5]
    again = results.copy(tokens + 1)
    assert again.memory.data_ptr() == large.memory.data_ptr()
    assert again.wait().tolist() == (tokens + 1).tolist()
