"""One judge of this machine: known scores first, then the judge itself, within its bounds."""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TypeVar

from peers.environments.interface import NotGradable, Task, Transcript, as_text
from peers.environments.judges.definition import Definition, read_definition
from peers.environments.judges.remote import Remote
from swarm.errors import UserError
from swarm.rollouts.seeds import digest
from swarm.world.progress import REPORT_SECONDS, checkpoint

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

        Connections are not kept: calls come from several threads.
        """
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


@dataclass(frozen=True)
class Judge:
    """A judge that is ready to score."""

    name: str
    definition: Definition
    known: Known
    remote: Remote

    @classmethod
    def open(cls, name: str, wanted_hash: str) -> Judge:
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
    job is cancelled, the work goes on until its own deadline.
    """
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
