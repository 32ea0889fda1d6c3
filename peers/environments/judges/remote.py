"""A judge behind an OpenAI-compatible URL."""

from __future__ import annotations

import re
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta

from peers.environments.interface import NotGradable
from peers.environments.judges.definition import Access, Definition
from swarm.errors import DECODE_ERRORS, UserError

REPLY_BYTES_MAX = 1 << 20
FIRST_PAUSE_SECONDS = 0.5
"""Before the second attempt; each further pause is twice as long."""

AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""Statuses after which another attempt may succeed."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Reply(msgspec.Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1)]


class _Refused(Exception):
    """An attempt that failed; `again`: another may succeed."""

    def __init__(self, sentence: str, again: bool) -> None:
        super().__init__(sentence)
        self.again = again


@dataclass(frozen=True)
class Remote:
    """Asks a server's `/chat/completions`."""

    definition: Definition
    access: Access
    name: str

    def score(self, text: str) -> float:
        """The score as the judge wrote it; raises `NotGradable` and `UserError`."""
        reply = self._asked(text)
        answer = reply.choices[0].message.content or ""
        found = {
            match.group(1) for match in re.finditer(self.definition.pattern, answer) if match[1]
        }
        if len(found) != 1:
            what = "no score" if not found else f"{len(found)} different scores"
            raise NotGradable(
                f"judge {self.name!r} answers {answer[:60]!r}, in which pattern "
                f"{self.definition.pattern!r} finds {what}"
            )
        (written,) = found
        try:
            return float(written)
        except ValueError as error:
            raise NotGradable(
                f"judge {self.name!r} gives the score {written[:40]!r}, which is no number"
            ) from error

    def _asked(self, text: str) -> _Reply:
        """The server's reply, after some attempts."""
        until = time.monotonic() + self.access.deadline_seconds
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(self.access.retries + 1):
            try:
                return self._attempt(text, until)
            except _Refused as error:
                left = until - time.monotonic() - pause
                if not error.again or attempt == self.access.retries or left <= 0:
                    tries = f" after {attempt + 1} attempts" if attempt else ""
                    raise NotGradable(f"judge {self.name!r}: {error}{tries}") from error
                time.sleep(pause)
                pause *= 2
        raise AssertionError("every attempt returns or raises")

    def _attempt(self, text: str, until: float) -> _Reply:
        url = httpx.URL(self.access.url.rstrip("/") + "/chat/completions")
        shown = f"{url.scheme}://{url.netloc.decode()}{url.path}"
        raw = bytearray()
        try:
            with (
                httpx.Client(verify=ssl.create_default_context(), trust_env=False) as client,
                client.stream(
                    "POST",
                    url,
                    json=self._question(text),
                    headers=self._authorization(url),
                    timeout=_left(until),
                ) as response,
            ):
                for part in response.iter_bytes():
                    raw += part
                    if len(raw) > REPLY_BYTES_MAX:
                        raise _Refused(
                            f"its reply has more than {REPLY_BYTES_MAX} bytes", again=False
                        )
                    if time.monotonic() > until:
                        raise httpx.ReadTimeout("")
        except httpx.TimeoutException as error:
            seconds = self.access.deadline_seconds
            raise _Refused(
                f"{shown} gives no answer within {seconds:g} s (deadline_seconds)", again=False
            ) from error
        except httpx.HTTPError as error:
            what = str(error) or type(error).__name__
            raise _Refused(f"{shown} cannot be reached ({what})", again=True) from error
        if response.status_code != 200:
            said = raw[:200].decode("utf-8", "replace")
            raise _Refused(
                f"{shown} answers with status {response.status_code} ({said})",
                again=response.status_code in AGAIN,
            )
        try:
            return msgspec.json.decode(raw, type=_Reply)
        except DECODE_ERRORS as error:
            raise _Refused(f"{shown} gives no chat completion ({error})", again=False) from error

    def _question(self, text: str) -> dict[str, Any]:
        told = self.definition
        messages = [{"role": "system", "content": told.system}] if told.system else []
        question: dict[str, Any] = {
            "model": told.model,
            "messages": [*messages, {"role": "user", "content": text}],
            "temperature": told.temperature,
            "max_tokens": told.max_tokens,
        }
        if told.seed >= 0:
            question["seed"] = told.seed
        return question

    def _authorization(self, url: httpx.URL) -> dict[str, str]:
        """The header with the key, if there is one; raises `UserError`."""
        key = ""
        if self.access.key_file:
            path = Path(self.access.key_file).expanduser()
            try:
                key = path.read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"judge {self.name!r}: key_file {path}: {error}") from error
        if key and url.scheme == "http" and url.host not in ("127.0.0.1", "localhost", "::1"):
            raise UserError(
                f"judge {self.name!r}: url {self.access.url} would send the key unencrypted; use "
                "https"
            )
        return {"authorization": f"Bearer {key}"} if key else {}


def _left(until: float) -> float:
    """Seconds left, at least a moment."""
    return max(0.001, until - time.monotonic())
