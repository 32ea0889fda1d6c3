"""Copies of the trusted peers' logs: each mirrors the others' logs, and restores its own."""

import math
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import trio

from swarm.errors import PeerError
from swarm.gossip.gossip import Gossip
from swarm.ledger.client import LedgerClient, open_ledger
from swarm.ledger.derived import deriving
from swarm.ledger.entries import decode, expulsions_in
from swarm.ledger.log import Log
from swarm.ledger.mirror import Fork, LogMirror
from swarm.ledger.wire import Origin
from swarm.node.node import Node
from swarm.run.run import Run
from swarm.wire.envelope import Dropped, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import LogHead
from swarm.world import Database
from swarm.world.observable import Observable

RESTORE_SECONDS = 2.0
"""Time in which a starting trusted peer looks for longer copies of its own log."""

RESTORE_RATE = 100.0
"""Entries per second below which a peer that hands over this peer's log is given up for the next
one, after `RETRY_SECONDS`; what it has sent stays. A peer that works sends thousands."""

COPIES_SECONDS = 600.0
"""Time for which a trusted peer whose home has no log waits for the others to say whether they have
a copy. Long enough to start the peers of a run one after another by hand."""

NEW_RUN_SECONDS = 3600.0
"""Age of a run's first manifest up to which nobody is expected to have a log of it."""

CATCH_UP_SECONDS = 10.0
"""Time in which a peer looks for copies of the logs of peers that are away."""

RETRY_SECONDS = 5.0
"""Pause before the next attempt to mirror a trusted peer's log, or to ask for copies of the own."""


_NOT_COPIED = (PeerError, Dropped, ValueError, sqlite3.IntegrityError)
"""Errors of copying one log that end nothing: its owner is away, or what it says cannot be stored.
A damaged database of this peer's own is none of them."""


