"""Texts for errors of the operating system, and standard streams that do not raise."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any, Final, TextIO

from headway.core.system.text import shown

_STDERR: Final = 2  # Descriptor of stderr
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
"""Error number -> advice for the user."""
_OUT_OF_MEMORY: Final = (
    "can't allocate memory",
    "CUDA out of memory",
    "std::bad_alloc",
    "not enough memory",
    "Cannot allocate memory",
)
"""Texts that identify torch's RuntimeErrors for a lack of memory."""
_MEMORY: Final = "memory: there is too little for this; take a smaller model, batch or kv_cache_memory, or close other programs"


def system_error_text(error: BaseException) -> str | None:
    """Return one line about a system or encoding error (where, what, what to do), or None for any other exception."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(said in text for said in _OUT_OF_MEMORY)):
        return _MEMORY
    if isinstance(error, UnicodeEncodeError):
        return f"text: {shown(error.object[error.start : error.end])} cannot be written as {error.encoding} (set PYTHONUTF8=1)"
    if isinstance(error, UnicodeDecodeError):
        found = " ".join(f"{byte:#04x}" for byte in error.object[error.start : error.start + 4])
        return f"text: not {error.encoding}: {found} at byte {error.start} (save it as UTF-8)"
    if isinstance(error, OSError):
        names = [shown(os.fsdecode(name)) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
        where = " and ".join(names) or "the operating system" if error.errno != errno.ENOSPC or names else "standard output"
        what = error.strerror or text or type(error).__name__
        advice = _ADVICE.get(error.errno or 0)
        return f"{where}: {what}" + (f" ({advice})" if advice else "")
    return None


def is_rust_panic(error: BaseException) -> bool:
    """Return whether an exception is a Rust library's panic about its input, a BaseException that is not an Exception."""
    return type(error).__name__ == "PanicException"


def open_closed_streams() -> None:
    """Open the null device for standard streams that were closed at the start (`>&-`), so that no other file gets their
    descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (open until the process ends)


class LossyFile(io.FileIO):
    """File for a stream whose writes never fail: data that a full disk or a closed pipe rejects is lost."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._stream = stream  # keeps the stream from closing the file

    def write(self, data: Any) -> int:
        """Write as much data as possible. Return the size of the data, even if some of it was lost."""
        left = memoryview(data).cast("B")
        size = len(left)
        with contextlib.suppress(OSError):
            while left:
                left = left[super().write(left) or len(left) :]
        return size


def outlive_stderr() -> None:
    """Let commands continue if stderr cannot be written (`2>/dev/full`). Does nothing if a different stream has replaced
    stderr."""
    found = sys.stderr
    if type(found) is io.TextIOWrapper and found.fileno() == _STDERR:
        raw = LossyFile(found)
        sys.stderr = io.TextIOWrapper(raw, found.encoding, found.errors, line_buffering=True, write_through=True)


def escape_unencodable(*streams: TextIO | None) -> None:
    """Make streams escape characters that their encoding lacks, for example on an ASCII terminal."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_unwritten(stream: TextIO | None) -> None:
    """Drop the unwritten data of a broken stream, because Python would report the error again when the process ends."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
