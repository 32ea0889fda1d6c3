"""Admission of connections: no address range can take all of them.

Handshakes compete only with handshakes, proved identities with each other. When all slots are
taken, one of the address range that has most is closed for the newcomer, so that a flood displaces
itself. Unused ones are closed before (`surplus`)."""

import functools
import ipaddress
import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import trio

from swarm.transport import limits
from swarm.transport.rates import TokenBuckets

FILES_BESIDE_CONNECTIONS = 2560
"""Other files that a peer may have open: connections of the bulk plane, blobs, its children."""

CONNECTIONS_FOR_STRANGERS = 128
"""Connections that strangers keep when trusted and admitted peers need all the others. These others
are reserved for trusted and admitted peers as soon as they need them."""

CONNECTIONS_PER_ADDRESS_MAX = 64
"""Inbound connections of strangers from one IPv4 address or one /64 of IPv6. Admitted peers do not
count, so that a lab behind one NAT fits whatever its size, and a flood does not."""

HANDSHAKES_MAX = 64
"""Handshakes at once; beyond it the oldest of the most crowded address range is cancelled."""

HANDSHAKES_PER_SECOND = 16.0
"""From one /24 (IPv6: /48), on average: each takes 3 ms of computing."""

EXPELLED_SECONDS = 1.0
"""What a connection closed for its streams' bytes or number costs in its network's handshakes."""

EXPELLED_SECONDS_MAX = 10.0
"""Longest time that a network waits for such connections before it may connect again."""

HANDSHAKES_BURST = 128.0
"""From one /24 (IPv6: /48), at once: a hundred peers of one network that start together."""


def connections_max() -> int:
    """The number of connections this process may hold: `CONNECTIONS_MAX`, or fewer if its limit on
    open files is too low. That limit, often 1,024, is first raised as far as the system allows."""
    wanted = limits.CONNECTIONS_MAX + HANDSHAKES_MAX + FILES_BESIDE_CONNECTIONS
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        limit = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    missing = 0 if limit == resource.RLIM_INFINITY else max(0, wanted - limit)
    return max(1, limits.CONNECTIONS_MAX - missing)


@dataclass(frozen=True)
class Origin:
    """The network that a connection comes from."""

    address: str
    """The smallest unit that one owner has to itself: an IPv4 address, a /64 of IPv6."""
    range: str
    """A unit that one owner gets easily: a /24, a /48."""

    @functools.cached_property
    def public_range(self) -> str:
        """The range; empty on loopback and in private networks, where it is not unique."""
        try:
            return self.range if ipaddress.ip_network(self.range).is_global else ""
        except ValueError:
            return ""


@functools.lru_cache(maxsize=4096)
def origin_of(host: str) -> Origin:
    """The origin of an IP address; other text is its own origin."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return Origin(host, host)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return Origin(_network(ip, 64), _network(ip, 48))
        ip = ip.ipv4_mapped
    return Origin(str(ip), _network(ip, 24))


def _network(ip: ipaddress.IPv4Address | ipaddress.IPv6Address, bits: int) -> str:
    return str(ipaddress.ip_network((ip, bits), strict=False))


class Held(Protocol):
    """A connection, with the properties that decide whether it is kept."""

    @property
    def origin(self) -> Origin: ...

    @property
    def used_at(self) -> float:
        """When it was opened, or a stream of it last began or ended."""

    @property
    def vouched(self) -> bool:
        """Whether its peer is trusted, admitted or otherwise known."""

    @property
    def idle(self) -> bool:
        """Whether it carries no stream, is too old for a first one, and no relay reserved it."""


class Known(Held, Protocol):
    """A connection whose peer has proved its identity."""

    @property
    def peer(self) -> str: ...

    @property
    def trusted(self) -> bool:
        """Whether its peer is trusted, not only admitted: many identities may be admitted."""


_Held = TypeVar("_Held", bound=Held)
_Known = TypeVar("_Known", bound=Known)


@dataclass(frozen=True)
class Sizes:
    """How many connections one plane of a peer has, and of whom."""

    connections: int
    strangers: int
    """Of these, connections of strangers."""
    for_strangers: int
    """Connections that strangers keep whatever known peers need."""
    per_address: int
    """Connections of strangers from one IPv4 address or one /64 of IPv6."""
    handshakes: int
    """At once; beyond it the oldest of the most crowded range is cancelled."""
    handshakes_per_second: float
    """From one /24 (IPv6: /48), on average."""
    handshakes_burst: float


def _own_sizes() -> Sizes:
    """The connections of libp2p. Read when they are needed, as tests have fewer."""
    return Sizes(
        limits.CONNECTIONS_MAX,
        limits.CONNECTIONS_OF_STRANGERS_MAX,
        CONNECTIONS_FOR_STRANGERS,
        CONNECTIONS_PER_ADDRESS_MAX,
        HANDSHAKES_MAX,
        HANDSHAKES_PER_SECOND,
        HANDSHAKES_BURST,
    )


def is_full(held: Sequence[_Held], most: int, strangers: int | None = None) -> bool:
    """Whether another connection needs room; of `most` in all, `strangers` are for strangers."""
    if len(held) >= most:
        return True
    strangers = limits.CONNECTIONS_OF_STRANGERS_MAX if strangers is None else strangers
    if len(held) < strangers:
        return False
    return sum(not c.vouched for c in held) >= strangers


def least_useful(
    held: Iterable[_Held], newcomer: Origin, for_strangers: int | None = None
) -> _Held | None:
    """The connection to close for `newcomer`, if any: a stranger's while they have `for_strangers`,
    else an idle one of a known peer, so that neither kind shuts the other out. First the most
    crowded range's, then an idle one, then the least recently used."""
    connections = list(held)
    candidates = [c for c in connections if not c.vouched]
    if len(candidates) < (CONNECTIONS_FOR_STRANGERS if for_strangers is None else for_strangers):
        candidates = [c for c in connections if c.vouched and c.idle] or candidates
    crowd = Counter(c.origin.range for c in candidates)
    crowd[newcomer.range] += 1
    return min(
        candidates, key=lambda c: (-crowd[c.origin.range], not c.idle, c.used_at), default=None
    )


