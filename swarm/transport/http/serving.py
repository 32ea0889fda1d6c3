"""What piece servers over HTTP and streams share: connections (`swarm.transport.room`)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, cast

from swarm.transport import BlobReference, BulkService, Refused, Traffic, room
from swarm.transport.http.pace import Uplink
from swarm.wire.identity import PeerId
from swarm.world import Disk, Sink


class Guest(room.Known, Protocol):
    """A connection of the table. A stranger's `peer` is empty."""

    @property
    def leaving(self) -> bool:
        """Whether it is being closed."""

    def leave(self) -> None:
        """Close the connection, whatever it is doing."""


class Table:
    """Says who may stay. Each connection competes with strangers only until its peer has proved its
    identity, then with those of admitted peers."""

    def __init__(self, sizes: room.Sizes, per_peer: int) -> None:
        """`per_peer`: connections on which one peer may have proved its identity."""
        self._sizes = sizes
        self._per_peer = per_peer
        self._known = max(1, sizes.connections - sizes.for_strangers)
        self._door = room.Door(sizes)
        self._guests: dict[Guest, room.Caller] = {}

    @contextmanager
    def entered(self, guest: Guest, host: str) -> Iterator[room.Caller]:
        """Hold a place until the block ends, within the caller's `handshake` scope: cancelled if
        others need the place more before the first request is complete. Raises `NoRoom`."""
        with self._door.entered(host) as (caller, displaced):
            if displaced is not None:
                cast(Guest, displaced).leave()
            self._make_room(guest)
            self._guests[guest] = caller
            caller.connection = guest
            try:
                yield caller
            finally:
                del self._guests[guest]

    def prove(self, guest: Guest) -> None:
        """Give a connection, whose peer has just proved its identity, a place among those of
        admitted peers. Raises `NoRoom`."""
        known = [each for each in self._staying() if each.vouched and each is not guest]
        own = [each for each in known if each.peer == guest.peer]
        if len(own) >= self._per_peer:
            idle = [each for each in own if each.idle]
            if not idle:
                raise room.NoRoom("too many connections of this peer")
            min(idle, key=lambda each: each.used_at).leave()
        elif len(known) >= self._known:
            victim = room.most_crowding(known, guest)
            if victim is None:
                raise room.NoRoom("too many connections of admitted peers")
            victim.leave()
        if guest in self._guests:
            self._door.give_back(self._guests[guest])

    def _make_room(self, guest: Guest) -> None:
        if len(self._guests) < min(self._sizes.connections, self._sizes.strangers):
            return  # each of a flood comes here
        held = self._staying()
        if not room.is_full(held, self._sizes.connections, self._sizes.strangers):
            return
        useless = room.least_useful(held, guest.origin, self._sizes.for_strangers)
        # A crowd of one network, as that of a mirror's clients, is served to its end, in turn.
        if useless is None or (not useless.idle and useless.origin.range == guest.origin.range):
            raise room.NoRoom("too many connections")
        useless.leave()

    def _staying(self) -> list[Guest]:
        return [guest for guest in self._guests if not guest.leaving]


class FinalRefusal(Refused):
    """A refusal after which an HTTP connection ends."""


@dataclass(frozen=True)
class Serving:
    """The objects that every answer of one peer's piece plane needs."""

    peer_id: PeerId
    disk: Disk
    get_service: Callable[[], BulkService | None]
    traffic: Traffic = field(default_factory=Traffic)
    uplink: Uplink = field(default_factory=Uplink)
    """Limits the rate of all blobs sent."""
    trusts: Callable[[PeerId], bool] = lambda peer: False
    """Whether a peer is trusted, so that admitted peers cannot take its connections."""
    pages: Mapping[bytes, bytes] = field(default_factory=dict)
    """Small documents by path, served to every client; only over HTTP."""

    def service(self) -> BulkService:
        service = self.get_service()
        if service is None:
            raise Refused(404, "this peer serves no blobs")
        return service


async def commit_push(reference: BlobReference, sink: Sink) -> None:
    """Check a pushed blob and commit it. Raises `Refused`."""
    piece = sink.finish()
    if not piece.verify(reference.digest):
        raise Refused(422, "the bytes have another hash")
    await sink.commit(piece)
