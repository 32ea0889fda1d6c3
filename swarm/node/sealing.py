"""A trusted peer's part in sealing epochs: the first one seals, the others countersign, all prune.

Nothing here is on the path of a step, so everything happens at the next look.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import trio

from swarm.events import Events
from swarm.ledger import epochs
from swarm.ledger.entries import Sealed
from swarm.ledger.sealing import Books, FalseSeal, Place
from swarm.ledger.state import Authority, Frontier
from swarm.node.node import Node
from swarm.run.run import Run
from swarm.world import Database

LOOK_SECONDS = 60.0
"""Time between two looks at the logs."""

T = TypeVar("T")
Append = Callable[[Callable[[], Awaitable[tuple[range, Sealed]]]], Awaitable[Sealed]]
"""Appends a block to the own log in its turn."""


class Sealing:
    """Seals and prunes the logs that one trusted peer holds."""

    def __init__(
        self,
        node: Node,
        run: Run,
        database: Database,
        *,
        newest: Callable[[], tuple[int, int]],
        append: Append,
    ) -> None:
        """`newest` is the newest known (lineage, step)."""
        self._me = node.peer_id
        self._run = run
        self._events: Events = node.events
        self._books = Books(database, node.peer_id)
        self._newest = newest
        self._append = append
        self._accused: set[tuple[str, int]] = set()
        """(owner, epoch) of false seals that were reported."""

    async def run(self) -> None:
        """Look at the logs from time to time, until cancelled."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Seal, countersign and prune what is due now."""
        authority = Authority.of(self._run.owners, self._run.manifest)
        try:
            if authority.trusted[0] == self._me:
                await self._seal(authority)
            else:
                await self._countersign(authority)
        except FalseSeal as false:
            self._accuse(false)
        await self._prune(authority)

    async def _seal(self, authority: Authority) -> None:
        seals = self._books.seals()
        last, own = _newest_agreed(seals, authority.trusted), _last(seals, self._me)
        entries = self._run.manifest.limits.epoch_entries
        if not entries or (own is not None and (last is None or own.epoch > last.epoch)):
            return  # the others have not sealed the last one yet
        held = self._books.seal_at(last) if last is not None else None
        if self._books.grown_since(held, authority.trusted) < entries:
            return
        frontier = self._final(authority)
        if not _is_later(frontier, held):
            return  # nothing new is final; after a rollback, not before the run is as far again
        number = last.epoch + 1 if last is not None else 0
        await self._write(lambda: self._books.seal(number, frontier, authority, last))

    async def _countersign(self, authority: Authority) -> None:
        """Seal what the first trusted peer has sealed, once this peer can check it."""
        seals = self._books.seals()
        theirs, mine = seals.get(authority.trusted[0], []), _last(seals, self._me)
        if not theirs or (mine is not None and mine.epoch >= theirs[-1].epoch):
            return
        place = theirs[-1]
        seal, final = self._books.seal_at(place), self._final(authority)
        previous = _newest_agreed(seals, authority.trusted, before=seal.epoch)
        held = self._books.seal_at(previous) if previous is not None else None
        may = (
            seal.rules == epochs.rules_digest(authority)
            and sorted(authority.trusted) == [log.owner for log in seal.logs]
            and final.lineage >= seal.lineage
            and final.step >= seal.step
            and _is_later(epochs.frontier_of(seal), held)
            and all(self._books.holds(log) for log in seal.logs)
        )
        if not may or seal.epoch != (previous.epoch + 1 if previous is not None else 0):
            return
        await self._write(lambda: self._books.countersign(place, previous, authority))

    def _final(self, authority: Authority) -> Frontier:
        """The newest submissions whose credit is final, as far as this peer knows."""
        lineage, newest = self._newest()
        return Frontier(lineage, newest - authority.rules.hold_steps)

    async def _write(self, work: Callable[[], Awaitable[tuple[range, Sealed]]]) -> None:
        seal = await self._append(work)
        self._events.emit("ledger.sealed", epoch=seal.epoch, step=seal.step)

    async def _prune(self, authority: Authority) -> None:
        seals = self._books.seals()
        for own in reversed(seals.get(self._me, [])):
            if not _prunable(seals, own, authority.trusted):
                continue
            for owner in authority.trusted:
                place = next((p for p in seals.get(owner, ()) if p.stated == own.stated), None)
                if place is None or (owner, own.epoch) in self._accused:
                    continue
                try:
                    pruned = await self._books.prune(place, own)
                except FalseSeal as false:
                    self._accuse(false)
                    continue
                if pruned:
                    self._events.emit("ledger.pruned", owner=owner, epoch=own.epoch, entries=pruned)
            return

    def _accuse(self, false: FalseSeal) -> None:
        if (false.owner, false.epoch) not in self._accused:
            self._accused.add((false.owner, false.epoch))
            self._events.emit(
                "ledger.false_seal", owner=false.owner, epoch=false.epoch, reason=str(false)
            )


Seals = Mapping[str, Sequence[Place]]


def _is_later(frontier: Frontier, held: Sealed | None) -> bool:
    """Whether a seal up to `frontier` may follow the one held: it covers all that this covers."""
    before = epochs.frontier_of(held) if held is not None else Frontier(0, 0)
    return frontier.step > before.step and frontier.lineage >= before.lineage


def _last(seals: Seals, owner: str) -> Place | None:
    return seals[owner][-1] if owner in seals else None


def _votes(seals: Seals, stated: bytes, trusted: Sequence[str]) -> int:
    """How many trusted peers have sealed the same."""
    return sum(any(p.stated == stated for p in seals.get(owner, ())) for owner in trusted)


def _agreed(seals: Seals, place: Place, trusted: Sequence[str]) -> bool:
    return _votes(seals, place.stated, trusted) > len(trusted) // 2


def _newest_agreed(seals: Seals, trusted: Sequence[str], before: float = math.inf) -> Place | None:
    """The newest seal, in any log, that more than half of the trusted peers have made, of an epoch
    `before` another."""
    places = [place for owner in trusted for place in seals.get(owner, ())]
    agreed = [p for p in places if p.epoch < before and _agreed(seals, p, trusted)]
    return max(agreed, key=lambda place: place.epoch, default=None)


def _prunable(seals: Seals, own: Place, trusted: Sequence[str]) -> bool:
    """Whether what an epoch seals may be pruned: all trusted peers have sealed it, or more than
    half have sealed it and a later one."""
    if _votes(seals, own.stated, trusted) == len(trusted):
        return True
    later = [place for log in seals.values() for place in log if place.epoch > own.epoch]
    return _agreed(seals, own, trusted) and any(_agreed(seals, p, trusted) for p in later)
