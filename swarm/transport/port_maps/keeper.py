"""Keeps ports forwarded while a peer needs them, and gives them back when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import trio

from swarm.events import Events
from swarm.transport.port_maps.gateway import (
    Gateway,
    Granted,
    MapRefused,
    NatPmp,
    Router,
    default_gateway,
)
from swarm.transport.port_maps.upnp import Upnp

LEASE_SECONDS = 3600
"""Asked for: if this process is killed, the router forgets the ports after this."""

RENEW_SECONDS_MIN, RENEW_SECONDS_MAX = 60.0, 1200.0
"""Bounds of the time until a mapping is renewed, otherwise half of what the router grants. A router
that restarts forgets its mappings, and gets them again within the upper bound."""

RETRY_SECONDS = 900.0
"""After a router has forwarded nothing; a laptop moves to another network."""

GIVE_BACK_SECONDS = 3.0
"""Deadline of giving ports back when the peer ends."""


class PortMaps:
    """The ports that this peer's router forwards to it."""

    def __init__(
        self,
        inside: Callable[[str], Sequence[int]],
        changed: Callable[[], None],
        events: Events | None,
        *,
        routers: Sequence[Router] | None = None,
        gateway: Callable[[], Gateway | None] = default_gateway,
    ) -> None:
        """`inside`: the TCP ports at which this peer listens on one of its addresses, the most
        important first. `changed`: called when other ports are forwarded than before."""
        self._inside = inside
        self._changed = changed
        self._events = events
        self._routers: Sequence[Router] = (NatPmp(), Upnp()) if routers is None else routers
        self._gateway = gateway
        self.ports: Mapping[int, int] = {}
        """Outside port by inside port, while the router forwards them."""
        self.how = ""
        """Which router forwards ports, or why none does: a clause. Empty before it was asked."""
        self._asked: tuple[Router, Gateway, dict[int, int]] | None = None
        """What may have to be given back: noted before the router is asked."""

    async def run(self, wanted: trio.Event) -> None:
        """Ask for ports from when they are wanted, renew them, until cancelled; then give them
        back."""
        await wanted.wait()
        try:
            while True:
                pause = await self._ask()
                await trio.sleep(pause)
        finally:
            with trio.move_on_after(GIVE_BACK_SECONDS, shield=True):
                await self._give_back()

    async def _ask(self) -> float:
        """Ask the gateway, by the protocol that worked before or by each; returns the seconds until
        it is time to ask again."""
        gateway = self._gateway()
        if gateway is None:
            self._conclude({}, "", "")
            return RETRY_SECONDS
        inside = self._inside(gateway.own)
        if not inside:
            return RETRY_SECONDS
        ports = {port: self.ports.get(port, port) for port in inside}
        before = self._asked
        if before is not None and before[1] != gateway:
            before = None  # this machine has moved, and nothing reaches the former router
        refusals = []
        for router in [before[0]] if before is not None and self.ports else self._routers:
            self._asked = router, gateway, ports
            try:
                granted = await router.map(gateway, ports, LEASE_SECONDS)
            except MapRefused as refused:
                refusals.append(f"{router.name}: {refused}")
                continue
            self._asked = router, gateway, dict(granted.ports)
            shown = " and ".join(str(each) for each in granted.ports.values())
            plural = "s" * (len(granted.ports) > 1)
            how = f"{gateway.host} forwards port{plural} {shown} by {router.name}"
            self._conclude(granted.ports, how, router.name)
            return _renewal_seconds(granted)
        lost = bool(self.ports)
        self._asked = None
        self._conclude({}, f"{gateway.host} forwards no port ({'; '.join(refusals)})", "")
        return 0.0 if lost else RETRY_SECONDS  # a router that restarted, or another one

    def _conclude(self, ports: Mapping[int, int], how: str, by: str) -> None:
        moved, news = ports != self.ports, how != self.how
        self.ports, self.how = ports, how
        if news and how and self._events is not None:
            name = "transport.ports_mapped" if ports else "transport.ports_unmapped"
            fields = {"by": by, "ports": list(ports.values())} if ports else {}
            self._events.emit(name, reason=how, **fields)
        if moved:
            self._changed()

    async def _give_back(self) -> None:
        if self._asked is None:
            return
        router, gateway, ports = self._asked
        self._asked, self.ports = None, {}
        try:
            await router.unmap(gateway, ports)
        except MapRefused as refused:
            if self._events is not None:
                reason = f"{gateway.host} may forward a port until its lease ends ({refused})"
                self._events.emit("transport.ports_unmapped", reason=reason)


def _renewal_seconds(granted: Granted) -> float:
    return min(max(granted.seconds / 2, RENEW_SECONDS_MIN), RENEW_SECONDS_MAX)
