"""Whether other peers can reach this one: found out by dial-back, and how it is known."""

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from swarm.events import Events
from swarm.transport import Reachability, StreamError, Transport
from swarm.transport.libp2p.dial_back import PORTS_MAX, PROTOCOL, SEEN, Answer, ask
from swarm.wire.identity import PeerId
from swarm.world import World

ASKED_MAX = 3
"""Peers asked in one round. One that cannot dial, or lies, does not decide alone."""

RECHECK_SECONDS = 600.0
"""Between two rounds: addresses change, and so do the rules of firewalls."""

RETRY_SECONDS = 60.0
"""Between two rounds while nobody could reach this peer."""

LOOK_SECONDS = 1.0
"""Between a new connection and the first round, so that several peers can be asked."""

HANDSHAKE_SECONDS = 2.0
"""From a peer's answer to the end of its handshake here; it begins before the answer."""


@dataclass(frozen=True)
class Told:
    """A peer's answer, after its handshakes were seen here."""

    peer: PeerId
    answer: Answer

    @property
    def is_global(self) -> bool:
        return ipaddress.ip_address(self.answer.host).is_global


@dataclass(eq=False)
class Reach:
    """Asks connected peers to dial back, now and then."""

    _transport: Transport
    _seen_at: Callable[[PeerId], tuple[str, int] | None]
    """Where a peer's direct connection comes from or leads."""
    _listening: Callable[[], Sequence[int]]
    """The TCP ports of this peer."""
    _forwarded: Sequence[int]
    """Those of a router or proxy that lead here, announced by the user."""
    _own_hosts: Callable[[], set[str]]
    """The IP addresses of this machine's interfaces."""
    _world: World
    _events: Events | None

    def __post_init__(self) -> None:
        self.state = Reachability.UNKNOWN
        self.how = "no other peer has tried to reach this one yet"
        self.wants_relay = False
        """Whether some peers can reach this one only through a relay, IPv4-only ones included."""
        self.outside: list[tuple[str, int]] = []
        """Hosts and ports that are no interface's, at which this peer was reached."""
        self.seen: list[tuple[str, int]] = []
        """Where others see connections from the port at which this peer listens."""
        self._awaited: dict[PeerId, trio.Event] = {}

    def note_handshake(self, peer: PeerId) -> None:
        """Note that a peer has proved itself on a connection to the listener."""
        if peer in self._awaited:
            self._awaited[peer].set()

    def conclude_deaf(self) -> None:
        """Note that this peer does not listen."""
        self.wants_relay = True
        self._conclude(Reachability.RELAY_ONLY, "this peer does not listen")

    def note_punched(self, peer: PeerId) -> None:
        """Note that a relayed connection became direct by hole punching."""
        if self.state in (Reachability.UNKNOWN, Reachability.RELAY_ONLY):
            self.wants_relay = True
            self._conclude(Reachability.PUNCHED, f"a hole was punched to {peer}")

    async def run(self) -> None:
        """Ask in rounds, until cancelled."""
        with self._transport.connection_events() as events:
            while True:
                asked_at = trio.current_time()
                pause = await self._round()
                with trio.move_on_at(asked_at + pause):
                    # Without an answer the next connection is worth a question.
                    async for event in events:
                        if pause == RETRY_SECONDS and event.connected and not event.relayed:
                            break
                    else:
                        return  # this peer is closing
                await trio.sleep(LOOK_SECONDS)

    async def _round(self) -> float:
        """Ask up to `ASKED_MAX` peers; returns the seconds until the next round."""
        told: list[Told] = []
        peers = [peer for peer in self._transport.connected() if self._seen_at(peer) is not None]
        self._world.random.shuffle(peers)
        for peer in peers:
            answer = await self._ask(peer)
            if answer is not None:
                told.append(Told(peer, answer))
                is_own = told[-1].is_global and answer.host in self._own_hosts()
                if len(told) == ASKED_MAX or (answer.reached and is_own):
                    break
        if not told:
            return RETRY_SECONDS
        # Peers of this private network say nothing about the others, if any of the others is there.
        self._weigh([each for each in told if each.is_global] or told)
        return RECHECK_SECONDS if any(each.answer.reached for each in told) else RETRY_SECONDS

    async def _ask(self, peer: PeerId) -> Answer | None:
        """A peer's answer; None if it gave none, or claims a handshake that was not seen."""
        with self._awaiting(peer) as seen:
            try:
                stream = await self._transport.open_stream(peer, PROTOCOL)
                try:
                    answer = await ask(stream, self._asked_ports())
                finally:
                    await stream.reset()
            except StreamError:
                return None
            if answer.refused or not answer.host:
                return None
            if answer.reached:
                with trio.move_on_after(HANDSHAKE_SECONDS) as scope:
                    await seen.wait()
                if scope.cancelled_caught:
                    return None
            return answer

    def _asked_ports(self) -> list[int]:
        return list(dict.fromkeys([*self._forwarded, *self._listening(), SEEN]))[:PORTS_MAX]

    @contextmanager
    def _awaiting(self, peer: PeerId) -> Iterator[trio.Event]:
        self._awaited[peer] = trio.Event()
        try:
            yield self._awaited[peer]
        finally:
            del self._awaited[peer]

    def _weigh(self, told: Sequence[Told]) -> None:
        own = self._own_hosts()
        reached = [each for each in told if each.answer.reached]
        self.seen = list(dict.fromkeys((each.answer.host, each.answer.port) for each in told))
        self.outside = self._agreed(told, own)
        by_own = [each for each in reached if each.answer.host in own]
        forwarded = [e for e in reached if set(e.answer.reached) & set(self._forwarded)]
        certain = by_own + forwarded
        self.wants_relay = not any(
            ":" not in each.answer.host or not each.is_global for each in certain
        )
        if by_own:
            state, who = Reachability.PUBLIC, by_own[0]
        elif forwarded:
            state, who = Reachability.MAPPED, forwarded[0]
        elif reached:
            # A router that keeps ports lets in whom this peer has dialled; strangers perhaps.
            state, who = Reachability.PUNCHED, reached[0]
        elif self.state is Reachability.PUNCHED:
            return  # holes are punched, though nobody can simply connect
        else:
            self._conclude(
                Reachability.RELAY_ONLY,
                f"nobody answered {len(told)} peer{'s' * (len(told) > 1)} that connected to "
                f"{told[0].answer.host}, port {self._asked_ports()[0]}",
            )
            return
        port = who.answer.reached[0]
        self._conclude(state, f"{who.peer} connected to {who.answer.host}, port {port}")

    def _agreed(self, told: Sequence[Told], own: set[str]) -> list[tuple[str, int]]:
        """Addresses outside at which peers of two networks reached this one, or all that answered:
        one liar among several makes it announce no address of a third party."""
        networks: dict[str, set[str]] = {}
        for each in told:
            networks.setdefault(each.answer.host, set()).add(
                self._transport.network_of(each.peer) or each.peer
            )
        return list(
            dict.fromkeys(
                (each.answer.host, port)
                for each in told
                if each.answer.host not in own
                and (len(networks[each.answer.host]) > 1 or len(told) == 1)
                for port in each.answer.reached
            )
        )

    def _conclude(self, state: Reachability, how: str) -> None:
        changed = state is not self.state
        self.state, self.how = state, how
        if changed and self._events is not None:
            self._events.emit("transport.reachability", reachability=state.value, reason=how)
