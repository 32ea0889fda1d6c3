"""A kept receipt, held against its validator's log as it is now, which may have pruned the entry.

What a log has pruned it still commits to: by the hashes that it keeps for signed heads that are not
older than these, and by the roots that its seals name.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.ledger import merkle
from swarm.ledger.archive import Archive, LogCopy
from swarm.ledger.audit import audit
from swarm.ledger.epochs import records_of, seals_in
from swarm.ledger.proof_file import Proven


@dataclass(frozen=True)
class Anchor:
    """How a receipt stands to the log of today."""

    holds: bool | None
    """None: the log keeps nothing to compare the receipt with."""
    sentence: str
    """What holds, or why it does not."""

    @property
    def line(self) -> str:
        """For people."""
        states = {True: "in the log", False: "NOT in the log", None: "not compared"}
        return f"{states[self.holds]}: {self.sentence}"


def anchor(proven: Proven, archive: Archive) -> Anchor:
    """Hold a receipt, whose own proof is checked already, against copies of the logs.

    Raises `ValueError` for malformed entries.
    """
    receipt = proven.receipt
    owner, index = receipt.envelope.sender, receipt.index
    if proven.signed.body.run != archive.run:
        return Anchor(False, f"it belongs to the run {proven.signed.body.run}, not {archive.run}")
    log = archive.log(owner)
    if not log.size:
        return Anchor(None, f"nobody has a copy of the log of {owner} now")
    if receipt.log_size >= log.origin.start:
        log.add_head(receipt.head)  # the audit compares it with the entries and the other heads
    found = next((each for each in audit(archive) if each.owner == owner), None)
    if found is None or not found.sound:
        wrong = [*found.forks, *found.problems] if found is not None else ["it is not trusted now"]
        return Anchor(False, f"the log of {owner} is not sound: {wrong[0]}")
    if log.origin.start <= index < log.size:
        if log.entries[index - log.origin.start] != receipt.entry:
            return Anchor(False, f"entry {index} of the log of {owner} is another one")
        return Anchor(True, f"it is entry {index} of the {log.size} that the log has now")
    if log.origin.start <= receipt.log_size <= log.size:
        return Anchor(
            True, f"it is pruned, and one of the {receipt.log_size} entries that the log began with"
        )
    return _sealed(proven, log)


def _sealed(proven: Proven, log: LogCopy) -> Anchor:
    """Hold a receipt against the roots that the seals of the log name."""
    receipt = proven.receipt
    leaf, roots = merkle.leaf_hash(receipt.entry), sealed_roots(log)
    for size, proof in ((receipt.log_size, receipt.proof), (proven.sealed_size, proven.sealed)):
        if size not in roots:
            continue
        if not merkle.verify_inclusion(leaf, receipt.index, size, list(proof), roots[size]):
            return Anchor(False, f"it is not among the {size} entries that were sealed")
        return Anchor(True, f"it is pruned, and one of the {size} entries that were sealed")
    return Anchor(
        None,
        f"it is pruned, and was proven under {receipt.log_size} entries, of which the log keeps no "
        "root; the validator's signature stands by itself. Prove work again after the next seal",
    )


def sealed_roots(log: LogCopy) -> dict[int, bytes]:
    """The root of each sealed size of a log that its seals name."""
    found: dict[int, bytes] = {}
    for _, seal in seals_in(records_of(log.owner, log.origin.start, log.entries)):
        found |= {earlier.size: earlier.root for earlier in seal.earlier}
        if (covered := seal.log(log.owner)) is not None:
            found[covered.size] = covered.root
    return found
