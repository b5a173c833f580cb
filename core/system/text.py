"""Escaping of untrusted text (from a table, a checkpoint, a plugin) for each output medium."""

from __future__ import annotations

import html
import re
import unicodedata

_INVISIBLE = ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")
"""Unicode categories that a terminal or a page interprets instead of showing: control and format characters (escape sequences,
text direction), lone surrogates, unassigned code points, line separators."""
_MARKDOWN = re.compile(r"[\\`*\[\]|$~]|(?<![^\W_])_|_(?![^\W_])")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def harmless(text: str, keep: str = "") -> str:
    r"""Return text escaped for a terminal or log: control characters become `\x1b` or `\u202e`. keep: characters to keep."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(sign if sign in keep or unicodedata.category(sign) not in _INVISIBLE else _escaped(sign) for sign in text)


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8. A file name that is not UTF-8 cannot, because Python decodes it with lone
    surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object, most: int = 120) -> str:
    """Return a value formatted for a one-line error: its repr, shortened in the middle if long."""
    try:
        text = repr(value)
    except Exception:  # a number with too many digits, or a __repr__ that raises
        text = f"a {type(value).__name__} that cannot be printed"
    return truncated(" ".join(text.split()), most)


def truncated(text: str, most: int) -> str:
    """Return a text shortened in the middle to about `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"


def markdown(text: str) -> str:
    """Return text escaped for a line or a table cell of Markdown, without markup or HTML."""
    escaped = _MARKDOWN.sub(lambda found: "\\" + found[0], harmless(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def csv_cell(text: str) -> str:
    """Return text escaped for a CSV cell. Text that begins like a formula gets an apostrophe, so that a spreadsheet shows it."""
    text = harmless(text)
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text


def page(text: str) -> str:
    """Return text escaped for HTML or SVG, including attribute values."""
    return html.escape(harmless(text))


def picture(text: str) -> str:
    """Return text escaped for a matplotlib label, in which text between dollar signs would be a formula."""
    return harmless(text, keep="\n").replace("$", r"\$")


def _escaped(sign: str) -> str:
    code = ord(sign)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shown_size(count: int) -> str:
    """Return a number of bytes as a readable text."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
