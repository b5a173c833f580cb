"""What parameters do to logits, beside transformers' processors and the formulas that define them; rows stay strangers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headway.core.sampling.batch_processors import BatchLogitsProcessor, BatchUpdate, ProcessorBatch, process_dict_updates
from headway.core.sampling.logits_shaper import LogitsShaper, Shaped
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import NO_TOKEN_LEFT, NOT_A_TOKEN, SHAPING, greedy, need_of
from headway.core.sampling.structured import StructuredOutputsParams
from sample_tokens import choose, take

VOCAB = 60


class Row:
    """A sequence: parameters, prompt and output."""

    def __init__(self, random: Random, **wish: object) -> None:
        self.params = SamplingParams(**wish)
        self.prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, 12))]
        self.output = [random.randrange(VOCAB) for _ in range(random.randint(0, 30))]

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def shape(logits: torch.Tensor, rows: Sequence[Row], stops: Sequence[int] = (), noted: int = 0) -> torch.Tensor:
    """noted: tokens at the end of every row that the device learns one by one."""
    shaper = LogitsShaper(VOCAB, logits.device)
    for number, row in enumerate(rows):
        known = row.tokens[: max(len(row.tokens) - noted, 1)]
        shaper.start(number, row.params, need_of(row.params), known, len(row.prompt), stops)
        for place in range(len(known), len(row.tokens)):
            shaper.note(numpy.array([number]), numpy.array([place]), torch.tensor([row.tokens[place]]))
    needs = numpy.array([need_of(row.params) & SHAPING for row in rows], dtype=numpy.int32)
    at = numpy.flatnonzero(needs)
    lens = numpy.array([len(row.tokens) for row in rows])
    return shaper.shape(logits, Shaped(at, at, lens[at], needs[at]), None, None)


def many(random: Random, **wish: object) -> list[Row]:
    return [Row(random, **wish) for _ in range(6)]


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
@pytest.mark.parametrize("noted", [0, 5])
def test_the_repetition_penalty_is_transformers(penalty: float, noted: int) -> None:
    rows, logits = many(Random(penalty), repetition_penalty=penalty), torch.randn(6, VOCAB) * 3
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    expected = [theirs(torch.tensor([row.tokens]), each[None].clone())[0] for row, each in zip(rows, logits, strict=True)]
    assert torch.equal(shape(logits, rows, noted=noted), torch.stack(expected))


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    random = Random(1)
    rows = [Row(random, presence_penalty=random.uniform(-2, 2), frequency_penalty=random.uniform(-2, 2)) for _ in range(6)]
    logits = torch.randn(6, VOCAB, dtype=torch.float64)
    expected = logits.clone()
    for number, row in enumerate(rows):
        for token in range(VOCAB):
            count = row.output.count(token)
            expected[number, token] -= row.params.frequency_penalty * count + row.params.presence_penalty * (count > 0)
    torch.testing.assert_close(shape(logits.float(), rows).double(), expected, rtol=0, atol=2e-6)


def test_bad_words_are_transformers_over_the_output() -> None:
    random = Random(2)
    rows, expected, logits = [], [], torch.randn(30, VOCAB)
    for number in range(30):
        row = Row(random)
        ends = [row.output[-size:] for size in (1, 2, 4) if size <= len(row.output)]
        words = [[*end, random.randrange(VOCAB)] for end in ends if random.random() < 0.7]
        words += [[random.randrange(VOCAB) for _ in range(size)] for size in (1, 2, 3)]
        words += [[*row.tokens[-len(row.output) - 1 :], 7]]  # would be complete only with the prompt's last token
        row.params = SamplingParams(bad_words_token_ids=words, temperature=0)
        theirs = NoBadWordsLogitsProcessor([word for word in words if len(word) <= len(row.output) + 1], eos_token_id=-1)
        output = torch.tensor([[VOCAB, *row.output]])  # some transformers pass over words longer than their text
        rows.append(row)
        expected.append(theirs(output, logits[number : number + 1].clone())[0])
    assert any(row.params.bad_words_token_ids[0] for row in rows)
    assert torch.equal(shape(logits, rows), torch.stack(expected))


def test_logit_bias_and_allowed_tokens_are_transformers() -> None:
    random, logits = Random(3), torch.randn(6, VOCAB)
    biased = [
        Row(random, logit_bias={token: random.uniform(-100, 100) for token in random.sample(range(VOCAB), n)})
        for n in range(1, 7)
    ]
    allowed = [Row(random, allowed_token_ids=random.sample(range(VOCAB), n)) for n in range(1, 7)]
    for number, each in enumerate(shape(logits, biased)):
        theirs = SequenceBiasLogitsProcessor({(token,): value for token, value in biased[number].params.logit_bias.items()})
        torch.testing.assert_close(each, theirs(torch.tensor([[1]]), logits[number : number + 1].clone())[0])
    for number, each in enumerate(shape(logits, allowed)):
        theirs = SuppressTokensLogitsProcessor(set(range(VOCAB)) - set(allowed[number].params.allowed_token_ids))
        assert torch.equal(each, theirs(torch.tensor([[1]]), logits[number : number + 1].clone())[0])


def test_temperature_top_k_top_p_and_min_p_are_transformers() -> None:
    random, logits = Random(4), torch.randn(12, VOCAB) * 3
    rows = []
    for number in range(12):
        wish = {"temperature": random.uniform(0.3, 2)}
        wish |= {"top_k": random.randint(1, 20)} if number % 2 else {}
        wish |= {"top_p": random.uniform(0.3, 0.99)} if number % 3 else {"min_p": random.uniform(0.01, 0.3)}
        rows.append(Row(random, **wish))
    ours = shape(logits, rows)
    for number, row in enumerate(rows):
        expected, params = TemperatureLogitsWarper(row.params.temperature)(None, logits[number : number + 1]), row.params
        if params.top_k > 0:
            expected = TopKLogitsWarper(params.top_k)(None, expected)
        if params.top_p < 1:
            expected = TopPLogitsWarper(params.top_p)(None, expected)
        if params.min_p > 0:
            expected = MinPLogitsWarper(params.min_p)(None, expected)
        torch.testing.assert_close(ours[number], expected[0], rtol=1e-5, atol=1e-5)


def test_min_tokens_keeps_stops_away_until_there_are_enough() -> None:
    random = Random(5)
    rows = [Row(random, min_tokens=10, max_tokens=40) for _ in range(20)]
    for row, each in zip(rows, shape(torch.zeros(20, VOCAB), rows, stops=[3, 9]), strict=True):
        early = len(row.output) < 10
        assert torch.isinf(each).nonzero()[:, 0].tolist() == ([3, 9] if early else [])
    assert {len(row.output) < 10 for row in rows} == {True, False}


WISHES = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 0, "repetition_penalty": 1.7},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {3: 5.0, 7: -100.0}},
    {"allowed_token_ids": [1, 5, 9, 33]},
    {"bad_words_token_ids": [[4], [2, 3], [9, 8, 7]]},
    {"min_tokens": 16, "temperature": 1.5},
    {"top_k": 5},
    {"top_p": 0.8, "min_p": 0.05},
    {"top_k": 3, "repetition_penalty": 0.6, "logit_bias": {1: 2.0}, "bad_words_token_ids": [[1, 2]]},
]


def test_a_rows_token_is_the_same_alone_and_among_all_others() -> None:
    random = Random(6)
    rows = [Row(random, **wish) for wish in WISHES for _ in range(4)]
    random.shuffle(rows)
    logits = torch.randn(len(rows), VOCAB)
    seeds, places = list(range(len(rows))), [len(row.tokens) for row in rows]

    def chosen(which: Sequence[int]) -> list[int]:
        own = [rows[number] for number in which]
        lens = min(len(row.prompt) for row in rows)
        return choose(
            logits[list(which)],
            [row.params for row in own],
            [seeds[number] for number in which],
            [places[number] for number in which],
            [row.tokens for row in own],
            lens,
            stops=[0],
        ).tokens.tolist()

    together = chosen(range(len(rows)))
    assert [chosen([number])[0] for number in range(len(rows))] == together
    half = random.sample(range(len(rows)), len(rows) // 2)
    assert chosen(half) == [together[number] for number in half]


def test_where_nothing_may_come_there_is_no_token_and_a_nan_stays_one() -> None:
    logits = torch.randn(3, VOCAB)
    logits[2, 5] = torch.nan
    nothing = SamplingParams(allowed_token_ids=[4], bad_words_token_ids=[[4]])
    tokens = take(
        logits, [nothing, SamplingParams(allowed_token_ids=[4]), SamplingParams(allowed_token_ids=[4])], [0] * 3, [1] * 3
    )
    assert tokens.tolist() == [NO_TOKEN_LEFT, 4, NOT_A_TOKEN]
    assert int(greedy(logits)[2]) == NOT_A_TOKEN


def test_what_asks_for_nothing_changes_no_logits() -> None:
    plain = SamplingParams(
        top_k=0,
        top_p=1.0,
        min_p=0,
        repetition_penalty=1.0,
        presence_penalty=0,
        logit_bias={},
        bad_words=[],
        logits_processors=None,
    )
    assert not need_of(plain)
    assert not need_of(SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1)), "greedy takes the most likely in any case"
    assert need_of(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))) & SHAPING


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
