"""A trusted peer's part in sealing epochs: the first one seals, the others countersign, all prune.

Nothing here is on the path of a step, so everything happens at the next look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

import trio

from swarm.events import Events
from swarm.ledger import epochs, sealing
from swarm.ledger.entries import Sealed
from swarm.ledger.sealing import Books, FalseSeal, Place, Seals
from swarm.ledger.state import Authority, Frontier
from swarm.node.node import Node
from swarm.run.run import Run
from swarm.world import Database

LOOK_SECONDS = 60.0
"""Time between two looks at the logs."""

UNSEALED_SECONDS = 900.0
"""Time after which this peer reports that a seal which is due, or which it has made itself, is not
made by most; also the time between two such reports."""

Append = Callable[[Callable[[], Awaitable[tuple[range, Sealed]]]], Awaitable[Sealed]]
"""Appends a block to the own log in its turn."""


@dataclass(frozen=True)
class _Awaited:
    """An epoch that is not sealed, by whom, and why their seal of it does not count."""

    epoch: int
    missing: Sequence[str]
    reason: str = ""


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
        self._world = node.world
        self._events: Events = node.events
        self._books = Books(database, node.peer_id)
        self._newest = newest
        self._append = append
        self._accused: set[tuple[str, int]] = set()
        """(owner, epoch) of false seals that were reported."""
        self._waiting: tuple[int, float] | None = None
        """The epoch that most have not sealed, and since when, or when this peer said so."""

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
                await self._follow(authority)
        except FalseSeal as false:
            self._accuse(false)
        await self._prune(authority)
        self._complain(authority)

    async def _seal(self, authority: Authority) -> None:
        """Seal what is due as the first trusted peer: what others have sealed already if most may
        still agree on it (an earlier first peer began), else all that is final."""
        seals = self._books.seals()
        last = sealing.newest_agreed(seals, authority.trusted)
        number, held = self._after(last)
        mine = [place for place in seals.get(self._me, ()) if place.epoch >= number]
        entries = self._run.manifest.limits.epoch_entries
        if not entries or not all(sealing.is_lost(seals, p, authority) for p in mine):
            return  # the others have not sealed the last one yet
        for place in sealing.adoptable(seals, number, authority):
            if (place.owner, number) in self._accused:
                continue
            covered = {log.owner: log.size for log in place.says.logs}
            due = self._books.growth(covered, held, seals) >= entries
            if due and await self._countersign(place, seals, authority):
                return
        if self._books.growth(self._books.sizes(authority.trusted), held, seals) < entries:
            return
        frontier = self._final(authority)
        if not _is_later(frontier, held):
            return  # nothing new is final; after a rollback, not before the run is as far again
        await self._write(lambda: self._books.seal(number, frontier, authority, last))

    async def _follow(self, authority: Authority) -> None:
        """Seal what the first trusted peer has sealed last."""
        seals = self._books.seals()
        if theirs := seals.get(authority.trusted[0]):
            await self._countersign(theirs[-1], seals, authority)

    async def _countersign(self, place: Place, seals: Seals, authority: Authority) -> bool:
        """Seal what another has sealed, if this peer can check it and may; returns whether it did.

        Raises `FalseSeal`.
        """
        if not sealing.may_follow(seals, self._me, place, authority):
            return False
        previous = sealing.newest_agreed(seals, authority.trusted, before=place.epoch)
        if self._objection(place, previous, authority):
            return False
        await self._write(lambda: self._books.countersign(place, previous, authority))
        return True

    def _objection(self, place: Place, previous: Place | None, authority: Authority) -> str:
        """Why this peer cannot check another's seal, which is to follow a `previous` one, or not
        yet; empty if it can."""
        seal, final = place.says, self._final(authority)
        number, held = self._after(previous)
        if seal.rules != epochs.rules_digest(authority):
            return "it rests on other rules than the manifest's"
        if sorted(authority.trusted) != [log.owner for log in seal.logs]:
            return "it covers the logs of other trusted peers than the manifest's"
        if seal.epoch != number:
            return f"the next epoch is {number}"
        if final.lineage < seal.lineage or final.step < seal.step:
            return f"it covers steps up to {seal.step}, and credit is final here up to {final.step}"
        if not _is_later(epochs.frontier_of(seal), held):
            return f"it covers no later step than epoch {number - 1}"
        if not all(self._books.holds(log) for log in seal.logs):
            return "this peer does not hold all entries that it covers"
        return ""

    def _complain(self, authority: Authority) -> None:
        """Report whom an epoch waits for that most have not sealed for a while."""
        seals, now = self._books.seals(), self._world.now()
        awaited = self._awaited(seals, authority)
        if awaited is None:
            self._waiting = None
        elif self._waiting is None or self._waiting[0] != awaited.epoch:
            self._waiting = awaited.epoch, now
        elif now >= self._waiting[1] + UNSEALED_SECONDS:
            self._waiting = awaited.epoch, now
            self._events.emit("ledger.not_sealed", **asdict(awaited))

    def _awaited(self, seals: Seals, authority: Authority) -> _Awaited | None:
        """The seal that this peer has made and most have not, or that is due and that this peer
        has not made; None without."""
        first, trusted = authority.trusted[0], authority.trusted
        if mine := seals.get(self._me):
            last = mine[-1]
            # Another one follows a lost one.
            if not sealing.agreed(seals, last, trusted) and not sealing.is_lost(
                seals, last, authority
            ):
                done = sealing.voters(seals, last.stated, trusted)
                return _Awaited(last.epoch, [peer for peer in trusted if peer not in done])
        previous = sealing.newest_agreed(seals, trusted)
        number, held = self._after(previous)
        entries = self._run.manifest.limits.epoch_entries
        if (
            first == self._me
            or not entries
            or self._books.growth(self._books.sizes(trusted), held, seals) < entries
            or not _is_later(self._final(authority), held)
        ):
            return None
        theirs = seals.get(first)
        if not theirs or theirs[-1].epoch < number:
            return _Awaited(number, [first])
        objection = self._objection(theirs[-1], previous, authority)
        said = f"its seal of epoch {theirs[-1].epoch} does not count here: {objection}"
        return _Awaited(number, [first], said if objection else "")

    def _after(self, previous: Place | None) -> tuple[int, Sealed | None]:
        """The number of the epoch after a seal, and that seal; 0 and None for the first epoch."""
        if previous is None:
            return 0, None
        return previous.epoch + 1, self._books.seal_at(previous)

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
            if not sealing.prunable(seals, own, authority.trusted):
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


def _is_later(frontier: Frontier, held: Sealed | None) -> bool:
    """Whether a seal up to `frontier` may follow the one held: it covers all that this covers."""
    before = epochs.frontier_of(held) if held is not None else Frontier(0, 0)
    return frontier.step > before.step and frontier.lineage >= before.lineage