class LogCopies:
    """Mirrors the other trusted peers' logs, and restores this peer's log from their mirrors."""

    def __init__(
        self,
        node: Node,
        run: Run,
        gossip: Gossip,
        database: Database,
        log: Log,
        *,
        on_expulsion: Callable[[bytes], None],
    ) -> None:
        """`log` is this peer's own. `on_expulsion` gets evictions and reinstatements of mirrors."""
        self._node = node
        self._run = run
        self._database = database
        self._log = log
        self._on_expulsion = on_expulsion
        self._heads: dict[str, Observable[Envelope]] = {}
        """Newest known head of each other trusted peer's log."""
        self._heard, self._owners = trio.open_memory_channel[str](math.inf)
        """Peers in `_heads` whose logs `follow` does not follow yet."""
        self._pulling: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)
        """Held while the copy of a log is extended."""
        gossip.listen(LogHead, self._on_head)

    async def restore(self) -> None:
        """Restore entries of this log that other trusted peers hold and this disk lacks.

        A peer whose home has no log waits until more than half of the others have said whether
        they have a copy, for a second log under its key would be a fork; not in a run that is new,
        nor with `new_log` in its settings.

        Raises `Fork` if this disk's log contradicts a head that this peer signed earlier, and
        `PeerError` if other peers have more entries of it and do not hand them over, or too few
        answer within `COPIES_SECONDS`."""
        others = self._others()
        answers: dict[PeerId, Envelope | None] = {}
        deadline = trio.current_time() + COPIES_SECONDS
        told = False
        while True:
            await self._ask_for_heads([each for each in others if each not in answers], answers)
            await self._take({peer: head for peer, head in answers.items() if head is not None})
            enough = len(answers) > len(others) // 2 or not others
            if enough or self._log.has_begun() or self._may_begin():
                await self._log.begin()
                return
            silent = [peer for peer in others if peer not in answers]
            if not told:
                told = True
                self._node.events.emit(
                    "ledger.waits_for_copies", remotes=silent, seconds=COPIES_SECONDS
                )
            if trio.current_time() + RETRY_SECONDS > deadline:
                raise PeerError(
                    f"this home has no log of this peer, and {', '.join(silent)} did not say "
                    f"within {COPIES_SECONDS:g} s whether they have a copy; start it again once "
                    "they are up, or with --new-log if this peer has never taken part in the run"
                )
            await trio.sleep(RETRY_SECONDS)

    def _may_begin(self) -> bool:
        """Whether nobody can have a log of this peer: the run is new, or the user says so."""
        signed = self._run.manifest_envelope.body.issued_ms / 1000
        is_new = self._node.world.wall_time() < signed + NEW_RUN_SECONDS
        return self._node.settings.new_log or (is_new and self._run.manifest.version == 1)

    async def _ask_for_heads(
        self, others: Sequence[PeerId], answers: dict[PeerId, Envelope | None]
    ) -> None:
        """Ask peers for their newest head of this log; those that have no copy answer None."""

        async def ask(other: PeerId) -> None:
            with suppress(PeerError, Dropped):  # it is down; another peer may answer
                async with self._reached(other) as client:
                    answers[other] = await client.head(self._node.peer_id)

        await _at_once(ask, others, RESTORE_SECONDS)

    def _others(self) -> list[PeerId]:
        return [PeerId(o) for o in self._run.manifest.trusted_ids() if o != self._node.peer_id]

    @asynccontextmanager
    async def _reached(self, other: PeerId) -> AsyncIterator[LedgerClient]:
        await self._node.reach(other)
        async with open_ledger(self._node.transport, other) as client:
            yield client

    async def _take(self, found: Mapping[PeerId, Envelope]) -> None:
        """Restore the entries up to the newest of these heads of this log, by who holds them."""
        held = self._log.size()
        for other, head in sorted(found.items()):
            signed = head.expect(LogHead)
            if (
                self._log.start() <= signed.size <= held
                and self._log.root(signed.size) != signed.root
            ):
                raise Fork(
                    f"this peer's own log is not the one it signed a head of {signed.size} "
                    f"entries for, which {other} holds; restore ledger.sqlite from a backup, or "
                    "move it away to have it restored from other trusted peers"
                )
        fork: Fork | None = None
        for other in sorted(found, key=lambda peer: (-_size(found[peer]), peer)):
            if _size(found[other]) <= self._log.size():
                break
            seconds = RETRY_SECONDS + (_size(found[other]) - self._log.size()) / RESTORE_RATE
            try:
                with trio.fail_after(seconds):
                    async with open_ledger(self._node.transport, other) as client:
                        await self._pull(client, found[other])
            except trio.TooSlowError:
                reason = f"it did not send this peer's log within {seconds:.0f} s"
                self._node.events.emit("ledger.restore_failed", remote=other, reason=reason)
            except (Fork, *_NOT_COPIED) as error:  # another one may have the right entries
                fork = error if isinstance(error, Fork) else fork
                self._node.events.emit("ledger.restore_failed", remote=other, reason=str(error))
        known = max((_size(head) for head in found.values()), default=0)
        if self._log.size() < known:
            raise fork or PeerError(
                f"{known - self._log.size()} entries of this peer's log are lost here, and none "
                f"of {', '.join(sorted(found))} provided them; start it again once they answer"
            )
        if self._log.size() > held:
            self._node.events.emit("ledger.restored", entries=self._log.size() - held)

    async def catch_up(self, owners: Sequence[str]) -> None:
        """Extend the copies of these logs from those of all trusted peers that can be reached now:
        the owner of a log may be away for good."""

        async def ask(other: PeerId) -> None:
            try:
                async with self._reached(other) as client:
                    for owner in owners:
                        head = await client.head(owner) if owner != self._node.peer_id else None
                        if head is not None:
                            await self._pull(client, head)
            except (Fork, *_NOT_COPIED) as error:
                self._node.events.emit("ledger.mirror_failed", owner=other, reason=str(error))

        await _at_once(ask, self._others(), CATCH_UP_SECONDS)

    def _on_head(self, envelope: Envelope) -> None:
        owner = envelope.sender
        if owner == self._node.peer_id:
            return
        if owner in self._heads:
            self._heads[owner].set(envelope)
        else:
            self._heads[owner] = Observable(envelope)
            self._heard.send_nowait(owner)

    async def follow(self) -> None:
        """Mirror the logs of all trusted peers that announce heads, until cancelled."""
        async with trio.open_nursery() as nursery:
            async for owner in self._owners:
                nursery.start_soon(self._follow, owner)

    async def _follow(self, owner: str) -> None:
        heads = self._heads[owner]
        while True:
            head = heads.value
            try:
                async with self._reached(PeerId(owner)) as client:
                    await self._pull(client, head)
            except Fork as fork:
                if fork.evidence is not None:
                    await LogMirror(self._database, owner).keep(fork.evidence)
                self._node.events.emit("ledger.forked", owner=owner, reason=str(fork))
            except _NOT_COPIED as error:
                self._node.events.emit("ledger.mirror_failed", owner=owner, reason=str(error))
                await trio.sleep(RETRY_SECONDS)
                continue
            if heads.value is head:
                await heads.wait_change()

    async def _pull(self, client: LedgerClient, head: Envelope) -> None:
        """Extend the copy of a log up to a signed head. Raises `Fork` and `PeerError`."""
        async with self._pulling[head.sender]:
            await self._pull_next(client, head)

    async def _pull_next(self, client: LedgerClient, head: Envelope) -> None:
        owner = head.sender
        mirror = LogMirror(self._database, owner)
        size = _size(head)
        held = mirror.log.size()
        if held >= size:
            await mirror.extend(head, [])
        while held < size:
            raws, origin = await client.entries_or_origin(owner, held, size - held)
            if origin is not None:
                if held:
                    await self._vouched(owner, origin)
                self._node.events.emit("ledger.skipped", owner=owner, entries=origin.start - held)
                held = origin.start
            try:
                entries = [decode(raw) for raw in raws]
            except ValueError as error:
                raise PeerError(f"{owner} has {error} in its log") from error
            held += len(raws)
            proof = await client.consistency(owner, held, size) if held < size else []
            derive = deriving(owner, entries, anew=origin is not None)
            await mirror.extend(head, raws, proof, derive, origin)
            for raw in expulsions_in(entries):
                self._on_expulsion(raw)

    async def _vouched(self, owner: str, origin: Origin) -> None:
        """Return if more than half of the trusted peers, the owner of a log among them, say that it
        begins here. Else `PeerError`: entries that this peer holds cannot be compared with a log
        that begins after them, so its owner alone could put another one in its place."""
        trusted = self._run.manifest.trusted_ids()
        same = [owner]

        async def ask(other: PeerId) -> None:
            with suppress(PeerError, Dropped):
                async with self._reached(other) as client:
                    if await client.origin(owner) == origin:
                        same.append(other)

        await _at_once(ask, [o for o in self._others() if o != owner], CATCH_UP_SECONDS)
        if len(same) <= len(trusted) // 2:
            raise PeerError(
                f"entries of the log of {owner} that are not here are pruned before "
                f"{origin.start}, and {len(same)} of {len(trusted)} trusted peers say so where "
                "more than half must; this peer keeps its copy. If those that know are gone for "
                "good, move ledger.sqlite away, and it is restored from those that are left"
            )


async def _at_once(
    ask: Callable[[PeerId], Awaitable[None]], others: Sequence[PeerId], seconds: float
) -> None:
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for other in others:
                nursery.start_soon(ask, other)


def _size(head: Envelope) -> int:
    return head.expect(LogHead).size
