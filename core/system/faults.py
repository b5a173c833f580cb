"""Other people's faults: what the log keeps of them, and errors of the world in words."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
from functools import cache
from typing import Final, TextIO

from headway.core.system.text import shown

log = logging.getLogger("headway")


def trace(what: str, error: BaseException) -> None:
    """Keep the traceback of a plugin's exception for those who ask: the log has it at -v and with $HEADWAY_DEBUG=1."""
    log.log(logging.WARNING if os.environ.get("HEADWAY_DEBUG") == "1" else logging.INFO, "%s raised:", what, exc_info=error)


@cache
def warn_once(text: str) -> None:
    """A warning that is not repeated for each layer and phase."""
    log.warning("%s", text)


_ROOM: Final = "free some space, or name another place"
_ADVICE: Final = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _ROOM,
    errno.EROFS: "name a place on a file system that can be written",
    errno.EACCES: "change its permissions, or name another place",
    errno.EPERM: "change its permissions or its owner, or name another place",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file; check the path",
    errno.EISDIR: "name a file in the folder",
    errno.EEXIST: "name another place",
    errno.ENAMETOOLONG: "take a shorter name",
    errno.ELOOP: "the links lead to one another; check the path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs, or raise the system's limit of open files",
    errno.ENOMEM: "close other programs, or take a smaller model or kv_cache_memory",
    errno.EAGAIN: "raise the limit of processes (ulimit -u), or try again",
    errno.EIO: "check the disk or the device",
    errno.EADDRINUSE: "end what uses it, or take another port",
    errno.ENXIO: "open the other end first",
}
"""What to do about an error of the operating system's."""
_OUT_OF_MEMORY: Final = (
    "can't allocate memory",
    "CUDA out of memory",
    "std::bad_alloc",
    "not enough memory",
    "Cannot allocate memory",
)
"""How torch says so in exceptions that have no class of their own."""
_MEMORY: Final = "memory: there is too little for this; take a smaller model, batch or kv_cache_memory, or close other programs"


def in_words(error: BaseException) -> str | None:
    """An error of the world in one line: on what, what happened, and what to do. None: it is none, but somebody's fault."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(said in text for said in _OUT_OF_MEMORY)):
        return _MEMORY
    if isinstance(error, UnicodeEncodeError):
        return f"text: {shown(error.object[error.start : error.end])} cannot be written as {error.encoding} (set PYTHONUTF8=1)"
    if isinstance(error, UnicodeDecodeError):
        found = " ".join(f"{byte:#04x}" for byte in error.object[error.start : error.start + 4])
        return f"text: it is no {error.encoding}: {found} at byte {error.start} (save it as UTF-8)"
    if isinstance(error, OSError):
        names = [shown(os.fsdecode(name)) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
        where = " and ".join(names) or "the operating system" if error.errno != errno.ENOSPC or names else "standard output"
        what = error.strerror or text or type(error).__name__
        advice = _ADVICE.get(error.errno or 0)
        return f"{where}: {what}" + (f" ({advice})" if advice else "")
    return None


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust has given up over what it was handed: such errors are no `Exception`."""
    return type(error).__name__ == "PanicException"


def open_what_is_closed() -> None:
    """Standard streams that whoever started Python has closed (`>&-`) become the null device.

    Otherwise they are None, and the next file that is opened has their number: what a library prints would be written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (as long as the process)


def never_refuse_a_character(*streams: TextIO | None) -> None:
    """A stream that cannot show a character, such as an ASCII terminal, shows it as an escape."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def end_quietly(stream: TextIO | None) -> None:
    """What is left in a stream that takes nothing any more is dropped: at its end Python would complain of it once more."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
