"""The batch of an engine's logits processors: places, holes and moves, as processors are told of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from headway.core.sampling.batch_processors import BatchLogitsProcessor, BatchUpdate, ProcessorBatch, process_dict_updates
from headway.core.sampling.params import SamplingParams


@dataclass(eq=False)
class Member:
    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)


class AddsOwnNumber(BatchLogitsProcessor):
    """Adds to each row the number of its request and the tokens of its output, by what it remembers of places alone."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, list[int]]] = {}
        self.updates: list[BatchUpdate | None] = []

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        process_dict_updates(self.rows, batch_update, lambda params, _, output: ((params.extra_args or {})["number"], output))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert sorted(self.rows) == list(range(len(logits)))
        return logits + torch.tensor([[self.rows[row][0] + 0.01 * len(self.rows[row][1])] for row in range(len(logits))])


def member(number: int) -> Member:
    return Member(SamplingParams(extra_args={"number": number}), [number])


def expected(members: list[Member]) -> list[float]:
    return [each.prompt[0] + 0.01 * len(each.output) for each in members]


def test_rows_come_back_in_the_order_of_the_step_whoever_comes_and_goes() -> None:
    random, processor = Random(0), AddsOwnNumber()
    batch, running, number = ProcessorBatch([processor]), [], 0
    for _ in range(200):
        running = [each for each in running if random.random() < 0.8]
        for _ in range(random.randrange(4)):
            running.append(member(number := number + 1))
        random.shuffle(running)
        if running:
            found = batch.apply(running, torch.zeros(len(running), 1))
            torch.testing.assert_close(found[:, 0], torch.tensor(expected(running)))
            for each in running:
                each.output.append(0)


def test_an_unchanged_batch_is_told_as_none_and_a_hole_is_filled_by_the_last() -> None:
    processor = AddsOwnNumber()
    batch, (first, second, third) = ProcessorBatch([processor]), map(member, (1, 2, 3))
    logits = torch.zeros(3, 1)
    batch.apply([first, second, third], logits)
    batch.apply([third, first, second], logits)
    batch.apply([second, third], logits[:2])
    begun, same, moved = processor.updates
    assert begun is not None
    assert moved is not None
    assert [place for place, *_ in begun.added] == [0, 1, 2]
    assert same is None
    assert (moved.batch_size, moved.removed, moved.added) == (2, [0], [])
    assert [(source, target) for source, target, _ in moved.moved] == [(2, 0)]


def test_a_newcomer_takes_the_place_of_one_that_left() -> None:
    processor = AddsOwnNumber()
    batch, members = ProcessorBatch([processor]), [member(number) for number in range(3)]
    batch.apply(members, torch.zeros(3, 1))
    fresh = member(9)
    found: Any = batch.apply([members[0], fresh, members[2]], torch.zeros(3, 1))
    assert [place for place, *_ in processor.updates[-1].added] == [1]
    assert found[:, 0].tolist() == [0, 9, 2]
