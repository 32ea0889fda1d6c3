"""Reading the proofs that a worker keeps of its own work, from its home."""

from __future__ import annotations

from pathlib import Path

from swarm.app.archives import home_rows
from swarm.app.prefixes import resolve
from swarm.envelope import Dropped
from swarm.errors import UserError
from swarm.ledger.kept_proofs import KEPT_PROOFS, proven_in
from swarm.ledger.proof_file import Proven
from swarm.world.home_format import check_format


def keeps_proofs(home: Path) -> bool:
    """Whether this is the home of a peer that keeps no log, so that its proofs are its own."""
    return (home / "peer.sqlite").exists() and not (home / "ledger.sqlite").exists()


def kept_proof(home: Path, prefix: str) -> Proven:
    """The proof of the submission that a hexadecimal prefix names; raises `UserError`.

    Of several validators' verdicts, the newest acceptance, else the newest.
    """
    check_format(home)
    database = home / "peer.sqlite"
    if not home_rows(database, "SELECT 1 FROM sqlite_master WHERE name = 'proofs'"):
        raise UserError(
            f"{home} keeps no proofs: only workers keep them, of runs whose ledger is sealed"
        )
    names = {name for (name,) in home_rows(database, "SELECT lower(hex(submission)) FROM proofs")}
    if not names:
        raise UserError(
            f"{home} keeps no proof yet: a worker keeps them when the ledger seals an epoch; ask "
            "the network with --bootstrap until then"
        )
    submission = bytes.fromhex(resolve(prefix.lower(), names, "submission", str(home)))
    try:
        found = [proven_in(row) for row in home_rows(database, KEPT_PROOFS, submission)]
    except Dropped as dropped:
        raise UserError(f"the proof in {database} is damaged ({dropped})") from dropped
    accepted = (each for each in found if each.receipt.verdict.outcome == "accepted")
    return next(accepted, found[0])
