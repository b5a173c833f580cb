"""Count the expressions that the project's English avoids, with file and line: `python docs/_tools/english.py [PATH ...]`.

Pages are README, CONTRIBUTING, CHANGELOG and docs/*.md without their code blocks. Texts of the sources are docstrings, the
strings below fields and constants, and the help of options. A line that ends in `# english: ok` or `<!-- english: ok -->` is
not counted.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "kernels", "backends", "registry", "models", "tuning", "testing", "plan", "headway", "server", "cli", "bench")
LONG = 40
"""Words of a sentence above which it is counted as long."""
_UNITS = (
    r"tokens?|times?|operations|bytes|rows|programs?|launch(?:es)?|blocks?|threads?|steps?|GB|numbers?|process",
    r"second|token|row|step|layer|head|sequence|GPU|user|request|product|warp|backend",
)


class Expression(NamedTuple):
    """An expression, and what to write instead."""

    pattern: str
    instead: str
    docs: bool = True
    first_line: bool = False
    """True to search only the first line of a text."""
    folders: tuple[str, ...] = ()
    """Folders of the sources in which the expression is searched. Empty means all."""


EXPRESSIONS = {
    "question word": Expression(
        r"^(What|Whether|Which|How|Where|Who|Why|When)\b", "begin with a verb or a noun: Return …, Number of …", False, True
    ),
    "the same": Expression(r"^(The same|Likewise|As `|The (right|other) ones?)\b", "name the thing again", False, True),
    "see": Expression(r"^See \w+\.$", "delete it: an override inherits the docstring", False, True),
    "none:": Expression(r"\bNone: ", "None if …, None means …", False),
    "0:": Expression(r"(^|[ ,;(])-?\d: [a-z]", "0 means …", False),
    "x: of": Expression(r"\b\w+: of (the|a|an|all|each|several|`)", "name the noun: query_len: length of …", False),
    "hang on": Expression(r"\bhang(s|ing)? on\b", "depends on"),
    "so many": Expression(r"\bso many\b", "this many, or the parameter's name"),
    "beside": Expression(r"\bbeside\b", "in addition to, besides, next to, compared with, excluding"),
    "alone": Expression(r"\balone\b", "only, before the word that it limits"),
    "alike": Expression(r"\balike\b|\b[Ll]ikewise\b", "the same, identically, also"),
    "tell of": Expression(r"\btells? (of|how|which|what|that|whether|where|the|it)\b", "reports, shows, says"),
    "told": Expression(r"\b(is|are|was|were) told\b|\btold (of|by|to|what|which)\b", "is notified, reported, identified by"),
    "become of": Expression(r"\b(becomes?|became|came|comes) of\b", "what happens to, the result of"),
    "go by": Expression(r"\bgo(es)? by\b", "uses, follows"),
    "obey": Expression(r"\bobey(s|ed|ing)?\b", "uses, applies"),
    "in place of": Expression(r"\bin place of\b", "instead of"),
    "a second": Expression(rf"\b({_UNITS[0]}) an? ({_UNITS[1]})\b", "per"),
    "of its own": Expression(r"\bof (its|their|your|our|one's|his) own\b", "its own X, a separate X"),
    "product of": Expression(r"\b[Pp]roducts? (of|over)\b", "GEMM, matrix multiplication, linear layer"),
    "way of": Expression(r"\bways? (of|that|serves?|is|are|with|over|for|has)\b", "kernel, kernel variant, method"),
    "lots": Expression(r"\b[Ll]ots?\b(?! of (time|work|them))", "tile (of one expert's rows)"),
    "panels": Expression(
        r"\b[Pp]anels?\b", "packed weight block", False, folders=("kernels", "models")
    ),  # help and plots have panels
    "whole number": Expression(r"\b[Ww]hole numbers?\b", "integer"),
    "floats of bits": Expression(r"\b[Ff]loats? of \d+ bits\b", "FP8, FP4"),
    "matrix unit": Expression(r"\bmatrix units?\b", "tensor cores"),
    "block of threads": Expression(r"\bblocks? of threads\b", "thread block (CTA)"),
    "is no": Expression(r"\b(is|are|was|were) no (?!longer\b|more\b|matter\b|effect\b|one\b)[a-z]+", "is not a …"),
    "of first": Expression(
        r"(?:^|[.;:] )Of (a|an|the|all|each|several|two|what|random|equally|it|them|these|those|its)\b", "put the subject first"
    ),
    "those of": Expression(r"\b(those|ones) (of|that|which|whose)\b", "repeat the noun"),
    "behind": Expression(r"\bbehind\b", "after (order, time), below (rank), slower than (speed)"),
    "stand in": Expression(
        r"\b(stands?|lies|lie|sits?|stood) (in|at|below|above|there|beside|behind|on|before|between|by)\b",
        "is, is stored, is listed",
    ),
    "spare": Expression(r"\b(spares?|spared)\b", "saves, avoids"),
    "take part": Expression(r"\b(takes?|took|taking|taken) part\b", "is used, is measured, is a candidate"),
    "held to": Expression(r"\bheld (to|against)\b", "compared with, checked against"),
    "do without": Expression(r"\b(does|do|goes|go) without\b", "does not need, skips"),
    "where it is": Expression(
        r"\bwhere (it|they|there|that|one|this) (is|are|was|were|has|have|does|do)\b", "if, for a condition; where, for a place"
    ),
    "nobody": Expression(r"\b([Nn]obody|[Ss]omebody|[Ww]hoever)\b", "name who: the caller, the client, a process"),
    "most": Expression(r"\b[Mm]ost (tokens|bytes|sequences|log|guesses|adapters|rows|blocks)\b", "maximum number of"),
    "three semicolons": Expression(r";[^.;|]*;[^.;|]*;", "split the sentence"),
}
ONLY_DOCS = ("three semicolons",)


class Text(NamedTuple):
    """A piece of prose, its file and its first line."""

    path: Path
    line: int
    text: str
    skip: frozenset[int] = frozenset()
    """Lines of the file that are not counted."""


class Found(NamedTuple):
    """An expression in a text."""

    name: str
    where: str
    text: str


def pages(root: Path = ROOT) -> Iterator[Text]:
    """Each page as one text; code blocks and inline code are blanked, so that lines keep their numbers."""
    for path in (
        *(root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted((root / "docs").rglob("*.md")),
    ):
        lines, fence = [], ""
        skip = set()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            mark = re.match(r"\s*(```+|~~~+)", line)
            if mark and not fence:
                fence = mark[1]
            elif mark and line.strip() == fence:
                fence, line = "", ""
            if "english: ok" in line:
                skip.add(number)
            lines.append("" if fence else line)
        yield Text(path, 1, "\n".join(lines), frozenset(skip))


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                text = node.body[0].value  # type: ignore[attr-defined]
                yield text.lineno, text.value
            for field, below in pairwise(node.body):
                if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
                    value = below.value
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield below.lineno, value.value
        elif isinstance(node, ast.Call):
            for argument in node.keywords:
                value = argument.value
                if argument.arg == "help" and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value.lineno, value.value


def sources(root: Path = ROOT) -> Iterator[Text]:
    """Docstrings, texts below fields and constants, and helps of options."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if path.is_symlink() or "__pycache__" in path.parts:
                continue
            source = path.read_text(encoding="utf-8")
            skip = frozenset(number for number, line in enumerate(source.splitlines(), 1) if "english: ok" in line)
            for line, text in _strings(ast.parse(source)):
                yield Text(path, line, text, skip)


