"""A request fails alone, before its call is queued or in a step; hostile text is escaped wherever it is shown."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import logging
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from headway import LLM, SamplingParams
from headway.bench.crossover.export import to_html
from headway.bench.crossover.report import notes, print_view, to_csv, to_markdown, view
from headway.core.contract.errors import ConfigError, HeadwayError, PromptError
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.sequence import Sequence
from headway.core.sampling.logits_shaper import LogitsShaper
from headway.core.system.logs import LogFormatter
from headway.core.system.terminal import Terminal, for_standard_output
from headway.core.system.text import csv_cell, harmless, markdown, page, picture
from headway.requests.validation import default_params
from sandbox import save_tiny_model
from tables import a_cell, a_table

GOOD = SamplingParams(max_tokens=3, temperature=0)
NUMBERS = [0, 1, -1, -2, 2**31, 2**63, -(2**63), 2**64, 10**30, 10**400, 0.0, 1e-300, 5e-324, 1e39, 1e308, 1.5, float("nan")]
OTHERS: list[Any] = [float("inf"), -float("inf"), True, False, "", "a", "\ud800", "3", b"", b"ab", 1j, object(), len, None]
ARRAYS = [numpy.float32(1), numpy.int64(3), numpy.array([1, 2]), numpy.array([]), torch.tensor([1, 2])]
LISTS: list[Any] = [
    [],
    [None],
    [1],
    [-1],
    [2**63],
    [1.5],
    ["a"],
    ["\ud800"],
    [b"ab"],
    [True],
    [[]],
    [[1]],
    [[2**63]],
    range(10**30),
]
MAPPINGS: list[Any] = [{}, {1: 1}, {1: float("nan")}, {"1": 1}, {2**63: 1}, {-1: 1}, {1: None}, {1}, iter([1])]
FUNCTIONS: list[Any] = [[lambda ids, logits: 1 / 0], [lambda ids, logits: None], [lambda ids, logits: logits * float("nan")]]
VALUES = [*NUMBERS, *OTHERS, *ARRAYS, *LISTS, *MAPPINGS, *FUNCTIONS]
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


def new_llm(folder: Path) -> LLM:
    return LLM(str(save_tiny_model(folder)), attn_backend="sdpa", num_threads=1, kv_cache_memory=2**21, max_num_seqs=8)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return new_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    return list(llm.generate("the quick", GOOD, use_tqdm=False)[0].outputs[0].token_ids)


def beside_a_good_one(llm: LLM, params: SamplingParams, expected: list[int]) -> str | None:
    """Run a request beside a good one, whose tokens must not change. Returns the error that ended the request, if any."""
    good, other = llm.generate(["the quick", "a dog"], [GOOD, params], use_tqdm=False)
    assert good.outputs[0].error is None, f"the good one ended with: {good.outputs[0].error}"
    assert list(good.outputs[0].token_ids) == expected
    return next((each.error or "" for each in other.outputs if each.finish_reason == "error"), None)


@pytest.mark.parametrize(
    "field", [pytest.param(name, marks=() if name in ("top_k", "min_tokens") else pytest.mark.slow) for name in FIELDS]
)
def test_absurd_parameters_are_refused_by_name_or_are_harmless(llm: LLM, expected: list[int], field: str) -> None:
    for value in VALUES:
        given = {"max_tokens": 2, field: value}
        if field == "max_tokens" and (value is None or (type(value) is int and value > 2)):
            continue  # they mean what they say: to the model's length
        try:
            beside_a_good_one(llm, SamplingParams(**given), expected)
        except HeadwayError as error:
            said = str(error)
            assert field in said
            assert "\n" not in said
            assert len(said) < 500
        assert not llm.engine.has_unfinished


def test_a_bad_second_prompt_leaves_the_first_unqueued(llm: LLM) -> None:
    before = llm.engine.stats.num_prompt_tokens
    for bad in (
        SamplingParams(stop_token_ids=[2**40]),
        SamplingParams(logprobs=10**6),
        SamplingParams(logits_processors=["nobody"]),
    ):
        with pytest.raises(ConfigError):
            llm.generate(["the quick", "a dog"], [GOOD, bad], use_tqdm=False)
        assert not llm.engine.has_unfinished
    with pytest.raises(ConfigError, match="needs SamplingParams, got a NoneType"):
        llm.generate(["the quick", "a dog"], [GOOD, None], use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="priority"):
        llm.generate(["the quick", "a dog"], GOOD, use_tqdm=False, priority=[0, "x"])  # type: ignore[list-item]
    assert llm.engine.stats.num_prompt_tokens == before


def test_invalid_sampling_defaults_of_a_model_are_refused_with_the_file_name(tmp_path: Path) -> None:
    for value in (float("nan"), -1, "hot", True):
        (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
        with pytest.raises(ConfigError, match=r"generation_config\.json: temperature: needs a number"):
            default_params(tmp_path)


def test_a_built_in_model_has_a_recommendation_that_its_own_file_overrules(tmp_path: Path) -> None:
    assert default_params(tmp_path, "smollm2").temperature == 0
    assert default_params(tmp_path, "another") == default_params(tmp_path) == SamplingParams()
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.4, "top_p": 0.8}))
    assert default_params(tmp_path, "smollm2") == default_params(tmp_path) == SamplingParams(temperature=0.4, top_p=0.8)


def test_lone_surrogates_are_refused(llm: LLM) -> None:
    with pytest.raises(PromptError, match="Unicode"):
        llm.generate("caf\udce9", GOOD, use_tqdm=False)


def test_a_fault_in_one_row_ends_that_request_alone(tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = new_llm(tmp_path)  # which has never begun a row that changes logits
    start = LogitsShaper.start

    def failing(self: LogitsShaper, row: int, params: SamplingParams, *others: Any) -> None:
        if params.top_k == 7:
            raise OverflowError("too much for the device")
        start(self, row, params, *others)

    monkeypatch.setattr(LogitsShaper, "start", failing)
    said = beside_a_good_one(llm, SamplingParams(top_k=7, max_tokens=4), expected)
    assert "OverflowError: too much for the device" in said
    assert beside_a_good_one(llm, SamplingParams(top_k=8, max_tokens=4), expected) is None


EVIL = [
    "\x1b]0;owned\x07",
    "\x1b[2J[red]red[/red]",
    "[/]",
    "a\rb\x08",
    "\u202egnp.exe",
    "\u2028next",
    "<script>alert(1)</script>",
    "=HYPERLINK(1)",
    "-1+cmd|' /C calc'!A0",
    "$\\frac{1}{0}$",
    "| a | b |",
    "`code` *b* _i_ [x](http://y)",
    "\x9b31m",
    "name\ud800",
]


@pytest.mark.parametrize("text", EVIL, ids=ascii)
def test_a_terminal_shows_control_characters_as_escapes(text: str) -> None:
    out = Terminal(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    for shown in (text, Text(text), table):
        out.print(shown)
    written = out.file.getvalue()  # type: ignore[attr-defined]
    assert written.encode()  # no surrogate, which no terminal could be sent
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", written)
    kept = harmless(text.replace("\r", "").replace("\x08", "").replace("\x07", ""))  # rich leaves those out
    assert kept in written.replace("\n", "") or len(kept) > 40


def test_a_log_shows_control_characters_as_escapes() -> None:
    record = logging.LogRecord("headway", logging.WARNING, "", 0, "plugin %s", ("\x1b[2J",), None)
    assert LogFormatter("headway: %(message)s").format(record) == "headway: plugin \\x1b[2J"


@seed(19)
@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30))
def test_hostile_text_is_escaped_in_every_medium(text: str) -> None:
    assert all(sign.isprintable() or unicodedata.category(sign) == "Zs" for sign in harmless(text))
    assert harmless(harmless(text)) == harmless(text)
    assert not re.search(r"(?<!\\)[`*\[\]|$~<>]", markdown(text))
    assert not set("<>\"'") & set(page(text))
    assert not re.search(r"(?<!\\)\$", picture(text))
    assert next(csv.reader([csv_cell(text).replace('"', "")]), [""]) is not None
    assert csv_cell(text)[:1] not in ("=", "@", "\t", "\r")


@pytest.mark.parametrize(
    ("text", "same"), [("-1.5e3", True), ("+4", True), ("-x", False), ("vllm_paged", True), ("sdpa.math", True)]
)
def test_harmless_text_is_unchanged(text: str, same: bool) -> None:
    assert (csv_cell(text) == text) is same
    assert harmless(text) == text
    assert markdown("vllm_paged sdpa.math 1.23x") == "vllm_paged sdpa.math 1.23x"


@pytest.mark.parametrize("name", EVIL[:-1], ids=ascii)
def test_hostile_names_of_a_shared_table_are_escaped_wherever_it_is_shown(name: str) -> None:
    cells = [a_cell(10.0, kernel=name, variant=name), a_cell(30.0, kernel="b", variant=name)]
    cells += [a_cell(None, kernel=name, case="1q1s128", kv_len=128, reason=name)]
    table = a_table(*cells, command=name, model=name, busy=name)
    shown = view(table, None, None)
    out = Terminal(file=io.StringIO(), width=200)
    print_view(shown, out)
    text, rows, html = to_markdown(shown), list(csv.DictReader(io.StringIO(to_csv(table)))), to_html(shown)
    for written in (out.file.getvalue(), text, html):  # type: ignore[attr-defined]
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", written)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))  # in code nothing is markup
    assert "<script>" not in prose + html
    assert rows[0]["kernel"] == csv_cell(name)
    assert all(line.count("|") - line.count("\\|") == 6 for line in text.splitlines() if line.startswith("| kv_len"))
    assert len(notes(shown)) >= 2


def test_a_picture_with_hostile_names_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from headway.bench.crossover.plot import to_png

    table = a_table(a_cell(10.0, kernel="$\\frac{$"), a_cell(30.0, kernel="b$x^2$"), model="$\\unknown$")
    assert to_png(view(table, None, None)).startswith(b"\x89PNG")


def test_prompts_whose_hashes_collide_share_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block has the same hash here: a cache that trusted it would answer one prompt with another's keys."""

    class Same:
        def __init__(self, content: bytes, digest_size: int) -> None:
            pass

        def digest(self) -> bytes:
            return b"same"

    monkeypatch.setattr("headway.core.engine.cache.prefix_lookup.hashlib.blake2b", Same)
    blocks = BlockManager(64, 4)

    def sequence(tokens: list[int]) -> Sequence:
        return Sequence("request", 0, tokens, SamplingParams(), frozenset(), 64)

    first = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert blocks.attach_prefix(first) == 0
    assert blocks.reserve(first, 9)
    first.num_computed = 9
    blocks.advance(first)
    other, equal = sequence([9, 9, 9, 9, 5, 6, 7, 8, 9]), sequence([1, 2, 3, 4, 9])
    assert blocks.attach_prefix(other) == 0
    assert blocks.attach_prefix(equal) == 4
    assert equal.tables[0].pages == first.tables[0].pages[:1]
    for each in (first, other, equal):
        blocks.release(each)
    blocks.check_integrity([])


def test_output_of_a_model_is_escaped_for_a_terminal_and_unchanged_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    written = "a\tb\n\x1b]0;title\x07\u202e"
    for watched, shown in ((True, "a\tb\n\\x1b]0;title\\x07\\u202e"), (False, written)):
        monkeypatch.setattr("sys.stdout.isatty", lambda watched=watched: watched)
        assert for_standard_output(written) == shown
