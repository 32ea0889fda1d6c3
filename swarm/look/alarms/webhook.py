"""Telling people: each alarm goes to the webhook of the settings, and its failures to the log.

Of each alarm only the newest state waits, so a peer goes on, and its memory stays bounded, whatever
a dead webhook costs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import trio

from swarm.errors import UserError
from swarm.look.alarms.board import Alarm, State
from swarm.settings import AlarmSettings

SECONDS_MAX = 10.0
"""Deadline of one request."""

PAUSES_SECONDS = (2.0, 10.0)
"""Pauses before the second and the third attempt."""

TOKEN_CHARACTERS_MAX = 4096


class Notice(msgspec.Struct, frozen=True):
    """What a webhook gets, as JSON."""

    state: State
    alarm: Alarm
    peer: str
    run: str
    text: str
    """The alarm in one sentence; chat services show the field of this name."""


class Undelivered(Exception):
    """The webhook failed. The message is the reason, without secrets."""


class Webhook:
    """Tells a webhook of alarms, one after the other, until cancelled."""

    def __init__(self, settings: AlarmSettings, emit: Callable[..., None], peer: str) -> None:
        self.run_id = ""
        self._settings = settings
        self._emit = emit
        self._peer = peer
        self._token = token_of(settings)
        self._waiting: dict[str, tuple[Alarm, State]] = {}
        self._told: set[str] = set()
        """Alarms that the webhook believes to be raised."""
        self._wake = trio.Event()

    def put(self, alarm: Alarm, state: State) -> None:
        """Tell of an alarm's newest state, as soon as may be."""
        if not self._settings.webhook or self._is_too_mild(alarm):
            return
        self._waiting.pop(alarm.name, None)
        if state == "cleared" and alarm.name not in self._told:
            return  # it came and went
        self._waiting[alarm.name] = (alarm, state)
        self._wake.set()

    def _is_too_mild(self, alarm: Alarm) -> bool:
        return self._settings.severity == "page" and alarm.severity != "page"

    async def run(self) -> None:
        while True:
            while not self._waiting:
                self._wake = trio.Event()
                await self._wake.wait()
            alarm, state = self._waiting.pop(next(iter(self._waiting)))
            self._told.add(alarm.name) if state == "raised" else self._told.discard(alarm.name)
            over = "over: " if state == "cleared" else ""
            text = f"[{alarm.severity}] {over}{alarm.sentence} ({alarm.do})"
            try:
                await self._post(Notice(state, alarm, self._peer, self.run_id, text))
            except Undelivered as error:
                reason = str(error)
            except Exception as error:  # a library's: what tells of trouble must cause none
                reason = f"it cannot be told ({type(error).__name__})"
            else:
                continue
            self._emit("alarm.undelivered", alarm=alarm.name, to="webhook", reason=reason)

    async def _post(self, notice: Notice) -> None:
        import httpx  # most peers have no webhook, and it takes some megabytes

        url = self._settings.webhook
        host = _host_of(url)
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        body = msgspec.json.encode(notice)
        reason = ""
        try:
            # A proxy of the environment cannot reach this machine's own ports.
            made = httpx.AsyncClient(trust_env=not _is_local(host), timeout=None)
        except Exception as error:
            raise Undelivered(
                "a proxy or certificates that the environment names (HTTPS_PROXY, ALL_PROXY, "
                f"NO_PROXY, SSL_CERT_FILE) cannot be used ({type(error).__name__})"
            ) from error
        async with made as client:
            for pause in (0.0, *PAUSES_SECONDS):
                await trio.sleep(pause)
                reason = f"{host} did not answer within {SECONDS_MAX:g} s"
                with trio.move_on_after(SECONDS_MAX):
                    try:
                        # Only the head is read: an answer without end costs nothing.
                        async with client.stream(
                            "POST", url, content=body, headers=headers
                        ) as answer:
                            if answer.is_success:
                                return
                            reason = f"{host} answered with status {answer.status_code}"
                            if answer.status_code < 500 and answer.status_code != 429:
                                break
                    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                        reason = f"{host} cannot be reached ({type(error).__name__})"
        raise Undelivered(reason)


# --- the table [alarms] --------------------------------------------------------------------------


def check(settings: AlarmSettings) -> None:
    """Raise `UserError` for a webhook or token file that cannot work."""
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
        if parts.scheme != "https" and not (parts.scheme == "http" and _is_local(parts.hostname)):
            raise UserError(
                f"[alarms]: webhook at {_host_of(settings.webhook)!r} is neither https nor on this "
                "machine; others could read its alarms on the way: use https://…"
            )
    token_of(settings)


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


def _host_of(url: str) -> str:
    """The host of a webhook, to be shown: path and query of many services are secrets."""
    return urlsplit(url).hostname or "nowhere"


def _is_local(host: str | None) -> bool:
    """Whether a host is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
