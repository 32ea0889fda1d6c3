"""Iterative lookups over disjoint paths (Kademlia; S/Kademlia, Baumgart and Mies 2007).

The nearest contacts are distributed to d paths. Each path asks the nearest peers that *it* has
learned of, and no two paths ask the same peer, so a liar can mislead one path but not all. A path
is done when the k nearest peers it knows have been asked. A peer that is slow to answer does not
hold up its path; a late answer still counts (the Kademlia paper, 2.3). Peers beyond the first two
of one /24 come after all others, so invented neighbours from one network do not fill the answer."""

import bisect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import trio

from swarm.errors import PeerError
from swarm.kademlia.routing_table import BUCKET_SIZE, PEERS_PER_GROUP_MAX, groups_of, node_id
from swarm.kademlia.wire import ADDRESSES_PER_PEER_MAX, Neighbour
from swarm.wire.identity import PeerId

CONCURRENCY = 10
"""α: requests a lookup has in flight, over all its paths. Connecting is slow, so more than 3."""

PATHS = 3
"""d: disjoint paths of a lookup (S/Kademlia), so that one liar cannot control the answer."""

LOOKUP_QUERIES_MAX = 120
"""Requests that one lookup may send: usually about k + 5 suffice, but a liar can invent peers."""

LOOKUP_SECONDS_MAX = 60.0
"""Deadline of one lookup: several rounds of dead peers, at one request deadline each."""

LOOKUP_PATIENCE_SECONDS = 2.0
"""A lookup continues without an answer after this (at most half as long again): connecting across
the world takes a second, and one silent peer shall not cost every lookup ten."""

Ask = Callable[[Neighbour], Awaitable[Sequence[Neighbour]]]
"""Ask one peer; returns the (untrusted) peers it names, or raises `PeerError`."""


@dataclass(frozen=True)
class LookupResult:
    closest: list[Neighbour]
    """The peers nearest to the target that answered, at most k: preferred peers (two per network)
    first, then the rest; nearest first in each part."""
    hops: int
    """Longest chain of answers that led to one of `closest`; 1 when all were contacts already."""
    asked: int
    failed: int
    timed_out: bool
    late: tuple[PeerId, ...] = ()
    """Peers that had not answered after `LOOKUP_PATIENCE_SECONDS`, nor before the end."""


@dataclass
class _Path:
    order: list[tuple[int, PeerId]] = field(default_factory=list)
    """(distance, peer) of each peer that this path has learned of, nearest first."""
    known: dict[PeerId, int] = field(default_factory=dict)
    """Number of answers that led to each peer."""
    in_flight: int = 0
    asked: int = 0


def prefer_diverse(neighbours: Iterable[Neighbour], count: int) -> list[Neighbour]:
    """The first `count` neighbours; those beyond `PEERS_PER_GROUP_MAX` of a network come last."""
    taken: Counter[str] = Counter()
    preferred: list[Neighbour] = []
    surplus: list[Neighbour] = []
    for neighbour in neighbours:
        groups = groups_of(neighbour.addresses)
        if any(taken[group] >= PEERS_PER_GROUP_MAX for group in groups):
            surplus.append(neighbour)
            continue
        taken.update(groups)
        preferred.append(neighbour)
        if len(preferred) == count:
            return preferred
    return (preferred + surplus)[:count]


