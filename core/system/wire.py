"""Socket pair that carries objects between two processes."""

from __future__ import annotations

import pickle
import socket
from contextlib import suppress
from threading import Lock
from typing import Any, Final

_BUFFER: Final = 4 * 2**20  # Bytes that the system may buffer, so that sending seldom waits for the reader


class Wire:
    """One end of a socket pair that carries objects between processes that trust each other. Any thread may send, but only one
    thread may receive."""

    def __init__(self, sock: socket.socket) -> None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = sock
        self._file = sock.makefile("rb", buffering=2**20)
        self._guard = Lock()

    def send(self, message: object) -> None:
        """Send an object.

        :raises PicklingError, AttributeError, TypeError: if the object cannot be pickled.

        :raises OSError: if the socket is closed.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._guard:
            self._socket.sendall(data)

    def receive(self) -> Any:
        """Wait for the next object and return it. :raises EOFError, OSError: if the other end is closed."""
        try:
            return pickle.load(self._file)
        except pickle.UnpicklingError as error:  # the sender was killed in the middle of a message
            raise EOFError(str(error)) from error

    def close(self) -> None:
        """Close this end. A thread that waits in `receive` gets an EOFError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