def find(texts: Iterator[Text], *, docs: bool) -> Iterator[Found]:
    """Find each expression in some texts."""
    for path, line, text, skip in texts:
        folder = path.relative_to(ROOT).parts[0] if path.is_relative_to(ROOT) else ""
        for name, expression in EXPRESSIONS.items():
            elsewhere = bool(expression.folders) and folder not in expression.folders
            if (docs and not expression.docs) or (not docs and name in ONLY_DOCS) or elsewhere:
                continue
            searched = text.lstrip("\n").split("\n")[0].lstrip() if expression.first_line else text
            for match in re.finditer(expression.pattern, searched, re.MULTILINE):
                number = line + searched.count("\n", 0, match.start())
                if number not in skip:
                    start = searched.rfind("\n", 0, match.start()) + 1
                    shown = searched[start:].split("\n")[0].strip()
                    yield Found(name, f"{path}:{number}", shown[:160])


def sentences(text: str) -> Iterator[str]:
    """Split a page's prose into sentences: those of paragraphs, list items and table cells."""
    block: list[str] = []
    for line in [*text.split("\n"), ""]:
        begins = re.match(r"\s*([-*+]|\d+\.)\s|\s*[#|>]|\s*$|\s*:::", line)
        if begins and block:
            yield from re.split(r"(?<=[.!?])[)*\"”]*\s+(?=[A-Z`*\[(])", " ".join(block))
            block = []
        if line.lstrip().startswith("|"):
            yield from (cell for cell in line.split("|") if cell.strip())
        elif line.strip() and not line.lstrip().startswith("#"):
            block.append(line.strip())


def words(sentence: str) -> int:
    """Count the words of a sentence: inline code is one, links count by their text."""
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", sentence))
    return len(re.findall(r"[^\W\d_][\w'-]*|\d[\d.,]*", plain))


def long_sentences(texts: Iterator[Text]) -> Iterator[Found]:
    """Find the sentences of pages that have more than LONG words."""
    for path, _, text, _ in texts:
        for sentence in sentences(text):
            if words(sentence) > LONG:
                first = " ".join(sentence.split()[:4])
                at = text.find(first)
                number = text.count("\n", 0, max(at, 0)) + 1
                yield Found("long sentence", f"{path}:{number}", sentence[:160])


@cache
def counts() -> dict[str, tuple[int, int]]:
    """Return the number of each expression in pages and in the sources."""
    docs = Counter(found.name for found in find(pages(), docs=True))
    docs["long sentence"] = sum(1 for _ in long_sentences(pages()))
    texts = Counter(found.name for found in find(sources(), docs=False))
    return {name: (docs[name], texts[name]) for name in (*EXPRESSIONS, "long sentence")}


def main() -> None:
    """Print the counts, or what is found in the files that are named."""
    named = [Path(each).resolve() for each in sys.argv[1:]]
    if not named:
        for name, (docs, texts) in counts().items():
            print(f"{name:<18}{docs:6}{texts:6}")
        return
    every = [*find(pages(), docs=True), *long_sentences(pages()), *find(sources(), docs=False)]
    for found in every:
        path = Path(found.where.rpartition(":")[0])
        if any(path == each or each in path.parents for each in named):
            instead = EXPRESSIONS[found.name].instead if found.name in EXPRESSIONS else f"at most {LONG} words"
            print(f"{path.relative_to(ROOT)}:{found.where.rpartition(':')[2]}: {found.name} ({instead})\n    {found.text}")


if __name__ == "__main__":
    main()
