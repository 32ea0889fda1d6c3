"""Checking copies of logs: signatures, contents, and whether all signed heads fit one history.

A kept receipt is held against its validator's log as it is now. What the log has pruned it still
commits to by the hashes that it keeps, for signed heads that are not older than these."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from swarm.ledger import entries as log_entries
from swarm.ledger import merkle
from swarm.ledger.archive import Archive, LogCopy
from swarm.ledger.proof_file import Proven
from swarm.ledger.wire import contradiction
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Eviction, LogHead, Reinstatement, Verdict

PROBLEMS_MAX = 20
"""Problems reported of one log; a log that is wrong throughout has one per entry."""


@dataclass
class Audited:
    """What was found out about one log."""

    owner: str
    roles: list[str]
    entries: int
    verdicts: int
    """Signed verdicts that were compared with their entries."""
    heads: int
    """Signed heads that the entries were compared with."""
    forks: list[str] = field(default_factory=list)
    """One sentence for each contradiction between signed heads."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be checked, without fault of the log's owner."""

    @property
    def sound(self) -> bool:
        return not self.forks and not self.problems


def audit(archive: Archive) -> list[Audited]:
    """Check the copies of all trusted peers' logs; the manifest was checked when it was opened."""
    manifest = archive.manifest
    accused: dict[str, list[Envelope]] = {}
    for evidence in archive.forks:
        try:
            first, second = evidence.opened()
        except ValueError:
            continue  # proves nothing against anybody
        if first.body.run == archive.run:
            accused.setdefault(first.sender, []).extend((first, second))
    found = []
    for owner in manifest.trusted_ids():
        log = archive.logs.get(owner, LogCopy(owner))
        heads = {head.digest: head for head in [*log.heads.values(), *accused.get(owner, ())]}
        found.append(_audit(archive, log, [head for _, head in sorted(heads.items())]))
    return found


def _audit(archive: Archive, log: LogCopy, heads: list[Envelope]) -> Audited:
    manifest, owner = archive.manifest, log.owner
    result = Audited(
        owner=owner,
        roles=[
            name
            for name, holds in (
                ("trainer", manifest.is_trainer(owner)),
                ("validator", manifest.is_validator(owner)),
            )
            if holds
        ],
        entries=log.size,
        verdicts=len(log.verdicts),
        heads=len(heads),
    )
    result.problems += [
        f"its head of {_size(head)} entries belongs to another run"
        for head in heads
        if head.body.run != archive.run
    ]
    _compare_heads(log, [head for head in heads if head.body.run == archive.run], result)
    entries = list(_entries(log, result))
    for index, entry in entries:
        problem = _not_permitted(archive, owner, entry)
        if problem is not None:
            result.problems.append(f"entry {index}: {problem}")
    _compare_verdicts(archive, log, dict(entries), result)
    del result.problems[PROBLEMS_MAX:]
    return result


def _compare_heads(log: LogCopy, heads: list[Envelope], result: Audited) -> None:
    for first, second in combinations(heads, 2):
        reason = contradiction(first, second)
        if reason is not None:
            result.forks.append(reason)
    if not heads:
        if not log.entries:
            result.notes.append("neither entries nor a signed head of it were found")
        elif log.unsigned:
            result.notes.append("the peer whose home this is keeps no signed head of its own log")
        else:
            result.problems.append(
                "no signed head of it was found (an export of its owner's home has none; export "
                "from the network instead)"
            )
        return
    start = log.origin.start
    if start:
        result.notes.append(f"its first {start} entries are sealed and pruned")
        heads = [head for head in heads if _size(head) >= start]
        if not heads:
            result.problems.append("no signed head of what is left of it was found")
            return
    roots = _roots(log, {_size(head) for head in heads})
    fitting = [head for head in heads if roots.get(_size(head)) == head.expect(LogHead).root]
    others = [head for head in heads if _size(head) <= log.size and head not in fitting]
    longest = max(map(_size, heads))
    if longest > log.size:
        result.notes.append(
            f"{longest - log.size} of the {longest} entries that it signed are missing here"
        )
    covered = max(map(_size, fitting), default=-1)
    if covered < log.size and not log.unsigned:
        result.problems.append(
            f"no signed head covers its entries from {max(covered, start)} to {log.size - 1}"
        )
    # Entries that no signed head covers may be wrong here, not at the owner: a head that does not
    # fit them convicts nobody. If another of its heads covers them, it has signed two histories.
    for head in others:
        if covered >= _size(head) or log.unsigned:
            result.forks.append(
                f"its signed head of {_size(head)} entries is not the head of the first "
                f"{_size(head)} entries of its log"
            )


def _roots(log: LogCopy, sizes: set[int]) -> dict[int, bytes]:
    """Roots of the first `size` entries, for the sizes that the entries reach."""
    peaks = log.tree()
    roots = {peaks.size: peaks.root()} if peaks.size in sizes else {}
    for raw in log.entries:
        peaks.append(merkle.leaf_hash(raw))
        if peaks.size in sizes:
            roots[peaks.size] = peaks.root()
    return roots


def _entries(log: LogCopy, result: Audited) -> Iterator[tuple[int, log_entries.Entry]]:
    for index, raw in enumerate(log.entries, log.origin.start):
        try:
            yield index, log_entries.decode(raw)
        except ValueError as error:
            result.problems.append(f"entry {index}: {error}")


def _not_permitted(archive: Archive, owner: str, entry: log_entries.Entry) -> str | None:
    """Why this peer may not have written an entry, or None."""
    manifest: RunManifest = archive.manifest
    if isinstance(entry, log_entries.Carried):
        return _not_permitted(archive, owner, log_entries.decode(entry.entry))
    if isinstance(entry, log_entries.Judged) and not manifest.is_validator(owner):
        return "a verdict in the log of a peer that is no validator"
    if isinstance(
        entry, (log_entries.CheckpointPublished, log_entries.Consumed)
    ) and not manifest.is_trainer(owner):
        return "a trainer's entry in the log of a peer that is no trainer"
    if not isinstance(entry, (log_entries.Evicted, log_entries.Reinstated)):
        return None
    try:
        envelope = open_envelope(entry.envelope)
    except Dropped as dropped:
        return f"its signed message is invalid ({dropped})"
    evicts = isinstance(entry, log_entries.Evicted)
    signer = owner if evicts else archive.signed.sender
    if not isinstance(envelope.message, Eviction if evicts else Reinstatement):
        return f"its message is a {envelope.body.kind}"
    if envelope.sender != signer or envelope.body.run != archive.run:
        return f"its message is not signed by {signer} for this run"
    if (envelope.message.peer, envelope.message.reason) != (entry.peer, entry.reason):
        return "it differs from its signed message"
    return None


def _compare_verdicts(
    archive: Archive, log: LogCopy, entries: dict[int, log_entries.Entry], result: Audited
) -> None:
    for index, envelope in sorted(log.verdicts.items()):
        verdict = envelope.message
        if (
            not isinstance(verdict, Verdict)
            or envelope.sender != log.owner
            or envelope.body.run != archive.run
        ):
            result.problems.append(f"verdict {index} is not signed by {log.owner} for this run")
        elif verdict.log_index != index or entries.get(index) != log_entries.judged(verdict):
            result.problems.append(f"verdict {index} differs from the log entry that it names")


def _size(head: Envelope) -> int:
    return head.expect(LogHead).size


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
    """Hold a checked receipt against copies of the logs. Raises `ValueError` if malformed."""
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
    return Anchor(
        None,
        f"it is pruned, and was proven under {receipt.log_size} entries, of which the log keeps no "
        "root; the validator's signature stands by itself",
    )