def most_crowding(known: Iterable[_Known], newcomer: Known) -> _Known | None:
    """A known peer's connection to close for a known `newcomer`, if any; no trusted one's.

    First the range that has most, then an idle one, then the peer that has most: one owner's
    displace themselves. One in use is closed only for a trusted peer, or one whose range or itself
    has fewer, so that a crowd of one range is served to its end, in turn."""
    candidates = [c for c in known if not c.trusted]
    ranges = Counter(c.origin.range for c in candidates)
    peers = Counter(c.peer for c in candidates)
    ranges[newcomer.origin.range] += 1
    peers[newcomer.peer] += 1
    victim = min(
        candidates,
        key=lambda c: (-ranges[c.origin.range], not c.idle, -peers[c.peer], c.used_at),
        default=None,
    )
    if victim is None or victim.idle or newcomer.trusted:
        return victim
    fewer = ranges[newcomer.origin.range] < ranges[victim.origin.range]
    return victim if fewer or peers[newcomer.peer] < peers[victim.peer] else None


def kept_of(most: int) -> int:
    """How many of at most `most` connections a peer keeps that keeps as many as it can."""
    return most - int(most * limits.CONNECTIONS_SPARE_SHARE)


def surplus(held: Iterable[_Held], kept: int) -> list[_Held]:
    """The idle connections to close so that `kept` are left: strangers', as far as they keep some
    room, then the least recently used. It costs its peer no more than a new handshake."""
    connections = list(held)
    strangers = sum(not c.vouched for c in connections)
    beyond = max(len(connections) - kept, strangers - kept_of(limits.CONNECTIONS_OF_STRANGERS_MAX))
    if beyond <= 0:
        return []
    idle = [c for c in connections if c.idle]
    return sorted(idle, key=lambda c: (c.vouched, c.used_at))[:beyond]


class NoRoom(Exception):
    """A connection is refused before its handshake. Says why."""


@dataclass(eq=False)
class Caller:
    """An accepted connection, from acceptance to its end."""

    origin: Origin
    handshake: trio.CancelScope = field(default_factory=trio.CancelScope)
    shaking: bool = True
    connection: Held | None = None
    leaving: bool = False
    """Whether its connection is being closed for another."""
    given_back: bool = False
    """Whether its handshake does not count."""


class Door:
    """Bounds connections per address, and handshakes at once and per second."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        self._sizes = sizes = sizes or _own_sizes()
        self._callers: dict[Caller, None] = {}
        self._rates = TokenBuckets(
            sizes.handshakes_per_second, sizes.handshakes_burst, limits.CONNECTIONS_MAX
        )

    @contextmanager
    def entered(self, host: str) -> Iterator[tuple[Caller, Held | None]]:
        """Hold a slot until the block ends; also the connection to close for it. Raises `NoRoom`.
        Others' greater need cancels the caller's `handshake` scope."""
        caller = Caller(origin_of(host))
        displaced = self._displaced(caller.origin)
        if not self._rates.of(caller.origin.range).take(1, trio.current_time()):
            raise NoRoom(f"{caller.origin.range} connects too often")
        if displaced is not None:
            displaced.leaving = True
        self._callers[caller] = None
        self._make_room_to_shake()
        try:
            yield caller, None if displaced is None else displaced.connection
        finally:
            del self._callers[caller]

    def give_back(self, caller: Caller) -> None:
        """Do not count a handshake after all: its peer is known. A second time does nothing."""
        if not caller.given_back:
            caller.given_back = True
            self._rates.of(caller.origin.range).give_back(1)

    def shut(self, caller: Caller) -> None:
        """Keep a network out for a while, since a connection of it was closed for its streams."""
        rate, now = self._rates.of(caller.origin.range), trio.current_time()
        least = -EXPELLED_SECONDS_MAX * self._sizes.handshakes_per_second
        cost = EXPELLED_SECONDS * self._sizes.handshakes_per_second
        rate.borrow(min(cost, max(0.0, rate.left(now) - least)), now)

    def _displaced(self, origin: Origin) -> Caller | None:
        """The idle stranger of an address that came first, if one makes way, else `NoRoom`. One in
        use does not: where a hundred start on one busy machine, none would be served to its end."""
        strangers = [
            c
            for c in self._callers
            if c.origin.address == origin.address
            and not c.leaving
            and not (c.connection and c.connection.vouched)
        ]
        if len(strangers) < self._sizes.per_address:
            return None
        idle = (c for c in strangers if c.connection and c.connection.idle)
        served = next(idle, None)  # they are in the order of their arrival
        if served is None:
            raise NoRoom(f"{origin.address} has {len(strangers)} connections of strangers")
        return served

    def _make_room_to_shake(self) -> None:
        if len(self._callers) <= self._sizes.handshakes:
            return
        shaking = [c for c in self._callers if c.shaking]
        if len(shaking) > self._sizes.handshakes:
            crowd = Counter(c.origin.range for c in shaking)
            victim = max(shaking, key=lambda c: crowd[c.origin.range])  # the oldest of them
            victim.shaking = False
            victim.handshake.cancel()
