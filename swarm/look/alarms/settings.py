"""The table `[alarms]` of a peer's settings, and of `swarm dashboard --config FILE`."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

from swarm.errors import UserError
from swarm.settings import AlarmSettings

TOKEN_CHARACTERS_MAX = 4096


def check(settings: AlarmSettings) -> None:
    """Raise `UserError` for a webhook, token file or command that cannot work."""
    if settings.webhook:
        try:
            parts = urlsplit(settings.webhook)
            whole = bool(parts.hostname) and parts.port != 0 and " " not in parts.netloc
            (parts.hostname or "").encode("idna")
        except ValueError:  # an unfinished IPv6 address, a port that is none, a name without end
            whole = False
        if not whole:
            raise UserError(
                "[alarms]: webhook is no address of a host; write it as https://HOST/PATH"
            )
        if parts.scheme != "https" and not (parts.scheme == "http" and is_local(parts.hostname)):
            raise UserError(
                f"[alarms]: webhook at {host_of(settings.webhook)!r} is neither https nor on this "
                "machine; others could read its alarms on the way: use https://…"
            )
    if settings.webhook_token_file:
        token_of(settings)
    if settings.command and not settings.command[0]:
        raise UserError("[alarms]: command begins with an empty text; write program and arguments")
    if "\0" in "".join(settings.command):
        raise UserError("[alarms]: command contains a NUL, which no program can be given")


def token_of(settings: AlarmSettings) -> str:
    """Read the secret that goes with each request; empty without one. Raises `UserError`."""
    if not settings.webhook_token_file:
        return ""
    path = Path(settings.webhook_token_file).expanduser()
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"[alarms]: webhook_token_file {path} cannot be read") from error
    if not token or len(token) > TOKEN_CHARACTERS_MAX or not token.isprintable():
        raise UserError(f"[alarms]: webhook_token_file {path} must hold one line with the token")
    return token


def host_of(url: str) -> str:
    """The host of a webhook, to be shown: path and query of many services are secrets."""
    return urlsplit(url).hostname or "nowhere"


def is_local(host: str | None) -> bool:
    """Whether a host is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
