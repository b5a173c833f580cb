r"""ECMA-262 (JavaScript) regular expressions, rewritten for Rust's regex-syntax, which llguidance uses.

Without flags, the classes are ASCII: \d, \w and \b match only ASCII digits and letters, and (?i) never pairs an ASCII letter with
a non-ASCII character. The flag u, as in (?u), selects Unicode's classes and case folding. \p{...} always uses Unicode's classes.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NoReturn

Ranges = list[tuple[int, int]]
"""Ranges of characters, each given as first and last code point."""

_CLASSES: Final[dict[str, Ranges]] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [
        *[(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)],
        *[(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)],
    ],
}
_LINE_ENDS: Final[Ranges] = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_CONTROLS: Final = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B}
_FLAGS: Final = "imsux"
_LAST_CASED: Final = 0x1E943  # Last code point that has another case

_GROUP: Final = re.compile(r"\((?:\?(?:P?<(?P<name>\w+)>|(?P<on>[a-zA-Z]*)(?:-(?P<off>[a-zA-Z]+))?(?P<end>[:)])))?")
_QUANTIFIER: Final = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_HEX: Final = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[ux]\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})")
_PROPERTY: Final = re.compile(r"[pP](?:\{[^{}]+\}|[A-Z])")
_CONTROL: Final = re.compile(r"c([A-Za-z])|0(?!\d)")
_LOW_HALF: Final = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_LOOK_AROUND: Final = re.compile(r"\(\?<?[=!]")
_NO_LEAST: Final = re.compile(r"\{,\d+\}")
_POSIX: Final = re.compile(r"\[:\^?\w+:\]")
_BLANK: Final = re.compile(r"\s+|#.*")


def rust_regex(pattern: str, flags: str = "") -> str:
    """Return the pattern in Rust's notation without flags, with slashes and line breaks escaped. flags: initial flags, out of
    imsux.

    :raises ValueError: if a part is not an ECMA regular expression, or grammars do not support it.
    """
    return _Rewriter(pattern, flags).rewritten()


class _Rewriter:
    """Rewriter that reads a pattern from left to right and writes each part as it is read."""

    def __init__(self, pattern: str, flags: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._flags = self._with_flags(frozenset(), flags, "")
        self._outer: list[frozenset[str]] = []  # Flags around each open group
        self._written: list[str] = []
        self._repeatable = False  # True if a quantifier may follow

    def rewritten(self) -> str:
        while self._at < len(self._pattern):
            sign = self._pattern[self._at]
            if sign in "(|)":
                self._structure(sign)
            elif quantifier := _QUANTIFIER.match(self._pattern, self._at):
                self._quantify(quantifier[0])
            elif sign in "^$":
                if "m" in self._flags:
                    self._refuse("no anchors of lines (flag m), which grammars cannot follow", sign)
                self._at += 1
                self._write(sign, repeatable=False)
            elif "x" in self._flags and (blank := _BLANK.match(self._pattern, self._at)):
                self._at = blank.end()
            else:
                self._write(self._atom(sign))
        if self._outer:
            self._refuse("a ) for each (", "an open group")
        return "".join(self._written)

    def _write(self, text: str, repeatable: bool = True) -> None:
        self._written.append(text)
        self._repeatable = repeatable

    def _refuse(self, need: str, got: str) -> NoReturn:
        raise ValueError(f"regular expression: needs {need}, got {got} at character {self._at} of {self._pattern!r}")

    def _structure(self, sign: str) -> None:
        if sign == "(":
            self._open()
            return
        self._at += 1
        if sign == ")":
            if not self._outer:
                self._refuse("a ( for each )", "a ) too many")
            self._flags = self._outer.pop()
        self._write(sign, repeatable=sign == ")")

    def _open(self) -> None:
        found = _GROUP.match(self._pattern, self._at)
        assert found is not None
        end = found["end"]
        if found.end() == self._at + 1 and self._pattern.startswith("?", found.end()):
            if _LOOK_AROUND.match(self._pattern, self._at):
                self._refuse("no look-around, which grammars cannot follow", self._pattern[self._at : self._at + 4])
            self._refuse("a group such as (?:, (?<name> or (?i:", self._pattern[self._at : self._at + 4])
        flags = self._flags if end is None else self._with_flags(self._flags, found["on"], found["off"] or "")
        self._at = found.end()
        if end == ")":
            self._flags = flags
            self._repeatable = False
            return
        self._outer.append(self._flags)
        self._flags = flags
        self._write("(?:", repeatable=False)

    def _with_flags(self, flags: frozenset[str], on: str, off: str) -> frozenset[str]:
        for flag in on + off:
            if flag not in _FLAGS:
                self._refuse(f"flags of {', '.join(_FLAGS)}", repr(flag))
        return (flags | set(on)) - set(off)

    def _quantify(self, quantifier: str) -> None:
        if not self._repeatable:
            self._refuse("something before a quantifier to repeat", repr(quantifier))
        self._at += len(quantifier)
        if self._pattern.startswith("?", self._at):
            self._at += 1
            quantifier += "?"
        self._write(quantifier, repeatable=False)

    def _atom(self, sign: str) -> str:
        if sign == "[":
            return self._class()
        if _NO_LEAST.match(self._pattern, self._at):
            self._refuse("a least number in a quantifier, such as {0,5}", "{,")
        self._at += 1
        if sign == ".":
            return "(?s:.)" if "s" in self._flags else _bracketed(_LINE_ENDS, negated=True)
        found = self._escape() if sign == "\\" else ord(sign)
        if isinstance(found, int):
            return self._one(found)
        return f"(?i:{found})" if isinstance(found, str) and "i" in self._flags else self._set([found])

    def _one(self, code: int) -> str:
        if "i" not in self._flags:
            return _written(code)
        if "u" in self._flags:
            return f"(?i:{_written(code)})"
        cases = _cases().get(code)
        return _written(code) if cases is None else _bracketed([(each, each) for each in cases])

    def _escape(self, in_class: bool = False) -> int | str | Ranges:
        """Read the rest of an escape after its backslash. Return a code point, the ranges of a class, or the text of a class that
        only Rust defines."""
        sign = self._pattern[self._at : self._at + 1]
        if sign.lower() in _CLASSES and sign:
            self._at += 1
            if "u" in self._flags:
                return f"\\{sign}"
            ranges = _CLASSES[sign.lower()]
            return ranges if sign.islower() else _complement(ranges)
        if found := _HEX.match(self._pattern, self._at):
            self._at = found.end()
            return self._code_point(int(next(filter(None, found.groups())), 16))
        if found := _PROPERTY.match(self._pattern, self._at):
            self._at = found.end()
            return f"\\{found[0]}"
        if found := _CONTROL.match(self._pattern, self._at):
            self._at = found.end()
            return ord(found[1]) % 32 if found[1] else 0
        if (sign.isascii() and sign.isalnum() and sign not in _CONTROLS and not (in_class and sign == "b")) or not sign:
            self._refuse(*_unknown(sign))
        self._at += 1
        return 8 if sign == "b" else _CONTROLS.get(sign, ord(sign))

    def _code_point(self, code: int) -> int:
        """Return the code point for a number. If the number is the first half of a surrogate pair, also read the second half."""
        if 0xD800 <= code < 0xDC00 and (low := _LOW_HALF.match(self._pattern, self._at)):
            self._at = low.end()
            return 0x10000 + ((code & 0x3FF) << 10) + (int(low[1], 16) & 0x3FF)
        if 0xD800 <= code < 0xE000 or code > sys.maxunicode:
            self._refuse("Unicode characters", f"the code point {code:x}")
        return code

    def _class(self) -> str:
        begin = self._at
        self._at += 1
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        parts: list[int | str | Ranges] = []
        while not self._pattern.startswith("]", self._at):
            first = self._member(begin)
            if self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                self._at += 1
                last = self._member(begin)
                if isinstance(first, int) and isinstance(last, int):
                    if first > last:
                        self._refuse("ranges from a smaller character to a larger", f"{chr(first)}-{chr(last)}")
                    parts.append([(first, last)])
                else:  # as in [\w-.], where the hyphen is literal
                    parts += [first, 0x2D, last]
            else:
                parts.append(first)
        self._at += 1
        if not parts and not negated:
            self._refuse("a character in each class ([\\]] holds a bracket)", "[]")
        return self._set(parts, negated=negated) if parts else "(?s:.)"

    def _member(self, begin: int) -> int | str | Ranges:
        sign = self._pattern[self._at : self._at + 1]
        if not sign:
            self._at = begin
            self._refuse("a ] for each [", "an unclosed character class")
        if posix := _POSIX.match(self._pattern, self._at):
            self._refuse("ECMA's classes, such as [A-Za-z]", posix[0])
        self._at += 1
        return self._escape(in_class=True) if sign == "\\" else ord(sign)

    def _set(self, parts: Iterable[int | str | Ranges], negated: bool = False) -> str:
        ranges: Ranges = []
        texts = []
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
            else:
                ranges += [(part, part)] if isinstance(part, int) else part
        if "i" not in self._flags:
            return _bracketed(ranges, texts, negated)
        if texts or "u" in self._flags:
            return f"(?i:{_bracketed(ranges, texts, negated)})"
        return _bracketed(ranges + _other_cases(tuple(ranges)), negated=negated)


def _unknown(sign: str) -> tuple[str, str]:
    """Return the texts on what was needed and what was given, for the error about an unsupported escape."""
    if sign in ("b", "B"):
        return "no word boundaries, which grammars cannot follow", f"\\{sign}"
    if sign.isdigit() or sign == "k":
        return "no backreferences, which grammars cannot follow", f"\\{sign}"
    if sign in ("A", "Z", "z"):
        return "ECMA's anchors, ^ and $", f"\\{sign}"
    return "an escape of ECMA's", f"\\{sign}" if sign else "a backslash at the end"


def _bracketed(ranges: Ranges, texts: Iterable[str] = (), negated: bool = False) -> str:
    """Return a bracketed class. texts: additional members, as classes in Rust's notation."""
    merged: Ranges = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            first, last = merged[-1][0], max(merged.pop()[1], last)
        merged.append((first, last))
    listed = [_written(first) if first == last else f"{_written(first)}-{_written(last)}" for first, last in merged]
    return f"[{'^' if negated else ''}{''.join(listed)}{''.join(texts)}]"