class Lookup:
    """One lookup for `target` (an id, not a key). Use once: `await Lookup(...).run()`."""

    def __init__(
        self,
        target: int,
        seeds: Sequence[Neighbour],
        ask: Ask,
        *,
        own: PeerId,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        self._target = target
        self._ask = ask
        self._own = own
        self._enough = enough
        self._waited_for: dict[PeerId, tuple[_Path, float]] = {}
        """Running requests: the path of each, and the time after which it is late."""
        self._late: dict[PeerId, None] = {}
        self._paths = [_Path() for _ in range(max(1, min(PATHS, len(seeds))))]
        self._concurrency = -(-CONCURRENCY // len(self._paths))
        self._addresses: dict[PeerId, tuple[str, ...]] = {}
        self._asked: dict[PeerId, tuple[str, ...]] = {}
        self._failed: dict[PeerId, tuple[str, ...]] = {}
        self._answered: dict[PeerId, int] = {}
        self._queries = 0
        for index, seed in enumerate(seeds):
            self._learn(self._paths[index % len(self._paths)], [seed], 1)

    async def run(self) -> LookupResult:
        """Ask peers until every path is done, `enough()` is true, or a limit is reached."""
        with trio.move_on_after(LOOKUP_SECONDS_MAX) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._lose_patience, nursery)
                self._pump(nursery)
        closest = sorted(self._answered, key=lambda peer: node_id(peer) ^ self._target)
        found = prefer_diverse(
            [Neighbour(peer, self._addresses[peer]) for peer in closest], BUCKET_SIZE
        )
        return LookupResult(
            found,
            max((self._answered[neighbour.peer] for neighbour in found), default=0),
            self._queries,
            len(self._failed),
            scope.cancelled_caught,
            tuple(self._late),
        )

    def _pump(self, nursery: trio.Nursery) -> None:
        if self._enough():
            nursery.cancel_scope.cancel()
            return
        for path in self._paths:
            while path.in_flight < self._concurrency:
                peer = self._next(path)
                if peer is None:
                    break
                self._asked[peer] = self._addresses[peer]
                self._failed.pop(peer, None)
                self._queries += 1
                path.asked += 1
                path.in_flight += 1
                self._waited_for[peer] = (path, trio.current_time() + LOOKUP_PATIENCE_SECONDS)
                nursery.start_soon(self._ask_one, nursery, path, peer)
        # Where most are late, our own line is slow: then wait for them.
        if not self._waited_for and len(self._late) <= len(self._answered):
            nursery.cancel_scope.cancel()

    async def _lose_patience(self, nursery: trio.Nursery) -> None:
        """Continue without late peers; their answers still count if they come before the end."""
        while True:
            await trio.sleep(LOOKUP_PATIENCE_SECONDS / 2)
            now = trio.current_time()
            for peer, (path, late_at) in list(self._waited_for.items()):
                if late_at <= now:
                    del self._waited_for[peer]
                    self._late[peer] = None
                    path.in_flight -= 1
            self._pump(nursery)

    def _next(self, path: _Path) -> PeerId | None:
        """The nearest peer of the path's frontier that no path has asked yet."""
        if path.asked * len(self._paths) >= LOOKUP_QUERIES_MAX:
            return None
        # Like `prefer_diverse` of the peers that have not failed, ending at the first unasked one.
        taken: dict[str, int] = {}
        surplus: list[PeerId] = []
        preferred = 0
        for _, peer in path.order:
            retry = peer in self._failed and self._may_retry(peer)
            if peer in self._failed and not retry:
                continue
            groups = groups_of(self._addresses[peer])
            if any(taken.get(group, 0) >= PEERS_PER_GROUP_MAX for group in groups):
                surplus.append(peer)
                continue
            if retry or peer not in self._asked:
                return peer
            for group in groups:
                taken[group] = taken.get(group, 0) + 1
            preferred += 1
            if preferred == BUCKET_SIZE:
                return None
        for peer in surplus[: BUCKET_SIZE - preferred]:
            if peer not in self._asked or self._may_retry(peer):
                return peer
        return None

    def _may_retry(self, peer: PeerId) -> bool:
        """Whether others named an untried address: a liar may have named a wrong one before."""
        tried = self._failed.get(peer)
        return tried is not None and any(a not in tried for a in self._addresses[peer])

    async def _ask_one(self, nursery: trio.Nursery, path: _Path, peer: PeerId) -> None:
        try:
            named = await self._ask(Neighbour(peer, self._asked[peer]))
        except PeerError:
            self._failed[peer] = self._asked[peer]
        else:
            hops = path.known[peer]
            self._answered[peer] = hops
            self._addresses[peer] = self._asked[peer]
            self._learn(path, named, hops + 1)
        self._late.pop(peer, None)
        if self._waited_for.pop(peer, None) is not None:
            path.in_flight -= 1
        self._pump(nursery)

    def _learn(self, path: _Path, named: Sequence[Neighbour], hops: int) -> None:
        for neighbour in named[:BUCKET_SIZE]:
            peer = neighbour.peer
            if peer == self._own:
                continue
            known = self._addresses.get(peer, ())
            # The addresses of a peer that answered are final; for others, collect all named ones.
            if peer not in self._answered or not known:
                # In turn, so that the first ones of each word are kept: a liar who names as many
                # wrong ones as there is room for would hide the peer from all paths.
                pairs = zip_longest(known, neighbour.addresses)
                merged = dict.fromkeys(each for pair in pairs for each in pair if each is not None)
                self._addresses[peer] = tuple(merged)[:ADDRESSES_PER_PEER_MAX]
            if peer not in path.known:
                path.known[peer] = hops
                bisect.insort(path.order, (node_id(peer) ^ self._target, peer))
