"""Reading the proofs that a worker keeps of its own work, from its home."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from swarm.errors import UserError
from swarm.ledger.archive import Archive
from swarm.ledger.proof_file import KEPT_PROOFS, KEPT_PROOFS_OF_RUN, Proven, proven_in
from swarm.look.archives import home_rows
from swarm.look.prefixes import resolve
from swarm.run.choice import choose_run
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.manifest import RunManifest
from swarm.world.home import check_format


def keeps_proofs(home: Path) -> bool:
    """Whether this is the home of a peer that keeps no log, so that its proofs are its own."""
    return (home / "peer.sqlite").exists() and not (home / "ledger.sqlite").exists()


def kept_proof(home: Path, prefix: str) -> Proven:
    """The proof of the submission that a hexadecimal prefix names; raises `UserError`.

    Of several validators' verdicts, the newest acceptance, else the newest.
    """
    database = _database(home)
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


def kept_archive(home: Path, run: str | None) -> Archive:
    """The receipts that a worker's home keeps of a run, each checked again; raises `UserError`."""
    database = _database(home)
    manifests: dict[str, Envelope] = {}
    for (raw,) in home_rows(database, "SELECT envelope FROM proof_manifests"):
        with suppress(Dropped):
            manifest = open_envelope(raw)
            known = manifests.get(manifest.body.run, manifest)
            manifests[manifest.body.run] = max(
                known, manifest, key=lambda each: each.expect(RunManifest).version
            )
    if not manifests:
        raise UserError(
            f"{home} keeps no receipt yet: a worker asks for them a few seconds after each "
            "verdict; ask the network with --bootstrap until then"
        )
    archive = Archive(
        choose_run([manifests[name] for name in sorted(manifests)], run), home=str(home)
    )
    damaged = 0
    for row in home_rows(database, KEPT_PROOFS_OF_RUN, archive.run):
        try:
            proven = proven_in(row)
        except Dropped:
            damaged += 1
            continue
        if proven.problem() is not None:
            damaged += 1
            continue
        receipt = proven.receipt
        archive.receipts.append(receipt)
        archive.log(receipt.envelope.sender).verdicts[receipt.index] = receipt.envelope
    if damaged:
        archive.problems.append(f"{damaged:,} of the receipts in {database} prove nothing")
    return archive


def _database(home: Path) -> Path:
    """The file that holds a worker's proofs; raises `UserError` if it holds none."""
    check_format(home)
    database = home / "peer.sqlite"
    if not home_rows(database, "SELECT 1 FROM sqlite_master WHERE name = 'receipts'"):
        raise UserError(f"{home} keeps no proofs: only workers keep them")
    return database
