"""Reasons for prefix misses, and books of pages that do not balance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

import stateful_model
import windowed_model
from headway.core.contract.errors import ConfigError
from headway.core.contract.model import Model
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.cache.prefix_lookup import BooksError
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from tiny_engine import TinyModel, generate, made_engine

CONFIG = EngineConfig(attn_backend="sdpa", block_size=8, max_model_len=128, max_num_batched_tokens=256)
GREEDY = SamplingParams(temperature=0, max_tokens=2)
_random = Random(1)
TEXTS = [[_random.randrange(50) for _ in range(100)] for _ in range(8)]


def reports(engine: EngineLoop, *prompts: list[int], params: SamplingParams = GREEDY) -> list[dict[str, int]]:
    """Send the prompts one after another. Their reports add up to the counters."""
    before = engine.stats.snapshot()
    found = [generate(engine, [prompt], params)[0].cache_report for prompt in prompts]
    missed = (engine.stats - before).missed_tokens
    assert missed == {
        each: total
        for each in {*missed} | {reason for report in found for reason in report} - {"device", "offload"}
        if (total := sum(report.get(each, 0) for report in found))
    }
    return found


@pytest.fixture
def engine(registry: Registry) -> EngineLoop:
    """A pool of 40 blocks: three prompts of 100 tokens."""
    return made_engine(TinyModel(), registry, replace(CONFIG, kv_cache_memory=40 * 8 * 256))


def test_a_first_prompt_is_unseen_and_the_same_again_is_found(engine: EngineLoop) -> None:
    first, again, longer, near = reports(engine, TEXTS[0], TEXTS[0], [*TEXTS[0], 1, 2, 3], [*TEXTS[0][:61], *TEXTS[1][:30]])
    assert first == {"unseen": 99, "last_token": 1}
    assert again == {"device": 99, "last_token": 1}
    assert (longer["device"] >= 100, longer["last_token"]) == (True, 1)
    assert near == {"device": 61, "unseen": 29, "last_token": 1}


def test_few_common_tokens_are_too_short_for_a_hit(engine: EngineLoop) -> None:
    _, other = reports(engine, TEXTS[0], [*TEXTS[0][:5], *TEXTS[1][:30]])
    assert other == {"short": 5, "unseen": 29, "last_token": 1}


def test_pages_that_other_prompts_needed_are_evicted(engine: EngineLoop) -> None:
    reports(engine, *TEXTS[:4])
    (again,) = reports(engine, [*TEXTS[0], *range(10)])
    assert again.pop("evicted") + again.pop("device", 0) == 96
    assert again == {"unseen": 13, "last_token": 1}
    assert engine.stats.evictions["capacity"] >= 12


def test_forgotten_prefixes_are_reported(engine: EngineLoop) -> None:
    reports(engine, TEXTS[0])
    engine.forget_prefixes()
    (again,) = reports(engine, TEXTS[0])
    assert again == {"forgotten": 96, "unseen": 3, "last_token": 1}
    assert engine.stats.evictions == {"forgotten": 13}


def test_a_salt_keeps_prefixes_apart(engine: EngineLoop) -> None:
    one, other = replace(GREEDY, cache_salt="one"), replace(GREEDY, cache_salt="other")
    assert reports(engine, TEXTS[0]) == [{"unseen": 99, "last_token": 1}]
    assert reports(engine, TEXTS[0], TEXTS[0], params=one) == [{"salt": 99, "last_token": 1}, {"device": 99, "last_token": 1}]
    assert reports(engine, TEXTS[0], params=other) == [{"salt": 99, "last_token": 1}]
    assert reports(engine, TEXTS[0]) == [{"device": 99, "last_token": 1}]
    with pytest.raises(ConfigError, match="^cache_salt: needs a text that is not empty, or None, got ''$"):
        replace(GREEDY, cache_salt="")


def test_a_prompt_whose_logits_are_wanted_is_not_looked_up(engine: EngineLoop, registry: Registry) -> None:
    _, scored = [*reports(engine, TEXTS[0]), *reports(engine, TEXTS[0], params=replace(GREEDY, prompt_logprobs=1))]
    assert scored == {"prompt_logprobs": 100}
    off = made_engine(TinyModel(), registry, replace(CONFIG, enable_prefix_caching=False))
    assert reports(off, TEXTS[0], TEXTS[0]) == [{"disabled": 100}] * 2


def test_a_partial_block_is_computed_if_no_page_is_free_for_a_copy(registry: Registry) -> None:
    """Thirteen blocks hold the prompt, but not the source of the copy in addition."""
    engine = made_engine(TinyModel(), registry, replace(CONFIG, max_model_len=104, kv_cache_memory=13 * 8 * 256))
    _, longer = reports(engine, TEXTS[0][:20], [*TEXTS[0][:20], *TEXTS[3][:80]])
    assert longer == {"device": 16, "no_page": 4, "unseen": 79, "last_token": 1}


def test_blocks_that_left_a_window_are_reported(registry: Registry) -> None:
    """A prompt that goes on from the middle of a longer one: its windowed pages were freed, and are needed by others first."""
    model = windowed_model.MODELS["two windows"]
    config = replace(CONFIG, max_model_len=192, kv_cache_memory=2**20)
    pages = made_engine(model, registry, config).capacity.pool.page_format
    tight = replace(config, kv_cache_memory=(pages.pages_for(192, 100) + 12) * pages.page_bytes)
    engine = made_engine(model, registry, tight)
    long = SamplingParams(temperature=0, max_tokens=80)
    generate(engine, [TEXTS[0]], long)
    generate(engine, [TEXTS[1]], long)
    assert engine.stats.evictions["window"] > 0
    reasons = {reason for report in reports(engine, *([*TEXTS[1][:cut], 7, 7] for cut in (40, 60, 80, 99))) for reason in report}
    assert "window" in reasons


def test_a_prefix_without_a_saved_state_is_reported(registry: Registry) -> None:
    engine = made_engine(stateful_model.MODELS["kda"], registry, replace(CONFIG, max_model_len=256, kv_cache_memory=2**21))
    text = [*TEXTS[0], *TEXTS[1], *TEXTS[2][:30]]
    first, part = reports(engine, text, [*text[:100], *TEXTS[3][:50]])
    assert first == {"unseen": 229, "last_token": 1}
    assert part["state"] == 96 - part.get("device", 0)
    (again,) = reports(engine, [*text[:100], *TEXTS[4][:50]])
    assert again["device"] == 64, "the place where prompts part is kept"
    assert again["state"] == 32


def test_restored_tokens_are_apart_from_those_of_the_device(registry: Registry) -> None:
    config = replace(CONFIG, kv_cache_memory=20 * 8 * 256, kv_offload_size="4MiB")
    engine = made_engine(TinyModel(), registry, config)
    reports(engine, *TEXTS[:3])
    (again,) = reports(engine, TEXTS[0])
    assert again["offload"] > 0
    assert engine.stats.offload_hits == again["offload"]


def fill(registry: Registry) -> tuple[EngineLoop, BlockManager]:
    """An engine in the middle of two requests that share a prefix."""
    engine = made_engine(TinyModel(), registry, replace(CONFIG, check_books=True))
    long = SamplingParams(temperature=0, max_tokens=20)
    engine.add_request("one", engine.limits.checked(TEXTS[0], long))
    engine.step()
    engine.add_request("two", engine.limits.checked([*TEXTS[0][:64], *TEXTS[1][:20]], long))
    engine.step()
    return engine, engine.blocks


def _page(engine: EngineLoop, place: int, who: int = 0) -> int:
    return engine.scheduler.running[who].tables[0].pages[place]


def _lose_reference(engine: EngineLoop) -> int:
    page = _page(engine, 2)
    engine.blocks.drop(page)
    return page


def _leak(engine: EngineLoop) -> int:
    return engine.blocks.allocate_page()


def _free_twice(engine: EngineLoop) -> int:
    page = _page(engine, 9)
    engine.blocks.drop(page)
    return page


def _swap_in_table(engine: EngineLoop) -> int:
    pages = engine.scheduler.running[0].tables[0].pages
    pages[3], pages[4] = pages[4], pages[3]
    return pages[3]


def _name_wrongly(engine: EngineLoop) -> int:
    page = _page(engine, 5)
    index = engine.blocks.prefixes[0].index
    parent, tokens, _ = index.named[page]
    index.add(page, parent, tokens, b"0123456789abcdef")
    return page


def _outside(engine: EngineLoop) -> int:
    engine.scheduler.running[0].tables[0].pages[11] = 10**6
    return 10**6


def _too_short(engine: EngineLoop) -> int:
    pages = engine.scheduler.running[1].tables[0].pages
    engine.blocks.drop(pages.pop())
    return pages[-1]


FAULTS: list[tuple[Callable[[EngineLoop], int], str]] = [
    (_lose_reference, r"needs 2 references and not to be free, got 1 references and not free; owners: one\.0, two\.0"),
    (_leak, "needs to be free, got 1 references and not free; owners: none"),
    (_free_twice, r"needs 1 references and not to be free, got 0 references and free; owners: one\.0"),
    (_swap_in_table, r"its name is of other tokens than page 3 of one\.0"),
    (_name_wrongly, "its name is of other tokens|its tokens need the name"),
    (_outside, r"needs to be a page of the pool, once in a table; owners: one\.0"),
    (_too_short, r"two\.0 needs room for \d+ tokens in its table, got \d+"),
]


@pytest.mark.parametrize(("plant", "words"), FAULTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_fault_in_the_books_names_the_page_and_its_owners(
    registry: Registry, plant: Callable[[EngineLoop], int], words: str
) -> None:
    engine, blocks = fill(registry)
    blocks.check_integrity(engine.scheduler.holders)
    page = plant(engine)
    with pytest.raises(BooksError, match=f"^page {page}: .*({words})"):
        blocks.check_integrity(engine.scheduler.holders)


def test_check_books_ends_a_step_whose_books_do_not_balance(registry: Registry) -> None:
    engine, _ = fill(registry)
    page = _leak(engine)
    with pytest.raises(BooksError, match=f"page {page}: "):
        engine.step()


def test_an_engine_without_the_option_does_not_check(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Model] = []
    monkeypatch.setattr(EngineLoop, "step", EngineLoop.step.__wrapped__)  # type: ignore[attr-defined]
    monkeypatch.setattr(EngineLoop, "check_books", lambda self: calls.append(self))
    for option in (False, True):
        generate(made_engine(TinyModel(), registry, replace(CONFIG, check_books=option)), [TEXTS[0]], GREEDY)
        assert bool(calls) is option


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_first_token_brings_the_report_and_the_time_of_admission(registry: Registry, overlapped: bool) -> None:
    engine = made_engine(TinyModel(), registry, replace(CONFIG, async_scheduling=overlapped))
    engine.add_request("one", engine.limits.checked(TEXTS[0], SamplingParams(temperature=0, max_tokens=5)))
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
    assert [each.cache_report for each in deltas] == [{"unseen": 99, "last_token": 1}, None, None, None, None]
    assert deltas[0].admitted_time is not None