def _written(code: int) -> str:
    """Return a character escaped for a Rust pattern, valid inside and outside of brackets."""
    sign = chr(code)
    if sign in "\\.+*?()|[]{}^$#&-~/":
        return f"\\{sign}"
    return sign if sign.isprintable() else f"\\x{{{code:x}}}"


def _complement(ranges: Ranges) -> Ranges:
    bounds = [-1, *(bound for each in ranges for bound in each), sys.maxunicode + 1]
    found: Ranges = []
    for before, after in zip(bounds[::2], bounds[1::2], strict=True):
        for first, last in ((before + 1, min(after - 1, 0xD7FF)), (max(before + 1, 0xE000), after - 1)):
            if first <= last:
                found.append((first, last))
    return found


@lru_cache(1024)
def _other_cases(ranges: tuple[tuple[int, int], ...]) -> Ranges:
    """Return, for each range, the characters outside the range that differ only by case from a character in it."""
    cases = _cases()
    cased = sorted(cases)
    return [
        (other, other)
        for first, last in ranges
        for code in cased[bisect_left(cased, first) : bisect_right(cased, last)]
        for other in cases[code]
        if not first <= other <= last
    ]


@lru_cache(1)
def _cases() -> dict[int, tuple[int, ...]]:
    """Return a map from each character to all characters that ECMA's Canonicalize maps to the same character."""
    groups: dict[int, set[int]] = {}
    for sign in map(chr, range(_LAST_CASED + 1)):
        upper = sign.upper()
        if upper != sign and len(upper) == 1 and (sign.isascii() or not upper.isascii()):
            groups.setdefault(ord(upper), {ord(upper)}).add(ord(sign))
    return {code: tuple(sorted(group)) for group in groups.values() for code in group}
