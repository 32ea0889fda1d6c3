"""A trusted peer's part in sealing epochs: the first one seals, the others countersign, all prune.

Nothing here is on the path of a step, so everything happens at the next look."""

from collections.abc import Awaitable, Callable

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
        self._world = node.world
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
                await self._follow(authority)
        except FalseSeal as false:
            self._accuse(false)
        await self._prune(authority)

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
        seals = self._books.seals()
        if theirs := seals.get(authority.trusted[0]):
            await self._countersign(theirs[-1], seals, authority)

    async def _countersign(self, place: Place, seals: Seals, authority: Authority) -> bool:
        """Seal what another has sealed, if this peer may; returns whether. Raises `FalseSeal`."""
        if not sealing.may_follow(seals, self._me, place, authority):
            return False
        previous = sealing.newest_agreed(seals, authority.trusted, before=place.epoch)
        if not self._can_check(place, previous, authority):
            return False
        await self._write(lambda: self._books.countersign(place, previous, authority))
        return True

    def _can_check(self, place: Place, previous: Place | None, authority: Authority) -> bool:
        """Whether this peer can check another's seal now, which is to follow a `previous` one: it
        rests on the manifest's rules, covers the logs of its trusted peers and a later step, and
        this peer holds all entries that it covers, whose credit is final here, too."""
        seal, final = place.says, self._final(authority)
        number, held = self._after(previous)
        return (
            seal.rules == epochs.rules_digest(authority)
            and sorted(authority.trusted) == [log.owner for log in seal.logs]
            and seal.epoch == number
            and final.lineage >= seal.lineage
            and final.step >= seal.step
            and _is_later(epochs.frontier_of(seal), held)
            and all(self._books.holds(log) for log in seal.logs)
        )

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
