"""One judge of this machine: known scores first, then the judge itself, within its bounds."""

import math
import re
import sqlite3
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Self, TypeVar

import httpx
import msgspec
from msgspec import Meta

from peers.environments.interface import NotGradable, Task, Transcript, as_text
from peers.environments.judges.definition import Access, Definition, read_definition
from swarm.errors import DECODE_ERRORS, UserError
from swarm.rollouts.seeds import digest
from swarm.world.progress import REPORT_SECONDS, checkpoint

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
    """Asks the `/chat/completions` of a server with OpenAI's interface."""

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


# Scores that are known: one SQLite file per judge.
#
# All processes of a machine that grade share it. Of two that ask the judge about the same answer,
# the first score counts for both.

BUSY_SECONDS = 20.0
"""Longest wait for another process that writes."""

ENTRIES_MAX = 1_000_000
"""Scores kept; then the oldest are dropped."""

SCHEMA = "CREATE TABLE IF NOT EXISTS known (key BLOB PRIMARY KEY, score REAL NOT NULL)"


class Known:
    """The file of one judge."""

    def __init__(self, path: Path) -> None:
        """Open or make the file; raises `UserError`."""
        self._path = path
        with self._access() as database:
            database.execute(SCHEMA)

    def score(self, key: bytes) -> float | None:
        """A known score."""
        with self._access() as database:
            row = database.execute("SELECT score FROM known WHERE key = ?", (key,)).fetchone()
            return None if row is None else float(row[0])

    def add(self, key: bytes, score: float) -> float:
        """Keep a score, unless one is known already; returns the one that counts."""
        with self._access() as database:
            database.execute("INSERT OR IGNORE INTO known VALUES (?, ?)", (key, score))
            (known,) = database.execute("SELECT score FROM known WHERE key = ?", (key,)).fetchone()
            database.execute(
                "DELETE FROM known WHERE rowid <= (SELECT MAX(rowid) FROM known) - ?",
                (ENTRIES_MAX,),
            )
            return float(known)

    @contextmanager
    def _access(self) -> Iterator[sqlite3.Connection]:
        """A transaction; raises `UserError` for a file that cannot be used.

        Connections are not kept: calls come from several threads."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("BEGIN IMMEDIATE")
                yield database
                if database.in_transaction:
                    database.execute("COMMIT")
            finally:
                database.close()
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"the judge's cache {self._path} cannot be used ({error}); repair or delete it"
            ) from error


T = TypeVar("T")

DECIMALS = 4
"""Rewards are rounded to so many: machines differ in a float's last bits."""

FIELD = re.compile(r"\{(task|answer|completion|transcript)\}")


CONTROL = re.compile(
    r"<(?=\|[^|<>\n]{1,40}\|>|/?s>|(?:start|end)_of_turn>)|\[(?=/?(?:INST|SYS)\])", re.IGNORECASE
)
"""The beginning of a control token of a chat: a judge's server may read it in a message's text as
the end of the question, and what follows as the judge's own words."""


@dataclass(frozen=True)
class Judge:
    """A judge that is ready to score."""

    name: str
    definition: Definition
    known: Known
    remote: Remote

    @classmethod
    def open(cls, name: str, wanted_hash: str) -> Self:
        """The judge NAME of this machine; raises `UserError`, `NotGradable` for another hash."""
        definition, access, path = read_definition(name)
        found = definition.digest().hex()
        if wanted_hash and found != wanted_hash:
            raise NotGradable(
                f"judge {name!r} is another one than the run's: {path} has the hash {found}, and "
                f"judge_hash is {wanted_hash}; use the run owner's file"
            )
        known = Known(
            Path(access.cache).expanduser() if access.cache else path.with_suffix(".sqlite")
        )
        return cls(name, definition, known, Remote(definition, access, name))

    def score(self, task: Task, transcript: Transcript) -> float:
        """The reward in [0, 1]; raises `NotGradable` and `UserError`."""
        own = self.definition.digest()
        fields = {
            "task": as_text(task.prompt),
            "answer": task.answer,
            "completion": transcript.text,
            "transcript": "\n".join(f"{turn.kind}: {turn.text}" for turn in transcript.turns),
        }
        key = digest("swarm/1/judged", own, *(text.encode() for text in fields.values()))
        score = self.known.score(key)
        if score is not None:
            return score
        for name in ("completion", "transcript"):
            fields[name] = CONTROL.sub(r"\g<0> ", fields[name])
        text = FIELD.sub(lambda field: fields[field[1]], self.definition.prompt)
        given = _patiently(partial(self.remote.score, text))
        return self.known.add(key, self._reward(given))

    def _reward(self, score: float) -> float:
        low, high = self.definition.low, self.definition.high
        if not math.isfinite(score) or not low <= score <= high:
            raise NotGradable(
                f"judge {self.name!r} gives the score {score:g}; it must lie between {low:g} and "
                f"{high:g}"
            )
        return round((score - low) / (high - low), DECIMALS)


def _patiently(work: Callable[[], T]) -> T:
    """The result of work in another thread, with reports of progress meanwhile.

    Without them a validator would take its grading process for dead while a judge thinks. When the
    job is cancelled, the work goes on until its own deadline."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, name="judge", daemon=True).start()
    while not wait([found], REPORT_SECONDS).done:
        checkpoint()
    return found.result()
