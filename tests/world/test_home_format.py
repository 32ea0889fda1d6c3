"""Formats of homes: older ones are migrated or stay as they are, newer ones are refused."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import DiskFullError, UserError
from swarm.world import home_format
from swarm.world.home_format import (
    FORMAT_FILE,
    HOME_FORMAT,
    STAGED,
    bytes_needed,
    check_format,
    due,
    format_of,
    open_format,
)

TRAINER = (
    "CREATE TABLE orders (lineage INTEGER, step INTEGER, revision INTEGER, message BLOB NOT NULL)",
    "INSERT INTO orders VALUES (0, 5, 0, x'00'), (3, 6, 0, x'00')",
    "CREATE TABLE steps (step INTEGER PRIMARY KEY, reward REAL NOT NULL, consumed BLOB NOT NULL)",
    "INSERT INTO steps VALUES (5, 0.25, x'90'), (6, 0.5, x'90')",
)
WORKER = (
    "CREATE TABLE made (run TEXT NOT NULL, lineage INTEGER NOT NULL, step INTEGER NOT NULL)",
    "INSERT INTO made VALUES ('a run', 3, 6)",
    "CREATE TABLE manifests (run TEXT NOT NULL, version INTEGER NOT NULL, envelope BLOB NOT NULL)",
)


def home_of_format_1(folder: Path) -> Path:
    """A home as builds left it that knew no formats; the last change is still in the WAL."""
    folder.mkdir()
    for name, statements in (("trainer.sqlite", TRAINER), ("peer.sqlite", WORKER)):
        source = folder / f"source-{name}"
        with closing(sqlite3.connect(source, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            for statement in statements:
                connection.execute(statement)
            for end in ("", "-wal"):  # as a process that is killed leaves them
                shutil.copy(f"{source}{end}", folder / f"{name}{end}")
        source.unlink()
    (folder / "identity.key").write_text("kept", encoding="ascii")
    return folder


def rows(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def is_old(home: Path) -> bool:
    try:
        return (
            len(rows(home / "trainer.sqlite", "SELECT * FROM steps")) == 2
            and rows(home / "peer.sqlite", "SELECT * FROM made") == [("a run", 3, 6)]
            and format_of(home) == 1
        )
    except sqlite3.OperationalError:
        return False


def is_new(home: Path) -> bool:
    batches = rows(home / "trainer.sqlite", "SELECT * FROM batches ORDER BY step")
    return (
        batches == [(3, 4, 0.25, b"\x90"), (3, 5, 0.5, b"\x90")]
        and rows(home / "peer.sqlite", "SELECT * FROM made") == [("a run", 3, 6, None)]
        and not rows(home / "trainer.sqlite", "SELECT 1 FROM sqlite_master WHERE name = 'steps'")
        and format_of(home) == HOME_FORMAT
        and not (home / STAGED).exists()
    )


def test_an_older_home_is_migrated_once(tmp_path: Path) -> None:
    home = home_of_format_1(tmp_path / "home")
    assert is_old(home) and len(due(format_of(home))) == HOME_FORMAT - 1
    assert bytes_needed(home, 1) > 0
    assert open_format(home) == [each.what for each in home_format.MIGRATIONS]
    assert is_new(home) and (home / "identity.key").read_text() == "kept"
    assert open_format(home) == [] and is_new(home)


def test_a_new_home_has_the_present_format(tmp_path: Path) -> None:
    assert format_of(tmp_path / "nowhere") == HOME_FORMAT
    assert open_format(tmp_path) == []
    assert json.loads((tmp_path / FORMAT_FILE).read_bytes())["format"] == HOME_FORMAT


def test_a_newer_home_is_refused_and_untouched(tmp_path: Path) -> None:
    home = home_of_format_1(tmp_path / "home")
    (home / FORMAT_FILE).write_text(json.dumps({"format": HOME_FORMAT + 1, "more": []}))
    before = {path: path.read_bytes() for path in home.iterdir()}
    for opens in (open_format, check_format):
        with pytest.raises(UserError, match=rf"has format {HOME_FORMAT + 1}, and this build"):
            opens(home)
    assert {path: path.read_bytes() for path in home.iterdir()} == before


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 0}', '{"format": "2"}', "\x00"])
def test_a_broken_format_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / FORMAT_FILE).write_text(text)
    with pytest.raises(UserError, match="restore the home from a copy"):
        open_format(tmp_path)


def test_a_migration_that_does_not_fit_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = home_of_format_1(tmp_path / "home")
    monkeypatch.setattr(home_format, "bytes_needed", lambda home, found: 1 << 62)
    with pytest.raises(DiskFullError, match="the home is as it was"):
        open_format(home)
    assert is_old(home)


def test_a_disk_that_fills_up_during_a_migration_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(name: str, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA max_page_count = 1")
        connection.execute("CREATE TABLE large AS SELECT zeroblob(1000000)")

    home = home_of_format_1(tmp_path / "home")
    grows = home_format.Migration("it grows", ("peer.sqlite",), fill)
    monkeypatch.setattr(home_format, "MIGRATIONS", (grows,))
    with pytest.raises(DiskFullError, match=r"disk is full\); free some space: the home is as it"):
        open_format(home)
    assert is_old(home) and not (home / STAGED).exists()


def test_killed_at_any_instant_the_home_is_old_or_becomes_new(tmp_path: Path) -> None:
    """A child dies at its n-th change of the disk, for every n; the home is then opened again."""
    seen = set()
    made = home_of_format_1(tmp_path / "made")
    for instant in range(100):
        home = shutil.copytree(made, tmp_path / f"home-{instant}")
        child = os.fork()
        if child == 0:
            _die_at(instant)
            open_format(home)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        decided = format_of(home) == HOME_FORMAT or (home / STAGED / home_format.INDEX).exists()
        seen.add(decided)
        if not decided:
            assert is_old(home), instant
        open_format(home)
        assert is_new(home), instant
        if os.waitstatus_to_exitcode(status) == 0:
            assert instant > 10 and seen == {False, True}
            return
    raise AssertionError("the migration never ended")


def _die_at(instant: int) -> None:
    """Make this process die at its n-th change of the disk by one of these functions."""
    left = [instant]

    def dying(function: Any) -> Any:
        def called(*arguments: Any, **more: Any) -> Any:
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            return function(*arguments, **more)

        return called

    for name in ("replace", "fsync", "mkdir", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))
    shutil.rmtree = dying(shutil.rmtree)
    setattr(sqlite3, "connect", dying(sqlite3.connect))  # noqa: B010 (mypy)


def test_a_damaged_database_is_a_sentence_and_stays(tmp_path: Path) -> None:
    home = home_of_format_1(tmp_path / "home")
    (home / "peer.sqlite-wal").unlink()
    (home / "peer.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(UserError, match=r"peer\.sqlite is damaged, and cannot be migrated"):
        open_format(home)
    assert (home / "peer.sqlite").read_bytes().startswith(b"no database")
    assert format_of(home) == 1
