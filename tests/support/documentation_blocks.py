"""The code of the documentation: every block of README.md and of the site's pages, and what the page says about running it.

A comment on the line before a block tells what the tests cannot do with it:

    <!-- not run: needs a GPU -->            the block is skipped with this reason; its commands are still parsed
    <!-- output of another machine -->       the block is run; what it printed here is not compared

and `<!-- no code of this page is run: REASON -->` near the top of a page holds for all of its blocks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
_MARK = re.compile(r"<!-- (?:not run: (?P<reason>.+?)|(?P<other>output of another machine)) -->\s*$")
_WHOLE_PAGE = re.compile(r"^<!-- no code of this page is run: (.+?) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    """As the fence says; "commands" for an indented block."""
    text: str
    reason: str = ""
    """Reason why the block is not run."""
    compared: bool = True
    """True if any machine prints the shown output, except for numbers."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The lines that a shell gets: those after "$ " of a console, all of an indented block that begins with a command."""
        if self.language == "console":
            lines = [line[2:] for line in _joined(self.text) if line.startswith("$ ")]
        elif self.language == "commands" and re.match(r"(\w+=\S+ )*(headway|python -m|make|pip|pytest|time) ", self.text):
            lines = [line for line in _joined(self.text) if not line.startswith((" ", "#", "✗", "LLM("))]
        else:
            lines = []
        return [line for line in lines if line.strip()]

    @property
    def outputs(self) -> list[tuple[str, list[str]]]:
        """Each command of a console with the lines that it is shown to print."""
        found: list[tuple[str, list[str]]] = []
        for line in _joined(self.text):
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found:
                found[-1][1].append(line)
        return found


def _joined(text: str) -> list[str]:
    """Return lines, joining a line that ends with a backslash with the next."""
    return text.replace("\\\n", " ").splitlines()


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md, and the pages of the site's navigation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / name for name in nav_pages())]


def nav_pages() -> dict[str, str]:
    """Title of each page in the site's navigation, by its path below docs/."""

    def leaves(sections: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        for section in sections:
            for title, content in section.items():
                yield from [(content, title)] if isinstance(content, str) else leaves(content)

    return dict(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    whole = _WHOLE_PAGE.search(text)
    lines, found, name = text.splitlines(), [], page.relative_to(ROOT).as_posix()
    for token in MarkdownIt("commonmark").parse(text):
        if token.type not in ("fence", "code_block") or token.map is None:
            continue
        start = token.map[0]
        before = next((line for line in reversed(lines[:start]) if line.strip()), "")
        mark = _MARK.search(before)
        reason = (mark and mark["reason"]) or (whole[1] if whole else "")
        language = token.info.split()[0] if token.info.strip() else "commands" if token.type == "code_block" else ""
        found.append(Block(name, start + 1, language, token.content, reason, not (mark and mark["other"])))
    return found


def headway_arguments(command: str) -> list[str] | None:
    """The arguments of a `headway` command line, comments left out; None where another program is called."""
    words = shlex.split(command, comments=True)
    while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] == "time"):  # variables
        words = words[1:]
    for separator in ("|", "&&", ">", "2>"):
        if separator in words:
            words = words[: words.index(separator)]
    return words[1:] if words and words[0] == "headway" else None


def pattern(shown: str) -> re.Pattern[str] | None:
    """Return the pattern for a line of output, with any numbers and runs of blanks; None for "..." and for blank lines."""
    if not shown.strip() or shown.strip() == "...":
        return None
    words = [
        re.sub(r"\d[\d.,:-]*", r"\\d[\\d.,:-]*", re.escape(word).replace(r"\.", ".").replace(r"\-", "-"))
        for word in shown.split()
    ]
    return re.compile(r"\s+".join(words))
