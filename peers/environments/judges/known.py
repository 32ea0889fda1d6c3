"""Scores that are known, and what was spent on others: one SQLite file per judge.

All processes of a machine that grade share it. Of two that ask the judge about the same answer, the
first score counts for both.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarm.errors import UserError

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
