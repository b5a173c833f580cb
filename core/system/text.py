"""Names and messages that somebody else wrote (a table, a checkpoint, a plugin), made harmless for each medium they reach."""

from __future__ import annotations

import html
import re
import unicodedata

_INVISIBLE = ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")
"""Unicode categories that a terminal or a page obeys in place of showing: control and format characters (escape sequences, a
change of the writing direction), lone surrogates, what is no character, separators of lines."""
_MARKDOWN = re.compile(r"[\\`*\[\]|$~]|(?<![^\W_])_|_(?![^\W_])")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def harmless(text: str, keep: str = "") -> str:
    r"""Text for a terminal or a log: what it would obey is shown as an escape (`\x1b`, `\u202e`). keep: characters left alone."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(sign if sign in keep or unicodedata.category(sign) not in _INVISIBLE else _escaped(sign) for sign in text)


def shown(value: object, most: int = 120) -> str:
    """A value of any kind in an error's one line: its repr, cut in the middle where it is long."""
    try:
        text = repr(value)
    except Exception:  # a number of too many digits, somebody's own __repr__
        text = f"a {type(value).__name__} that cannot be printed"
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"


def markdown(text: str) -> str:
    """Text inside of a line or a cell of Markdown, where it is neither markup nor HTML."""
    escaped = _MARKDOWN.sub(lambda found: "\\" + found[0], harmless(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def csv_cell(text: str) -> str:
    """A cell that a spreadsheet shows and does not compute: what begins like a formula gets an apostrophe before it."""
    text = harmless(text)
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text


def page(text: str) -> str:
    """Text of a page or picture in HTML or SVG, also in an attribute."""
    return html.escape(harmless(text))


def picture(text: str) -> str:
    """A label of a picture of matplotlib's, in which a pair of dollar signs would be a formula."""
    return harmless(text, keep="\n").replace("$", r"\$")


def _escaped(sign: str) -> str:
    code = ord(sign)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
