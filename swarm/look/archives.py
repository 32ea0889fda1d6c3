"""Where commands get copies of a run's logs: the network, a trusted peer's home, or an export; and
the proofs that a worker keeps of its own work."""

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from swarm.errors import PeerError, UserError, file_errors
from swarm.ledger import merkle
from swarm.ledger.archive import Archive
from swarm.ledger.audit import audit
from swarm.ledger.client import LedgerClient
from swarm.ledger.proof_file import KEPT_PROOFS, Proven, proven_in
from swarm.ledger.wire import ForkEvidence, Origin
from swarm.look.onlooker import ask_all
from swarm.look.prefixes import resolve
from swarm.node.local import last_bootstrap, visit
from swarm.node.node import Node
from swarm.run.choice import choose_run
from swarm.run.run import Run
from swarm.terminal.interrupt import run_until_interrupted
from swarm.wire.envelope import Dropped, Envelope, open_envelope, readable
from swarm.wire.identity import KEY_FILE, check_home_identity, id_in_home, load_or_create
from swarm.wire.messages import LogHead
from swarm.world.home import check_format

ENTRIES_MAX = 10_000_000
"""Length of the longest log that is copied; about 2 GB."""


def find_archive(source: Path | None, bootstrap: Sequence[str] | None, run: str | None) -> Archive:
    """Read the logs from a home or an export, or fetch them from the network."""
    if source is None:
        entry = bootstrap or last_bootstrap()
        return run_until_interrupted(
            _fetch, entry, run, waiting="reading the logs of the trusted peers"
        )
    if bootstrap:
        raise UserError("give either --from PATH or --bootstrap MULTIADDR, not both")
    source = source.expanduser()
    return archive_in_home(source, run) if source.is_dir() else read_export(source)


async def _fetch(bootstrap: Sequence[str], run: str | None) -> Archive:
    async with visit(bootstrap, run, looks_on=True) as (node, found):
        return await fetch_archive(node, found)


async def fetch_archive(node: Node, run: Run, worker: str = "") -> Archive:
    """Fetch all logs from their owners, with the heads that the others' mirrors hold.

    The log of a peer that does not answer is fetched from a mirror. `worker`: whose signed verdicts
    to fetch, all by default."""
    archive = Archive(run.manifest_envelope)
    trusted = run.manifest.trusted_ids()
    mirrored: dict[str, dict[str, Envelope]] = {}
    """Heads that other trusted peers hold of each log, by owner and holder."""

    async def ask_owner(client: LedgerClient) -> None:
        archive.forks.extend((await client.status()).forks)
        for owner in trusted:
            head = await client.head(owner)
            if head is not None and owner != client.peer:
                mirrored.setdefault(owner, {})[client.peer] = head
                archive.log(owner).add_head(head)
            elif head is not None:
                await _copy_log(client, archive, head)
        if client.peer in run.manifest.validator_ids():
            await _copy_verdicts(client, archive, worker)

    await ask_all(node, trusted, ask_owner, archive.problems)
    for owner in trusted:
        heads = mirrored.get(owner, {})
        for holder in sorted(heads, key=lambda peer: -heads[peer].expect(LogHead).size):
            if archive.log(owner).entries:
                break

            async def ask_mirror(client: LedgerClient, head: Envelope = heads[holder]) -> None:
                await _copy_log(client, archive, head)

            await ask_all(node, [holder], ask_mirror, archive.problems)
    return archive


async def _copy_log(client: LedgerClient, archive: Archive, head: Envelope) -> None:
    log, size = archive.log(head.sender), head.expect(LogHead).size
    if size > ENTRIES_MAX:
        raise PeerError(f"the log of {head.sender} has {size:,} entries, too many to copy")
    log.entries = []
    while log.size < size:
        raws, origin = await client.entries_or_origin(head.sender, log.size, size - log.size)
        log.origin = origin or log.origin
        log.entries += raws
    log.add_head(head)


async def _copy_verdicts(client: LedgerClient, archive: Archive, worker: str) -> None:
    log = archive.log(client.peer)
    start = 0
    while page := await client.verdicts(worker, start):
        for item in page:
            envelope = client.opened(item.envelope, "verdict")
            if log.origin.start <= item.index < log.size:
                log.verdicts[item.index] = envelope
        if page[-1].index < start:
            raise PeerError(f"{client.peer} sent verdicts out of order")
        start = page[-1].index + 1


def leave_out_unsound(archive: Archive) -> None:
    """Leave out the logs that an audit finds wrong, with a sentence for each."""
    for found in audit(archive):
        if not found.sound:
            del archive.logs[found.owner]
            wrong = [*found.forks, *found.problems][0]
            archive.problems.append(f"the log of {found.owner} is not sound: {wrong}")


