"""The ports that a router forwards to a libp2p peer: found, dialled back, announced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multiaddr import Multiaddr

from swarm.events import Events
from swarm.transport import Reachability
from swarm.transport.http.messages import split_root
from swarm.transport.libp2p.addresses import expanded, host_and_port
from swarm.transport.libp2p.reach import Reach
from swarm.transport.port_maps.keeper import PortMaps


class Forwarding:
    """Asks the router for the ports of both planes when others cannot simply connect."""

    def __init__(
        self,
        listening: Callable[[], Sequence[Multiaddr]],
        roots: Callable[[], Sequence[str]],
        reach: Reach,
        events: Events | None,
    ) -> None:
        """`listening`, `roots`: where libp2p and the piece plane listen."""
        self._listening = listening
        self._roots = roots
        self._reach = reach
        self.maps = PortMaps(self._inside, self._on_change, events)

    async def run(self) -> None:
        """Keep ports forwarded while this peer needs them, until cancelled."""
        await self.maps.run(self._reach.shut)

    def bulk_roots(self) -> list[str]:
        """Where others reach the piece plane through the router, once a peer has dialled back at
        the other port: the same router forwards both."""
        control = {self.maps.ports.get(port) for _, port in self._control()}
        bulk = {self.maps.ports.get(port) for _, port in self._bulk()} - {None}
        hosts = [host for host, port in self._reach.outside if port in control and ":" not in host]
        return [f"http://{host}:{port}" for host in hosts for port in bulk]

    def clause(self) -> str:
        """What the router said, to go after the reason of the reachability."""
        shown = self.maps.how and self._reach.state is not Reachability.PUBLIC
        return f"; {self.maps.how}" if shown else ""

    def _inside(self, own: str) -> list[int]:
        return [
            port
            for places in (self._control(), self._bulk())
            for port in [port for host, port in places if host == own][:1]
        ]

    def _control(self) -> list[tuple[str, int]]:
        return [host_and_port(each) for each in expanded(self._listening())]

    def _bulk(self) -> list[tuple[str, int]]:
        return [split_root(root)[:2] for root in self._roots()]

    def _on_change(self) -> None:
        control = dict.fromkeys(port for _, port in self._control())
        ports = self.maps.ports
        self._reach.ports.forwarded = [ports[port] for port in control if port in ports]
        self._reach.look_again()
