"""What the logs of a run say about submissions: verdicts, and what the trainer did with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from swarm.errors import UserError
from swarm.ledger.archive import Archive
from swarm.ledger.entries import Consumed
from swarm.look.archives import archive_in_home, home_rows, read_export
from swarm.wire.envelope import Dropped, open_envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Verdict


@dataclass
class RunLog:
    """Verdicts and outcomes by a submission's BLAKE3-256; empty without logs."""

    manifest: RunManifest | None = None
    run: str = ""
    verdicts: dict[bytes, Verdict] = field(default_factory=dict)
    consumed: dict[bytes, Consumed] = field(default_factory=dict)


def read_log(path: Path, run: str | None) -> RunLog:
    """Read a trusted peer's home or an exported ledger; raises `UserError`."""
    archive = archive_in_home(path, run) if path.is_dir() else read_export(path)
    try:
        log = _log_of(archive)
    except ValueError as error:
        raise UserError(f"the ledger in {path} cannot be read ({error})") from error
    if (path / "trainer.sqlite").exists():
        database = path / "trainer.sqlite"
        tables = home_rows(
            database, "SELECT name FROM sqlite_master WHERE name IN ('accepted', 'kept')"
        )
        for (table,) in sorted(tables):
            for digest, raw in home_rows(
                database, f"SELECT digest, verdict FROM {table} ORDER BY digest"
            ):
                verdict = _verdict(raw)
                if verdict is not None:
                    log.verdicts.setdefault(digest, verdict)
    return log


def _log_of(archive: Archive) -> RunLog:
    log = RunLog(archive.manifest, archive.run)
    judges = archive.state.judges
    for owner, copy in sorted(archive.logs.items()):
        for envelope in copy.verdicts.values():
            verdict = envelope.message
            if not isinstance(verdict, Verdict):
                continue
            # Of several validators' verdicts, the final one counts.
            if verdict.submission not in log.verdicts or judges.get(verdict.submission) == owner:
                log.verdicts[verdict.submission] = verdict
    for record in archive.records:
        if isinstance(record.entry, Consumed):
            log.consumed[record.entry.submission] = record.entry
    return log


def _verdict(raw: bytes) -> Verdict | None:
    try:
        message = open_envelope(raw).message
    except Dropped:  # another version of Swarm wrote it
        return None
    return message if isinstance(message, Verdict) else None
