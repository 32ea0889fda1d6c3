"""Copies of all logs of a run: from the network, from a trusted peer's home, or from an export.

An archive can be written to a table, one row for each manifest, head, entry and verdict. Each row
has the bytes that were signed or hashed, so that whoever reads the table can check it again."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from swarm.ledger import merkle
from swarm.ledger.entries import decode
from swarm.ledger.epochs import base_of, records_of
from swarm.ledger.state import Authority, LedgerState, Record, ledger_state
from swarm.ledger.wire import ForkEvidence, Origin
from swarm.terminal.output import plain
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import LogHead, Verdict
from swarm.wire.succession import ownership_of

Row = dict[str, Any]


@dataclass
class LogCopy:
    """One trusted peer's log."""

    owner: str
    entries: list[bytes] = field(default_factory=list)
    origin: Origin = field(default_factory=lambda: Origin(0, []))
    """Where the copy begins; earlier entries are pruned."""
    heads: dict[bytes, Envelope] = field(default_factory=dict)
    """All known signed heads of this log, by digest."""
    verdicts: dict[int, Envelope] = field(default_factory=dict)
    """Signed verdicts, the workers' receipts, by log index. Mirrors do not have them."""
    unsigned: bool = False
    """Whether this is the log of the peer on whose disk it was read, which stores no own head."""

    @property
    def size(self) -> int:
        """Entries of the log, with those that are pruned."""
        return self.origin.start + len(self.entries)

    def tree(self) -> merkle.Peaks:
        """The tree of the entries that are pruned, to which the others can be appended."""
        return merkle.Peaks(self.origin.start, self.origin.hashes)

    def add_head(self, head: Envelope) -> None:
        if not isinstance(head.message, LogHead) or head.sender != self.owner:
            raise ValueError(f"not a head of the log of {self.owner}")
        self.heads[head.digest] = head


@dataclass
class Archive:
    """Copies of the trusted peers' logs; `records` and `state` are computed once all are here."""

    signed: Envelope
    logs: dict[str, LogCopy] = field(default_factory=dict)
    forks: list[ForkEvidence] = field(default_factory=list)
    """Contradictory heads that trusted peers keep."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each copy that could not be had."""

    @property
    def manifest(self) -> RunManifest:
        return self.signed.expect(RunManifest)

    @property
    def run(self) -> str:
        return self.signed.body.run

    def log(self, owner: str) -> LogCopy:
        """The copy of a log, empty if there was none."""
        return self.logs.setdefault(owner, LogCopy(owner))

    @cached_property
    def records(self) -> list[Record]:
        """All entries; raises `ValueError` for a malformed one."""
        return [record for log in self._records_by_log for record in log]

    @cached_property
    def _records_by_log(self) -> list[list[Record]]:
        return [
            records_of(owner, log.origin.start, log.entries)
            for owner, log in sorted(self.logs.items())
        ]

    @cached_property
    def state(self) -> LedgerState:
        """The state that follows from the logs, and from their seals where they are pruned."""
        authority = Authority.of(ownership_of(self.signed).owners, self.manifest)
        base = base_of(self._records_by_log, authority.trusted)
        return ledger_state(self.records, authority, base=base)

    # --- tables ------------------------------------------------------------------------------

    def rows(self) -> Iterator[Row]:
        """The rows of a table: what was signed, the entries, and each worker's credits.

        Every row has `owner`, `index`, `type` and `raw` (hex); the other fields depend on the type.
        """
        yield _row("", None, "manifest", self.signed.raw)
        for fork in self.forks:
            yield _row("", None, "fork", msgspec.msgpack.encode(fork))
        for owner, log in sorted(self.logs.items()):
            for _, head in sorted(log.heads.items()):
                yield _row(owner, None, "head", head.raw, msgspec.structs.asdict(head.message))
            if log.origin.start:
                yield _row(owner, log.origin.start, "origin", b"".join(log.origin.hashes))
            for index, raw in enumerate(log.entries, log.origin.start):
                entry = decode(raw)
                name = str(entry.__struct_config__.tag)
                fields = msgspec.structs.asdict(entry)
                fields.pop("envelope", None)
                yield _row(owner, index, name, raw, fields)
            for index, verdict in sorted(log.verdicts.items()):
                message = verdict.message
                detail: dict[str, Any] = {}
                if isinstance(message, Verdict):  # `audit` says if it is something else
                    detail = {"submission": message.submission, "detail": message.detail}
                yield _row(owner, index, "verdict", verdict.raw, detail)
        for worker, totals in sorted(self.state.totals.items()):
            yield _row("", None, "credit", b"", {"peer": worker} | dataclasses.asdict(totals))

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> "Archive":
        """Read a table that `rows` made; raises `ValueError`."""
        archive: Archive | None = None
        for row in rows:
            try:
                raw, kind, owner = bytes.fromhex(row["raw"]), row["type"], row["owner"]
                if kind == "manifest":
                    archive = cls(open_envelope(raw))
                    if not isinstance(archive.signed.message, RunManifest):
                        raise ValueError("it begins with something else than a run manifest")
                    ownership_of(archive.signed)
                elif archive is None:
                    raise ValueError("it does not begin with a run manifest")
                elif kind == "fork":
                    archive.forks.append(msgspec.msgpack.decode(raw, type=ForkEvidence))
                elif kind == "head":
                    archive.log(owner).add_head(open_envelope(raw))
                elif kind == "origin":
                    archive.log(owner).origin = _origin(int(row["index"]), raw)
                elif kind == "verdict":
                    archive.log(owner).verdicts[int(row["index"])] = open_envelope(raw)
                elif kind != "credit":  # credits follow from the entries
                    log = archive.log(owner)
                    if int(row["index"]) != log.size:
                        raise ValueError(f"entry {log.size} of {owner} is missing")
                    log.entries.append(raw)
            except (KeyError, TypeError, AttributeError, Dropped, msgspec.MsgspecError) as error:
                raise ValueError(f"a row cannot be read ({error!r})") from error
        if archive is None:
            raise ValueError("it is empty")
        return archive


def _origin(start: int, raw: bytes) -> Origin:
    peaks = [raw[at : at + 32] for at in range(0, len(raw), 32)]
    if [len(peak) for peak in peaks] != [32] * len(merkle.peaks_of(start)):
        raise ValueError(f"the hashes of a log that begins at {start} are wrong")
    return Origin(start, peaks)


def _row(
    owner: str, index: int | None, kind: str, raw: bytes, fields: Mapping[str, Any] | None = None
) -> Row:
    row: Row = {"owner": owner, "index": index, "type": kind}
    for name, value in (fields or {}).items():
        row[name] = plain(value)
    return row | {"raw": raw.hex()}
