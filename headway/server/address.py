"""Where a server listens. To ask imports neither torch nor the server's libraries, so that a mistake is told at once."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from headway.core.contract.errors import ConfigError


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has an address and does not listen yet: whoever loads a model first and then finds the port taken has waited
    for nothing.

    :raises ConfigError: the address is taken, or not of this machine.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise ConfigError("--host and --port", "an address of this machine that is free", f"{host}:{port} ({error})") from error
    return sock


def is_local(host: str) -> bool:
    """Whether only this machine reaches what listens on a host."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