def archive_in_home(home: Path, run: str | None) -> Archive:
    """Read the logs from the home of a trusted peer, also while it runs."""
    check_format(home)
    if not (home / "ledger.sqlite").exists():
        raise UserError(
            f"{home} has no ledger.sqlite; only trainers and validators keep logs, and of a worker "
            "swarm ledger prove reads the receipts"
        )
    manifests: dict[str, Envelope] = {}
    for (raw,) in home_rows(
        home / "peer.sqlite", "SELECT envelope FROM manifests ORDER BY version"
    ):
        envelope = open_envelope(raw)
        manifests[envelope.body.run] = envelope
    if not manifests:
        raise UserError(f"the peer of {home} has joined no run")
    archive = Archive(choose_run([manifests[name] for name in sorted(manifests)], run))
    check_home_identity(home)
    own = id_in_home(home) or load_or_create(home / KEY_FILE).peer_id
    archive.log(own).unsigned = True
    with _reading(home / "ledger.sqlite") as rows:
        _fill(archive, own, rows)
    return archive


def learn_versions(home: Path, run: Run) -> None:
    """Bring a run to the newest version that the peer of a home has stored, if that is newer.

    A bootstrap peer may show an old one, with keys that the owner has replaced since. Raises
    `UserError` if the home cannot be read."""
    database = home / "peer.sqlite"
    if database.exists():
        stored = "SELECT envelope FROM manifests WHERE run = ? ORDER BY version, digest"
        rows = home_rows(database, stored, run.id)
        for envelope in readable(raw for (raw,) in rows):  # others are of a newer Swarm
            run.update(envelope)


Rows = Callable[..., list[tuple[Any, ...]]]
"""Reads rows: an SQL statement and its parameters."""


def _fill(archive: Archive, own: str, rows: Rows) -> None:
    node = "SELECT hash FROM nodes WHERE owner = ? AND level = ? AND position = ?"
    for owner, start in rows("SELECT owner, position FROM starts ORDER BY owner"):
        peaks = [rows(node, owner, *place)[0][0] for place in merkle.peaks_of(start)]
        archive.log(owner).origin = Origin(start, peaks)
    for owner, raw in rows("SELECT owner, entry FROM entries ORDER BY owner, position"):
        archive.log(owner).entries.append(raw)
    for owner, raw in rows("SELECT owner, envelope FROM heads ORDER BY owner"):
        archive.log(owner).add_head(open_envelope(raw))
    for index, raw in rows("SELECT position, envelope FROM verdicts ORDER BY position"):
        archive.log(own).verdicts[index] = open_envelope(raw)
    archive.forks = [
        ForkEvidence(first, second)
        for first, second in rows("SELECT first, second FROM forks ORDER BY owner, first")
    ]


def home_rows(database: Path, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Read rows of a database in a home; raises `UserError`."""
    with _reading(database) as rows:
        return rows(sql, *parameters)


@contextmanager
def _reading(database: Path) -> Iterator[Rows]:
    """Read a home's database at one instant, as its peer may write. Raises `UserError`."""
    try:
        uri = f"{database.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            yield lambda sql, *parameters: connection.execute(sql, parameters).fetchall()
    except sqlite3.Error as error:
        raise UserError(f"{database} cannot be read ({error})") from error


# --- exports ---------------------------------------------------------------------------------


def write_export(archive: Archive, path: Path) -> int:
    """Write an archive as lines of JSON; returns the number of rows."""
    rows = list(archive.rows())
    with file_errors(f"--out {path}", "written"), path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return len(rows)


def read_export(path: Path) -> Archive:
    """Read a file that `write_export` wrote; raises `UserError`."""
    try:
        with file_errors(path), path.open(encoding="utf-8") as file:
            return Archive.of_rows(map(json.loads, file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no export of a ledger: {error}") from error


def kept_proof(home: Path, prefix: str) -> Proven:
    """The proof of the submission that a hexadecimal prefix names; raises `UserError`.

    Of several validators' verdicts, the newest acceptance, else the newest."""
    database = _proofs_in(home)
    names = {name for (name,) in home_rows(database, "SELECT lower(hex(submission)) FROM receipts")}
    if not names:
        raise UserError(
            f"{home} keeps no proof yet: a worker asks for them a few seconds after each verdict"
        )
    submission = bytes.fromhex(resolve(prefix.lower(), names, "submission", str(home)))
    try:
        found = [proven_in(row) for row in home_rows(database, KEPT_PROOFS, submission)]
    except Dropped as dropped:
        raise UserError(f"the proof in {database} is damaged ({dropped})") from dropped
    accepted = (each for each in found if each.receipt.verdict.outcome == "accepted")
    return next(accepted, found[0])


def _proofs_in(home: Path) -> Path:
    """The file that holds a worker's proofs; raises `UserError` if it holds none."""
    check_format(home)
    database = home / "peer.sqlite"
    if not home_rows(database, "SELECT 1 FROM sqlite_master WHERE name = 'receipts'"):
        raise UserError(f"{home} keeps no proofs: only workers keep them")
    return database
