"""When guesses are verified: where they pay by the times of the steps, and never for a proposer that is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.sequence import Sequence, Status
from headway.core.engine.scheduling.drafting import COSTLY, MEASURING, Drafting
from headway.core.sampling.params import SamplingParams
from headway.core.speculation.proposers import NO_DRAFTS, PLAIN, StepTimes, width_of
from headway.registry import Registry
from tiny_engine import TinyModel, Told, drain, generate, made_engine, tokens_of, told_of

SMALL = EngineConfig(block_size=8, kv_cache_memory=2**20)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = [[1, 2, 3], list(range(20)), [7], [5] * 11]


def sequences(count: int) -> list[Sequence]:
    """Decoding, each with a token to compute."""
    found = []
    for number in range(count):
        seq = Sequence(str(number), 0, [1, 2, 3, 4], SamplingParams(max_tokens=100), frozenset(), 200)
        seq.num_computed, seq.status = 3, Status.RUNNING
        found.append(seq)
    return found


def times_of(plain: float, wide: float) -> StepTimes:
    times = StepTimes()
    for count in (1, 64):
        for _ in range(5):
            times.note(count, PLAIN, plain)
            times.note(count, NO_DRAFTS, plain)
            for width in (2, 4, 8):
                times.note(count, width, wide)
    return times


@pytest.mark.parametrize(("wide", "pays"), [(1.05, True), (1.9, True), (4.0, True), (4.4, False)])
def test_guesses_are_verified_where_they_give_more_tokens_per_second(wide: float, pays: bool) -> None:
    """A new sequence is expected to accept four guesses of five: of seven 4.16 tokens a step come."""
    drafting = Drafting(Told(lambda _: [9] * 7), 50, times=times_of(1.0, wide))
    for count in (1, 64):
        ready = sequences(count)
        drafting.plan(ready)
        assert all(bool(seq.draft_token_ids) is pays for seq in ready)
        assert drafting.rests is not pays


def test_refused_guesses_start_a_rest_which_ends_with_a_trial() -> None:
    drafting = Drafting(Told(lambda _: [9] * 7), 50, times=times_of(1.0, 1.2))
    (seq,) = sequences(1)
    drafted = []
    for _ in range(400):
        drafting.plan([seq])
        drafted.append(len(seq.draft_token_ids))
        if seq.draft_token_ids:
            drafting.verified(seq, len(seq.draft_token_ids), 0)
            seq.draft_token_ids = []
    assert sum(map(bool, drafted[:20])) > 5
    assert 2 <= sum(map(bool, drafted[200:])) < 5
    for _ in range(40):
        drafting.verified(seq, 7, 7)
    resumed = []
    for _ in range(80):
        drafting.plan([seq])
        resumed.append(len(seq.draft_token_ids))
    assert resumed[-1] == 7, "all of them, where nearly all hold"


def test_steps_without_guesses_are_measured_first() -> None:
    drafting = Drafting(Told(lambda _: [9]), 50, times=StepTimes())
    (seq,) = sequences(1)
    drafting.plan([seq])
    assert not seq.draft_token_ids
    assert drafting.rests


def test_guessing_resumes_after_a_slow_spell() -> None:
    """Only steps with guesses tell how long these take: what was measured under load would forbid them for ever."""
    times, (seq,), drafted = times_of(1e-3, 50e-3), sequences(1), 0
    drafting = Drafting(Told(lambda _: [9] * 7), 50, times=times)
    for _ in range(3000):
        if drafting.plan([seq]):
            drafted += 1
            times.note(1, len(seq.draft_token_ids) + 1, 50e-3)
    assert 2 <= drafted < 30, "tried again, and seldom"


def drafted_by_a_wrong_table(found: int, held: int, seconds: float) -> list[int]:
    """Guesses in each of 900 steps, where a table says that they cost 50 times a step without, which takes a millisecond.

    found: guesses of the proposer in each step; held: guesses that are said to have held; seconds: of a step with guesses.
    """
    times, (seq,), drafted = StepTimes(lambda batch, query_len, kv_len: 50e3 * (query_len - 1)), sequences(1), []
    drafting = Drafting(Told(lambda _: [9] * found), 50, times=times)
    for _ in range(900):
        drafts = len(seq.draft_token_ids) if drafting.plan([seq]) else 0
        drafted.append(drafts)
        times.note(1, width_of(drafts + 1) if drafts else PLAIN, seconds if drafts else 1e-3)
        if drafts:
            drafting.verified(seq, held, held)
    return drafted


@pytest.mark.parametrize(("wide", "continues"), [(1.3e-3, True), (20e-3, False)])
def test_a_table_that_is_wrong_does_not_forbid_guesses_for_ever(wide: float, continues: bool) -> None:
    """Each width is tried whatever the table says, and then what was measured counts."""
    drafted = drafted_by_a_wrong_table(found=7, held=5, seconds=wide)
    assert any(drafted[:40])
    assert not any(drafted[:4])
    assert (sum(map(bool, drafted[200:])) > 600) is continues
    assert continues or sum(map(bool, drafted)) == 12


@pytest.mark.parametrize(("narrow", "continues"), [(1.1e-3, True), (20e-3, False)])
def test_fewer_guesses_than_were_asked_for_are_tried_as_well_and_not_for_ever(narrow: float, continues: bool) -> None:
    """A proposer that finds two guesses teaches nothing of seven, whose time stays an estimate."""
    drafted = drafted_by_a_wrong_table(found=2, held=2, seconds=narrow)
    assert (sum(map(bool, drafted[200:])) > 600) is continues
    assert continues or sum(map(bool, drafted)) == 8


def test_times_come_from_the_table_until_they_are_measured() -> None:
    times = StepTimes(lambda batch, query_len, kv_len: 100.0 * query_len)
    assert times.of(4, [8]) == {}
    for seconds in (9.0, 1e-3, 2e-3, 1e-3):  # the first has compiled something
        times.note(4, PLAIN, seconds)
    assert times.of(4, [8])[PLAIN] == pytest.approx(1e-3)
    assert times.of(4, [8], 100)[8] == pytest.approx(1e-3 + 700e-6)
    for _ in range(4):
        times.note(4, 8, 5e-3)
    assert times.of(4, [8], 100)[8] == pytest.approx(5e-3)
    times.note(4, 8, 1e3)
    assert times.of(4, [8], 100)[8] < 8e-3


@pytest.mark.parametrize("overlapped", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, max_tokens=24)], ids=["greedy", "sampled"])
def test_measured_drafts_change_no_token(registry: Registry, params: SamplingParams, overlapped: bool) -> None:
    config = replace(SMALL, async_scheduling=overlapped)
    plain = tokens_of(generate(made_engine(TinyModel(), registry, config), PROMPTS, params))
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    engine = made_engine(TinyModel(), registry, config, proposer=told_of(texts))
    for _ in range(2):
        assert tokens_of(generate(engine, PROMPTS, params)) == plain
    assert set(engine.stats.steps_without_drafts) <= {COSTLY, MEASURING, "no guess"}
    assert engine.stats.steps_without_drafts[MEASURING] > 0


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_the_built_in_proposers_change_no_token(registry: Registry, name: str) -> None:
    from headway.core.contract.text_plugins import ProposerOptions

    plain = tokens_of(generate(made_engine(TinyModel(), registry, SMALL), PROMPTS, GREEDY))
    proposer = registry.proposer(name).make(ProposerOptions())
    engine = made_engine(TinyModel(), registry, SMALL, proposer=proposer, measured=False)
    for _ in range(2):
        assert tokens_of(generate(engine, PROMPTS, GREEDY)) == plain
    assert engine.stats.num_draft_tokens > 0
    if name == "suffix":
        assert engine.stats.num_accepted_tokens > 50, "the second time it knows the outputs"


class Broken(Told):
    def propose(self, token_ids: object, most: int) -> list[int]:
        raise RuntimeError("no idea")


@pytest.mark.parametrize(
    "proposer", [Broken(lambda _: []), Told(lambda _: [50]), Told(lambda _: [-1])], ids=["raises", "50", "-1"]
)
def test_a_broken_proposer_costs_no_request(registry: Registry, proposer: Told, caplog: pytest.LogCaptureFixture) -> None:
    plain = tokens_of(generate(made_engine(TinyModel(), registry, SMALL), PROMPTS, GREEDY))
    engine = made_engine(TinyModel(), registry, SMALL, proposer=proposer, measured=False)
    with caplog.at_level("WARNING", "headway"):
        assert tokens_of(generate(engine, PROMPTS, GREEDY)) == plain
    assert len(caplog.records) == len(PROMPTS)
    assert "continues without drafts, because its proposer raised" in caplog.records[0].message
    assert engine.stats.num_draft_tokens == 0


def test_abort_during_verification_frees_every_page(registry: Registry) -> None:
    proposer = Told(lambda _: [1, 2, 3])
    engine = made_engine(TinyModel(), registry, SMALL, proposer=proposer, measured=False)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), engine.limits.checked(prompt, GREEDY))
    for _ in range(4):
        engine.step()
    engine.abort("1")
    assert len(drain(engine)) == len(PROMPTS) - 1
    assert len(proposer.finished) == len(PROMPTS)


@pytest.mark.parametrize("number", [0, 8, True, "3"])
def test_a_number_of_guesses_out_of_range_is_refused(number: object) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens: needs a whole number"):
        EngineConfig(num_speculative_tokens=number)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="speculate: needs steps whose shape changes no bit"):
        EngineConfig(speculate="ngram", deterministic=True)
