"""HTTP servers for this machine's own programs: their listening sockets and bearer keys.

An error calls an option as `what` says, as the user writes it: `--listen`, or a key of a table."""

import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from swarm.errors import UserError, file_errors

STALLED_MS = 120_000
"""A connection whose client takes nothing of what was sent for so long is broken off."""

KEY_CHARACTERS_MIN = 16


def parse_listen(listen: str, what: str) -> tuple[str, int]:
    """Host and port of `host:port`; raises `UserError`."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UserError(
            f"{what} {listen!r} is no host:port, such as 127.0.0.1:8000 (ports go up to 65535)"
        )
    return "127.0.0.1" if host == "localhost" else host.strip("[]"), int(port)


def open_listener(listen: str, what: str = "--listen") -> socket.socket:
    """A listening socket at `host:port`; raises `UserError`."""
    host, port = parse_listen(listen, what)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(AttributeError, OSError):  # Linux has it; accepted sockets inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UserError(
            f"{what} {listen}: nothing can listen there ({error.strerror or error}); "
            "choose another address or port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_addressed_as_loopback(header: str) -> bool:
    """Whether a Host header names this machine alone; a page in a browser here has another."""
    if header.startswith("["):
        return is_loopback(header.partition("]")[0] + "]")
    return is_loopback(header.partition(":")[0])


def required_keys(listen: str, path: Path | None, what: str, what_keys: str) -> frozenset[str]:
    """The keys in a file; raises `UserError` where one is needed and missing."""
    if path is None and not is_loopback(parse_listen(listen, what)[0]):
        raise UserError(
            f"{what} {listen} is reached from other machines, so a key is needed: write "
            "one into a file that only you can read (umask 077; head -c 32 /dev/urandom | base64 "
            f"> swarm.key) and name it with {what_keys}, or listen at 127.0.0.1"
        )
    return keys_in(path, what_keys)


def keys_in(path: Path | None, what: str) -> frozenset[str]:
    """The keys in a file, one a line; none without a file. Raises `UserError`."""
    if path is None:
        return frozenset()
    try:
        with file_errors(f"{what} {path}"):
            lines = path.expanduser().read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path} cannot be read (it is no text)") from error
    keys = frozenset(line.strip() for line in lines if line.strip())
    if not keys or min(map(len, keys)) < KEY_CHARACTERS_MIN:
        raise UserError(
            f"{what} {path} must hold a key of at least {KEY_CHARACTERS_MIN} characters in each "
            "line"
        )
    return keys
