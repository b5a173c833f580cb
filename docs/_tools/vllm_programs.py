"""`python docs/_tools/vllm_programs.py`: the programs of tests/headway/vllm_scripts and online_programs as tables of a page.

With --write it replaces the text between the two markers of the page; otherwise it prints.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "headway" / "vllm_scripts"
ONLINE = ROOT / "tests" / "headway" / "online_programs"
PAGE = ROOT / "docs" / "vllm-programs.md"
BEGIN = "<!-- programs: begin, written by python docs/_tools/vllm_programs.py --write -->"
END = "<!-- programs: end -->"


def header(text: str, word: str) -> str:
    """Return the text after a word ("shows", "refused" or "argv") in a program's first comments, or "" if it is not there."""
    comments = re.match(r"(?:#.*\n)*", text)
    found = re.search(rf"^# {word}: (.*)$", comments[0] if comments else "", re.MULTILINE)
    return found[1] if found else ""


def programs(folder: Path) -> list[Path]:
    """Return the programs in a folder's subfolders, by name."""
    return sorted(folder.glob("*/*.py"), key=lambda path: path.stem)


def tables() -> str:
    """Return the tables of both kinds of programs."""
    return f"## Offline programs\n\n{_tables_of(FOLDER)}\n\n## Server programs\n\n{_tables_of(ONLINE)}"


def _tables_of(folder: Path) -> str:
    """Return two tables: the programs that run, and those that are refused with the text of the error."""
    texts = {path.stem: path.read_text() for path in programs(folder)}
    refused = {stem: header(text, "refused") for stem, text in texts.items() if header(text, "refused")}
    running = [stem for stem in texts if stem not in refused]
    options = {stem: header(texts[stem], "server") for stem in running}
    lines = [f"{len(running)} of {len(texts)} programs run:", "", "| program | content |", "|---|---|"]
    lines += [
        f"| `{stem}` | {header(texts[stem], 'shows')}{f' (`{options[stem]}`)' if options[stem] else ''} |" for stem in running
    ]
    lines += [
        "",
        f"Headway refuses {len(refused)} programs:",
        "",
        "| program | missing feature | text in the error message |",
        "|---|---|---|",
    ]
    lines += [f"| `{stem}` | {header(texts[stem], 'shows')} | {words} |" for stem, words in refused.items()]
    return "\n".join(lines)


def page() -> str:
    """Return the page with its current tables."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(tables())
