"""The capital of the bets against one worker in one validator's log, and the stakes of workers.

`peers.validator.evidence` places the bets and explains the bounds. The recursion is here because a
seal carries its state into the next epoch (`swarm.ledger.epochs`).

The verdicts on one number of a worker decide one summand of its stake (`swarm.ledger.record`). So
the transaction that appends a verdict adds the difference to the balance of the step. A stake is
then the sum of a hundred rows, and a restart has nothing to compute. When the owner changes the
validators or rules (table `authority`), all balances are computed again."""

import math
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec

from swarm.ledger.entries import Judged, SealedCapital, decode
from swarm.ledger.record import Rules
from swarm.ledger.state import Authority, Frontier, Record, ledger_state
from swarm.wire.messages import Evidence

PROCESSES = ("sampler", "policy", "text", "selection")
"""The fields of `Evidence` that hold bets."""

UNITS_PER_NAT = 1000
"""Gains are whole thousandths of a nat, so that their sums are exact on every machine."""


UNITS_MAX = 10**12
"""The most that a bet can be said to have gained."""


def rounded(nats: float) -> int:
    """Whole thousandths of a nat, rounded down, which keeps a capital a supermartingale."""
    return math.floor(nats * UNITS_PER_NAT)


def log_sum(first: float, second: float) -> float:
    """log(exp(first) + exp(second))."""
    top = max(first, second)
    return top if top == -math.inf else top + math.log1p(math.exp(min(first, second) - top))


def log_mean(logs: Sequence[float]) -> float:
    """log of the mean of exp(logs); 0, the log of an untouched capital, if there are none."""
    if not logs:
        return 0.0
    top = max(logs)
    if top == -math.inf:
        return top
    return top + math.log(sum(math.exp(each - top) for each in logs) / len(logs))


@dataclass
class Capital:
    """One process's bets in one validator's log."""

    submissions: int = 0
    entered: list[float] = field(default_factory=list)
    """[bets] log of the capital entered so far, with its gains."""

    def add(self, bets: Sequence[int]) -> None:
        """Add the gains of the next submission's bets, in thousandths of a nat."""
        self.submissions += 1
        entry = -math.log(self.submissions * (self.submissions + 1))
        before = self.entered
        # At first, and after a validator's change of version. What was entered is then given up,
        # which only lowers the capital, so the bound on false evictions holds.
        if len(before) != len(bets):
            before = [-math.inf] * len(bets)
        self.entered = [
            log_sum(entered, entry) + bet / UNITS_PER_NAT
            for entered, bet in zip(before, bets, strict=True)
        ]

    def log_capitals(self) -> list[float]:
        """[bets] log of the capital, cash included."""
        cash = -math.log(self.submissions + 1)
        return [log_sum(entered, cash) for entered in self.entered]


@dataclass
class Capitals:
    """All processes of one worker in one validator's log."""

    of: dict[str, Capital] = field(default_factory=lambda: {name: Capital() for name in PROCESSES})

    def add(self, evidence: Evidence) -> None:
        """Add the evidence of the next verdict.

        A second opinion that confirms the first has no bets: each submission is bet on once."""
        if evidence.sampler:
            for name in PROCESSES:
                self.of[name].add(getattr(evidence, name))

    def sealed(self) -> list[SealedCapital]:
        """The capitals for a seal, in the order of `PROCESSES`; empty without a bet."""
        if not any(capital.submissions for capital in self.of.values()):
            return []
        return [
            SealedCapital(
                submissions=capital.submissions,
                entered=[
                    max(-UNITS_MAX, min(rounded(each), UNITS_MAX)) for each in capital.entered
                ],
            )
            for capital in self.of.values()
        ]

    @classmethod
    def unsealed(cls, sealed: Sequence[SealedCapital]) -> "Capitals":
        """Continue from a seal."""
        found = cls()
        for name, each in zip(PROCESSES, sealed, strict=False):
            entered = [units / UNITS_PER_NAT for units in each.entered]
            found.of[name] = Capital(each.submissions, entered)
        return found


_PLACES = (
    "SELECT p.worker, p.step, p.number, p.owner, p.position, e.entry FROM verdict_places p "
    "JOIN entries e ON e.owner = p.owner AND e.position = p.position"
)
_BY_NUMBER = "ORDER BY p.worker, p.step, p.number, p.owner, p.position"


