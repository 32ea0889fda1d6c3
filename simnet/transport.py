"""A peer's end of the simulated network: dialling, relays, streams."""

from collections.abc import Sequence

import trio

from simnet.links import Connection, Endpoint, SimulatedStream
from swarm.transport import ConnectError, DialFailure, Reachability, Stream, StreamError, limits
from swarm.wire.identity import PeerId

CONNECT_SECONDS = 0.25
"""libp2p's shortest time to connect, measured on one machine."""

CONNECT_ROUND_TRIPS = 5
"""Round trips to connect: TCP, choosing noise, noise, choosing yamux, identify."""

PORT = 4001


class SimulatedTransport(Endpoint):
    """`swarm.transport.Transport` on a `SimulatedNetwork`."""

    def addresses(self) -> Sequence[str]:
        own = f"/ip4/{self.host}/tcp/{PORT}/p2p/{self.peer_id}"
        relayed = (
            f"{relay}/p2p-circuit/p2p/{self.peer_id}" for relay in self._reservations.values()
        )
        return (own, *relayed)

    def bulk_addresses(self) -> Sequence[str]:
        return (f"http://{self.host}:{PORT + 1}",)

    async def use_relay(self, relay: PeerId, addresses: Sequence[str]) -> None:
        address = addresses[0]
        await self._reserve(relay, address)
        self._nursery.start_soon(self._keep_reservation, relay, address, name=f"relay {relay}")

    async def _reserve(self, relay: PeerId, address: str) -> None:
        await self.connect(relay, [address])
        await self.connections[relay].round_trip()
        held = self.connections.get(relay)
        if held is None or not held.peer.relay:
            raise ConnectError(f"relay {relay} declines: it carries no connections")
        if len(held.peer.reserved_by) >= limits.RELAY_RESERVATIONS_MAX:
            raise ConnectError(f"relay {relay} declines: it has no reservation left")
        held.peer.reserved_by[self.peer_id] = None
        self._reservations[relay] = address

    async def _keep_reservation(self, relay: PeerId, address: str) -> None:
        while True:
            await trio.sleep(limits.RELAY_RETRY_SECONDS)
            if relay not in self.connections:
                self._reservations.pop(relay, None)
                try:
                    await self._reserve(relay, address)
                except (ConnectError, KeyError):
                    continue

    def reachability(self) -> Reachability:
        if self.line.reachability == "public":
            return Reachability.PUBLIC
        return Reachability.RELAY_ONLY if self._reservations else Reachability.UNKNOWN

    def reachability_reason(self) -> str:
        return f"its line is {self.line.reachability}"

    def wants_relay(self) -> bool:
        return self.line.reachability != "public"

    # --- connections ---

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await trio.lowlevel.checkpoint()
        if peer in self.connections:
            return
        if self._is_banned(peer):
            raise ConnectError(f"{peer} is banned here")
        failures: list[DialFailure] = []
        with trio.move_on_after(limits.CONNECT_DEADLINE_SECONDS) as scope:
            for address in addresses[: limits.DIAL_ADDRESSES_MAX]:
                reason = await self._dial(peer, address)
                if reason is None:
                    return
                failures.append(DialFailure(address, reason))
        reasons = [str(each) for each in failures]
        if scope.cancelled_caught:
            reasons.append(f"no answer within {limits.CONNECT_DEADLINE_SECONDS:g} s")
        raise ConnectError(
            f"cannot connect to {peer}: {'; '.join(reasons) or 'no address known'}", failures
        )

    async def _dial(self, peer: PeerId, address: str) -> str | None:
        """Dial an address; return None when connected, else the reason of the failure."""
        parts = address.split("/")
        if len(parts) < 5 or parts[1] != "ip4" or parts[3] != "tcp" or not parts[4].isdecimal():
            return "not a multiaddr with a TCP port"
        if "p2p-circuit" in parts:
            return await self._dial_relayed(peer, address)
        if len(parts) > 6 and parts[6] != peer:
            return "the address names another peer"
        network = self._network
        remote = network.at_host(parts[2]) if int(parts[4]) == PORT else None
        if remote is not None and remote.line.reachability != "public":
            await trio.sleep(limits.DIAL_DEADLINE_SECONDS)  # its NAT drops unsolicited packets
            return f"no answer within {limits.DIAL_DEADLINE_SECONDS:g} s"
        if network.is_dark(parts[2]) or (remote and network.is_silent(self, remote)):
            await trio.sleep(limits.DIAL_DEADLINE_SECONDS)
            return f"no answer within {limits.DIAL_DEADLINE_SECONDS:g} s"
        if remote is None:
            await trio.sleep(2 * network.weather.local_seconds)
            return "no peer answers"
        round_trip = network.draw_latency(self, remote) + network.draw_latency(remote, self)
        await trio.sleep(CONNECT_SECONDS + CONNECT_ROUND_TRIPS * round_trip)
        if self.gone or remote.gone or network.is_silent(self, remote):
            return "the connection was lost"
        if remote.peer_id != peer:
            return f"{remote.peer_id} answers there"
        if remote._is_banned(self.peer_id):
            return "the peer refuses the connection"
        if peer in self.connections or self.peer_id in remote.connections:
            return await self._meet(remote)
        if not remote.makes_room(self):
            return f"the peer has {limits.CONNECTIONS_MAX} connections and takes no more"
        if not self.makes_room(remote):
            return f"this peer has {limits.CONNECTIONS_MAX} connections and opens no more"
        network.join(self, remote)
        return None

    async def _dial_relayed(self, peer: PeerId, address: str) -> str | None:
        relay_address = address.partition("/p2p-circuit")[0]
        relay = PeerId(relay_address.rpartition("/")[2])
        try:
            await self.connect(relay, [relay_address])
        except ConnectError as error:
            return str(error)
        if relay not in self.connections:
            return f"relay {relay} was lost"
        await self.connections[relay].round_trip()
        held = self.connections.get(relay)
        via = held.peer if held is not None else None
        if via is None or via.gone or peer not in via.reserved_by:
            return f"relay {relay} declines: {peer} has no reservation there"
        remote = via.connections[peer].peer
        await trio.sleep(2 * self._network.path_latency(self, via, remote))
        if self.gone or via.gone or remote.gone or remote._is_banned(self.peer_id):
            return "the connection was lost"
        if peer in self.connections or self.peer_id in remote.connections:
            return await self._meet(remote)
        if len(via.carried) >= limits.RELAY_RESERVATIONS_MAX:
            return f"relay {relay} declines: it carries no more connections"
        self._network.join(self, remote, via)
        return None

    async def _meet(self, remote: Endpoint) -> str | None:
        """Connect, unless `remote`'s own dial has already connected both, and close an old one
        whose end the other side has not noticed yet."""
        stale = remote.connections.get(self.peer_id)
        if remote.peer_id in self.connections:
            return None
        if stale is not None:
            stale.close("the connection was closed", tell=False)
        self._network.join(self, remote)
        return None

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        self._drop(peer)

    def ban(self, peer: PeerId, seconds: float) -> None:
        self._ban(peer, seconds)
        self._drop(peer)

    def _drop(self, peer: PeerId) -> None:
        self._forget_admission(peer)
        connection = self.connections.get(peer)
        if connection is not None:
            connection.close("the connection was closed")

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        connection = self.connections.get(peer)
        if connection is None:
            await trio.lowlevel.checkpoint()
            raise StreamError(f"stream {protocol} with {peer}: not connected")
        with trio.move_on_after(limits.STREAM_OPEN_DEADLINE_SECONDS):
            await connection.round_trip()
            if self.connections.get(peer) is not connection or connection.peer.gone:
                raise StreamError(f"stream {protocol} with {peer}: the connection was lost")
            return self._start_stream(connection, protocol)
        raise StreamError(
            f"stream {protocol} with {peer}: no answer within "
            f"{limits.STREAM_OPEN_DEADLINE_SECONDS:g} s"
        )

    def _start_stream(self, connection: Connection, protocol: str) -> Stream:
        remote = connection.peer
        served = remote._handlers.get(protocol)
        if served is None:
            raise StreamError(
                f"stream {protocol} with {remote.peer_id}: the peer does not speak it"
            )
        near = SimulatedStream(connection, protocol, limits.FRAME_BYTES_MAX)
        far = SimulatedStream(connection.twin, protocol, served.frame_bytes_max)
        near.far, far.far = far, near
        handler = remote._admit_stream(self.peer_id, protocol)
        if handler is None:
            far.break_("refused")
            near.break_("reset by the other side")
        else:
            remote._nursery.start_soon(
                remote.serve_stream, far, handler, name=f"serve {protocol} {self.peer_id}"
            )
        return near
