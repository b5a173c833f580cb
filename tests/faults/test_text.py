"""Hostile names in a terminal, a log, Markdown, CSV, a page and a picture."""

from __future__ import annotations

import csv
import io
import logging
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from headway.bench.crossover.export import to_html
from headway.bench.crossover.report import notes, print_view, to_csv, to_markdown, view
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.sequence import Sequence
from headway.core.sampling.params import SamplingParams
from headway.core.system.logs import LogFormatter
from headway.core.system.terminal import Terminal, for_standard_output
from headway.core.system.text import csv_cell, harmless, markdown, page, picture
from tables import a_cell, a_table

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