class _Stored(msgspec.Struct, array_like=True, frozen=True):
    """The part of an `Authority` on which balances depend."""

    owner: str
    """The run's owners, with spaces between them."""
    validators: list[str]
    trusted: list[str]
    safety: float
    run: str
    observes: bool

    @property
    def authority(self) -> Authority:
        """The same, with a window that balances do not depend on."""
        rules = Rules(stake_steps=1, hold_steps=2, safety=self.safety, observes=self.observes)
        return Authority(self.owner.split(), self.validators, self.trusted, rules, self.run)


def encoded(authority: Authority) -> bytes:
    """The part of an authority on which the tables depend, as stored."""
    return msgspec.msgpack.encode(
        _Stored(
            " ".join(authority.owners),
            list(authority.validators),
            list(authority.trusted),
            authority.rules.safety,
            authority.run,
            authority.rules.observes,
        )
    )


def stored(connection: sqlite3.Connection) -> Authority:
    """The authority that the tables follow."""
    row = connection.execute("SELECT raw FROM authority").fetchone()
    return msgspec.msgpack.decode(row[0], type=_Stored).authority


def follow(connection: sqlite3.Connection, raw: bytes) -> None:
    """Let the tables follow an encoded authority; compute them again if it is another one."""
    held = connection.execute("SELECT raw FROM authority").fetchone()
    if held is not None and held[0] == raw:
        return
    for table in ("authority", "balances"):
        connection.execute(f"DELETE FROM {table}")
    connection.execute("INSERT INTO authority (raw) VALUES (?)", (raw,))
    authority = stored(connection)
    _settle_all(connection, connection.execute(f"{_PLACES} {_BY_NUMBER}"), authority, Frontier())


def derive(connection: sqlite3.Connection, owner: str, position: int, entry: Judged) -> None:
    """Update the tables with a verdict of `owner`'s log; does nothing if they contain it."""
    number = (entry.worker, entry.step, entry.number)
    before = _records(connection, number)
    added = connection.execute(
        "INSERT OR IGNORE INTO verdict_places (worker, step, number, owner, position) "
        "VALUES (?, ?, ?, ?, ?)",
        (*number, owner, position),
    )
    if added.rowcount:
        after = [*before, Record(owner, position, entry)]
        _settle(connection, entry.step, before, after, stored(connection))


def _records(connection: sqlite3.Connection, number: tuple[str, int, int]) -> list[Record]:
    of_number = "WHERE p.worker = ? AND p.step = ? AND p.number = ?"
    rows = connection.execute(f"{_PLACES} {of_number} {_BY_NUMBER}", number)
    return [Record(owner, position, decode(raw)) for *_, owner, position, raw in rows]


def forget(connection: sqlite3.Connection, sealed: Frontier) -> None:
    """Delete the balances of sealed submissions.

    A step that a rollback repeats has verdicts in both lineages, of which one may be sealed."""
    connection.execute("DELETE FROM balances WHERE step <= ?", (sealed.step,))
    rows = connection.execute(f"{_PLACES} WHERE p.step <= ? {_BY_NUMBER}", (sealed.step,))
    _settle_all(connection, rows, stored(connection), sealed)


def _settle_all(
    connection: sqlite3.Connection,
    rows: Iterable[tuple[Any, ...]],
    authority: Authority,
    sealed: Frontier,
) -> None:
    """Write what the verdicts on each number decide, without those on sealed submissions."""
    for (_, step, _), group in groupby(rows, key=lambda row: row[:3]):
        records = [Record(owner, position, decode(raw)) for *_, owner, position, raw in group]
        kept = [record for record in records if not sealed.covers(_judged(record))]
        if kept:
            _settle(connection, step, [], kept, authority)


def _settle(
    connection: sqlite3.Connection,
    step: int,
    before: Sequence[Record],
    after: Sequence[Record],
    authority: Authority,
) -> None:
    """Add to the balance what the verdicts on one number decide, now that there are more."""
    change = _balance(after, authority) - _balance(before, authority)
    if change:
        connection.execute(
            "INSERT INTO balances (worker, step, tokens) VALUES (?, ?, ?) "
            "ON CONFLICT (worker, step) DO UPDATE SET tokens = tokens + excluded.tokens",
            (_judged(after[0]).worker, step, change),
        )


def _judged(record: Record) -> Judged:
    assert isinstance(record.entry, Judged)
    return record.entry


def _balance(records: Sequence[Record], authority: Authority) -> int:
    works = ledger_state(records, authority).works if records else {}
    return sum(sum(work.balances(authority.rules).values()) for work in works.values())
