"""One judge of this machine: known scores first, then the judge itself, within its bounds."""

from __future__ import annotations

import atexit
import math
import re
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Protocol, TypeVar

from peers.environments.graders.pool import Overdue, Pool, ProcessFailed, ServiceError
from peers.environments.interface import NotGradable, Task, Transcript, as_text
from peers.environments.judges.definition import Access, Definition, read_definition
from peers.environments.judges.remote import Remote
from swarm.errors import UserError
from swarm.rollouts.seeds import digest
from swarm.world.progress import REPORT_SECONDS, checkpoint

# Scores that are known, and what was spent on others: one SQLite file per judge.
#
# All processes of a machine that grade share it. Of two that ask the judge about the same answer,
# the first score counts for both.

BUSY_SECONDS = 20.0
"""Longest wait for another process that writes."""

STEPS_KEPT = 100
"""Steps whose expenses are remembered."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, score REAL NOT NULL, used INTEGER NOT NULL)
    WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS scores_used ON scores (used);
CREATE TABLE IF NOT EXISTS spent (scope BLOB, step INTEGER, calls INTEGER NOT NULL,
    tokens INTEGER NOT NULL, PRIMARY KEY (scope, step));
"""


class Known:
    """The file of one judge."""

    def __init__(self, path: Path, entries_max: int) -> None:
        """Open or make the file; raises `UserError`."""
        self._path, self._entries_max = path, entries_max
        with self._access() as database:
            database.executescript(SCHEMA)

    def score(self, key: bytes) -> float | None:
        """A known score; it counts as used now."""
        with self._access() as database:
            row = database.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            database.execute(f"UPDATE scores SET used = {_NEXT} WHERE key = ?", (key,))
            return float(row[0])

    def add(self, key: bytes, score: float) -> float:
        """Keep a score, unless one is known already; returns the one that counts."""
        with self._access() as database:
            database.execute(
                f"INSERT OR IGNORE INTO scores (key, score, used) VALUES (?, ?, {_NEXT})",
                (key, score),
            )
            (known,) = database.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
            (count,) = database.execute("SELECT COUNT(*) FROM scores").fetchone()
            if count > self._entries_max:
                database.execute(
                    "DELETE FROM scores WHERE key IN "
                    "(SELECT key FROM scores ORDER BY used LIMIT ?)",
                    (count - self._entries_max,),
                )
            return float(known)

    def spend(self, scope: bytes, step: int, calls_max: int, tokens_max: int) -> str:
        """Count a call for a step, or say which bound forbids it; 0 is no bound."""
        with self._access() as database:
            calls, tokens = database.execute(
                "SELECT calls, tokens FROM spent WHERE scope = ? AND step = ?", (scope, step)
            ).fetchone() or (0, 0)
            if calls_max and calls >= calls_max:
                return f"{calls} calls of the judge for step {step} (judge_calls_per_step)"
            if tokens_max and tokens >= tokens_max:
                return f"{tokens} tokens of the judge for step {step} (judge_tokens_per_step)"
            database.execute(
                "INSERT INTO spent VALUES (?, ?, 1, 0) ON CONFLICT (scope, step) "
                "DO UPDATE SET calls = calls + 1",
                (scope, step),
            )
            database.execute(
                "DELETE FROM spent WHERE scope = ? AND step < ?", (scope, step - STEPS_KEPT)
            )
            return ""

    def add_tokens(self, scope: bytes, step: int, tokens: int) -> None:
        """Count the tokens of a call."""
        with self._access() as database:
            database.execute(
                "UPDATE spent SET tokens = tokens + ? WHERE scope = ? AND step = ?",
                (tokens, scope, step),
            )

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


_NEXT = "(SELECT COALESCE(MAX(used), 0) + 1 FROM scores)"


# A judge that is a sequence classifier: a reward model in a Hugging Face folder.
#
# It computes in a killable process with limited memory and without a network, one text at a time in
# fp32, so that a score does not depend on what else is scored.

