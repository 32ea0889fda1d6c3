"""The format of a peer's home: what is stored in it, and how an older one becomes the present one.

A home has one format number for all its files and databases, in the file `format`. A build opens a
home of its own format, migrates an older one, and refuses a newer one.

A migration never changes a file in place. It writes the new files into a folder of their own, and
an index of them last. With the index the migration is done, whatever happens: the files are then
moved to their places, by this process or by the next that opens the home. Without it the folder is
deleted. So a process may be killed at any instant, and a power cut costs nothing either.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm import __version__
from swarm.errors import DiskFullError, UserError
from swarm.world.disk import sync_path

FORMAT_FILE = "format"

STAGED = ".migration"
"""Folder in a home with the files of a migration."""

INDEX = "index.json"
"""File in that folder that names its files, and makes them count."""


@dataclass(frozen=True)
class Migration:
    """One step from a format to the next."""

    what: str
    """What changes, in a few words."""
    databases: tuple[str, ...]
    """Databases that may change; each that exists is copied and changed."""
    change: Callable[[str, sqlite3.Connection], None]
    """Changes the copy of one of these databases, inside a transaction."""


def _batches_of_steps(name: str, connection: sqlite3.Connection) -> None:
    """A trainer's consumed submissions are kept per lineage and trained step, and a worker's
    submissions name the policies that they were sampled from."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    if name == "trainer.sqlite" and "steps" in tables:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS batches (lineage INTEGER, step INTEGER, "
            "reward REAL NOT NULL, consumed BLOB NOT NULL, PRIMARY KEY (lineage, step))"
        )
        connection.execute(
            "INSERT OR IGNORE INTO batches (lineage, step, reward, consumed) SELECT "
            "(SELECT IFNULL(MAX(lineage), 0) FROM orders), step - 1, reward, consumed FROM steps"
        )
        connection.execute("DROP TABLE steps")
    if name == "peer.sqlite" and "made" in tables:
        columns = {row[1] for row in connection.execute("PRAGMA table_info(made)")}
        if "policies" not in columns:
            connection.execute("ALTER TABLE made ADD COLUMN policies BLOB")


MIGRATIONS = (
    Migration(
        "batches by lineage, policies of submissions",
        ("peer.sqlite", "trainer.sqlite"),
        _batches_of_steps,
    ),
)
"""The n-th leads from format n + 1 to the next; homes of format 1 have no file `format`."""

HOME_FORMAT = len(MIGRATIONS) + 1
"""Format that this build reads and writes."""


def format_of(home: Path) -> int:
    """Read a home's format; an empty or missing home has the present one.

    Raises `UserError` for a file that is no format.
    """
    path = home / FORMAT_FILE
    try:
        found = json.loads(path.read_bytes())["format"]
    except FileNotFoundError:
        return 1 if any(home.glob("*.sqlite")) else HOME_FORMAT
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore the home from a copy") from error
    if not isinstance(found, int) or found < 1:
        raise UserError(f"{path} names format {found!r}; restore the home from a copy")
    return found


def check_format(home: Path) -> int:
    """Return a home's format; raises `UserError` if it is newer than this build's."""
    found = format_of(home)
    if found > HOME_FORMAT:
        raise UserError(
            f"--home {home} has format {found}, and this build, {__version__}, reads formats 1 to "
            f"{HOME_FORMAT}: start it with the newer Swarm that wrote it, or choose another --home"
        )
    return found


def due(found: int) -> tuple[Migration, ...]:
    """List the migrations that a home of this format needs."""
    return MIGRATIONS[found - 1 :]


def bytes_needed(home: Path, found: int) -> int:
    """Return the free space that the migrations of a home need, in bytes: copies of databases."""
    names = {name for migration in due(found) for name in migration.databases}
    paths = [home / f"{name}{end}" for name in names for end in ("", "-wal")]
    return 2 * sum(path.stat().st_size for path in paths if path.exists())


def open_format(home: Path) -> list[str]:
    """Bring a home to this build's format; returns what was migrated, in words.

    The caller is the home's sole user. Raises `UserError` for a newer format, and `DiskFullError`
    if the copies do not fit.
    """
    found = check_format(home)
    staged = home / STAGED
    if (staged / INDEX).exists():  # a migration that was interrupted after it was decided
        _move(home, staged)
        found = format_of(home)
    shutil.rmtree(staged, ignore_errors=True)
    done = []
    for migration in due(found):
        found += 1
        _migrate(home, staged, migration, found)
        done.append(migration.what)
    if not (home / FORMAT_FILE).exists():
        _write(home / FORMAT_FILE, _format_line(found))
    return done


def _migrate(home: Path, staged: Path, migration: Migration, becomes: int) -> None:
    free, needed = shutil.disk_usage(home).free, bytes_needed(home, becomes - 1)
    if free < needed:
        raise DiskFullError(
            f"--home {home} needs {needed} bytes for its migration to format {becomes}, and the "
            f"disk has {free}; free some space: the home is as it was"
        )
    staged.mkdir(mode=0o700)
    names = []
    for name in migration.databases:
        if (home / name).exists():
            try:
                with _copied(home / name, staged / name) as connection:
                    migration.change(name, connection)
            except sqlite3.OperationalError as error:  # the disk or this program, not the file
                shutil.rmtree(staged)
                if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
                    raise DiskFullError(
                        f"--home {home} cannot be migrated to format {becomes} ({error}); free "
                        "some space: the home is as it was"
                    ) from error
                raise
            except sqlite3.DatabaseError as error:
                raise UserError(
                    f"{home / name} is damaged, and cannot be migrated to format {becomes} "
                    f"({error}); nothing was changed; docs/deployment.md says what is lost with it"
                ) from error
            names.append(name)
    sync_path(staged)
    _write(staged / INDEX, json.dumps({"format": becomes, "files": names}))
    _move(home, staged)


@contextmanager
def _copied(source: Path, target: Path) -> Iterator[sqlite3.Connection]:
    """Copy a database with all its transactions; yields the copy inside a transaction."""
    with (
        closing(sqlite3.connect(source)) as old,
        closing(sqlite3.connect(target, isolation_level=None)) as new,
    ):
        old.backup(new)
        new.execute("PRAGMA synchronous = FULL")
        new.execute("BEGIN IMMEDIATE")
        yield new
        new.execute("COMMIT")
    sync_path(target)


def _move(home: Path, staged: Path) -> None:
    """Put the files of a decided migration in their places. Safe to repeat."""
    index = json.loads((staged / INDEX).read_bytes())
    # First of all, so that an older build opens no mixture of old and new files.
    _write(home / FORMAT_FILE, _format_line(index["format"]))
    for name in index["files"]:
        if not (staged / name).exists():
            continue  # already moved
        for end in ("-wal", "-shm"):  # of the old database; all of it is in the copy
            (home / f"{name}{end}").unlink(missing_ok=True)
        (staged / name).replace(home / name)
    sync_path(home)
    (staged / INDEX).unlink()
    shutil.rmtree(staged)


def _format_line(number: int) -> str:
    return json.dumps({"format": number, "build": __version__}) + "\n"


def _write(path: Path, text: str) -> None:
    """Replace a file durably."""
    aside = path.with_name(f"{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_path(path.parent)
