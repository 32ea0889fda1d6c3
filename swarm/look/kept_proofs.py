"""Reading the proofs that a worker keeps of its own work, from its home."""

from __future__ import annotations

from pathlib import Path

from swarm.errors import UserError
from swarm.ledger.proof_file import KEPT_PROOFS, Proven, proven_in
from swarm.look.archives import home_rows
from swarm.look.prefixes import resolve
from swarm.wire.envelope import Dropped
from swarm.world.home import check_format


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


def _database(home: Path) -> Path:
    """The file that holds a worker's proofs; raises `UserError` if it holds none."""
    check_format(home)
    database = home / "peer.sqlite"
    if not home_rows(database, "SELECT 1 FROM sqlite_master WHERE name = 'receipts'"):
        raise UserError(f"{home} keeps no proofs: only workers keep them")
    return database