SERVICE = "peers.environments.judges.classifier_service:ClassifierService"

MEMORY_BYTES = 4 << 30
"""Memory of the process beside the weights."""


class Classifier:
    """Scores texts with the classifier in `access.folder`."""

    def __init__(self, definition: Definition, access: Access, name: str) -> None:
        """Raises `UserError` for a folder without weights."""
        self._definition, self._name = definition, name
        self._folder = Path(access.folder).expanduser().absolute()
        sizes = [path.stat().st_size for path in self._folder.glob("*.safetensors")]
        if not sizes:
            raise UserError(
                f"judge {name!r}: folder {self._folder} has no *.safetensors; name the folder of a "
                "sequence classifier"
            )
        self._pool = _pool(access.deadline_seconds, MEMORY_BYTES + 4 * sum(sizes))

    def score(self, text: str) -> tuple[float, int]:
        """(score, tokens of the text); raises `NotGradable`."""
        told = self._definition
        request = {
            "folder": str(self._folder),
            "model": told.model,
            "text": text,
            "output": told.output,
            "label": told.label,
            "tokens_max": told.tokens_max,
        }
        try:
            reply = self._pool.ask(request)
        except (ServiceError, Overdue, ProcessFailed) as error:
            raise NotGradable(f"judge {self._name!r}, a classifier: {error}") from error
        if reply["problem"]:
            raise NotGradable(f"judge {self._name!r}: {reply['problem']}")
        return float(reply["score"]), int(reply["tokens"])


@cache
def _pool(seconds: float, memory_bytes: int) -> Pool:
    """One process for all classifiers with these limits: weights are large."""
    pool = Pool(SERVICE, seconds, 1, memory_bytes)
    atexit.register(pool.close)
    return pool


T = TypeVar("T")

DECIMALS = 4
"""Rewards are rounded to so many: machines differ in a float's last bits."""

FIELD = re.compile(r"\{(task|answer|completion|transcript)\}")


@dataclass(frozen=True)
class JudgeLimits:
    """What a rollout step may cost; 0: no bound."""

    calls: int = 0
    tokens: int = 0


class Scorer(Protocol):
    """What scores a text."""

    def score(self, text: str) -> tuple[float, int]:
        """(score, tokens used); raises `NotGradable` or `UserError`."""
        ...


@dataclass(frozen=True)
class Judge:
    """A judge that is ready to score."""

    name: str
    definition: Definition
    known: Known
    scorer: Scorer
    limits: JudgeLimits

    @classmethod
    def open(cls, name: str, wanted_hash: str, limits: JudgeLimits) -> Judge:
        """The judge NAME of this machine; raises `UserError`, `NotGradable` for another hash."""
        definition, access, path = read_definition(name)
        found = definition.digest().hex()
        if wanted_hash and found != wanted_hash:
            raise NotGradable(
                f"judge {name!r} is another one than the run's: {path} has the hash {found}, and "
                f"judge_hash is {wanted_hash}; use the run owner's file"
            )
        cache = Path(access.cache).expanduser() if access.cache else path.with_suffix(".sqlite")
        known = Known(cache, access.cache_entries)
        return cls(name, definition, known, make_scorer(definition, access, name), limits)

    def score(self, task: Task, transcript: Transcript, step: int) -> float:
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
        reached = self.known.spend(own, step, self.limits.calls, self.limits.tokens)
        if reached:
            raise NotGradable(f"judge {self.name!r}: {reached} are the most allowed")
        text = FIELD.sub(lambda field: fields[field[1]], self.definition.prompt)
        given, tokens = _patiently(partial(self.scorer.score, text))
        self.known.add_tokens(own, step, tokens)
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


def make_scorer(definition: Definition, access: Access, name: str) -> Scorer:
    """What scores for a definition; raises `UserError`."""
    if definition.kind == "openai":
        return Remote(definition, access, name)

    return Classifier(definition, access, name)
