"""Networks of the matrix, built from network namespaces and nftables; needs root.

One namespace is the internet. Each site is a host, with its router, carrier and firewall where it
has them, on a range of its own of the internet; all homes use the same private range, as in life.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PORT = 4001
"""Each host listens here."""

BULK_PORT = 4002

MISSING = "the NAT matrix needs root, ip (iproute2) and nft (nftables)"


def is_possible() -> bool:
    """Whether this process may make network namespaces, with the programs it needs."""
    return os.geteuid() == 0 and all(shutil.which(each) for each in ("ip", "nft"))


@dataclass(frozen=True)
class Kind:
    """A kind of site."""

    name: str
    nat: str = ""
    """Rules of its router, in nft's language; empty without NAT."""
    carrier: bool = False
    """A second NAT, the carrier's, is in front of the router."""
    firewall: str = ""
    """Rules for forwarded packets of its router."""
    ip4: bool = True
    ip6: bool = False
    is_open: bool = False
    """Others can connect to it."""


MASQUERADE = 'chain out { type nat hook postrouting priority 100; oifname "wan" masquerade; }'
"""Linux' own: keeps the port (so one mapping for all destinations), admits answers only."""

SYMMETRIC = """chain out {
  type nat hook postrouting priority 100; oifname "wan" masquerade random,fully-random; }"""
"""Another port for each connection."""

REMEMBERED = """
  map ports { type inet_service : ipv4_addr . inet_service; flags dynamic,timeout; timeout 1h; }
  set met { type ipv4_addr; flags dynamic,timeout; timeout 1h; }
  chain noted { type filter hook postrouting priority 50; oifname "wan" meta l4proto tcp \
    update @met { ip daddr } update @ports { tcp sport : ip saddr . tcp sport }; }
"""
"""Notes which ports hosts have used, and whom they have spoken to."""

FULL_CONE = f"""{REMEMBERED}
  chain in {{ type nat hook prerouting priority -100;
    iifname "wan" dnat ip to tcp dport map @ports; }}
  {MASQUERADE}"""
"""A port that was used admits anyone."""

RESTRICTED = f"""{REMEMBERED}
  chain in {{ type nat hook prerouting priority -100;
    iifname "wan" ip saddr @met dnat ip to tcp dport map @ports; }}
  {MASQUERADE}"""
"""A port that was used admits the addresses that were spoken to, from any port of theirs."""

CARRIER = f"""chain out {{ type nat hook postrouting priority 100; policy accept;
    oifname "wan" tcp sport {PORT} masquerade to :3{PORT}
    oifname "wan" masquerade; }}"""
"""As RFC 6888 asks of carriers, one mapping for all destinations; the port is not kept."""

OUT_ONLY = """ct state established,related accept; iifname "lan" meta l4proto tcp accept; drop;"""

OUT_443 = """ct state established,related accept;
  iifname "lan" tcp dport { 80, 443 } accept; drop;"""

KINDS = (
    Kind("public", is_open=True),
    Kind("full cone", nat=FULL_CONE),
    Kind("restricted", nat=RESTRICTED),
    Kind("port-restricted", nat=MASQUERADE),
    Kind("symmetric", nat=SYMMETRIC),
    Kind("carrier-grade", nat=MASQUERADE, carrier=True),
    Kind("no UDP", firewall=OUT_ONLY),
    Kind("only 80, 443", firewall=OUT_443),
    Kind("IPv6 only", ip4=False, ip6=True, is_open=True),
    Kind("dual stack", nat=MASQUERADE, ip6=True),
)


@dataclass(frozen=True)
class Site:
    """One host and what is between it and the internet."""

    kind: Kind
    number: int
    """The third number of its addresses."""
    namespaces: tuple[str, ...]
    """The host's first."""
    addresses: tuple[str, ...]
    """The host's own."""

    @property
    def host(self) -> str:
        return self.namespaces[0]


def _run(*words: str, text: str | None = None) -> None:
    done = subprocess.run(words, input=text, text=True, capture_output=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}{text or ''}")


def _ip(namespace: str, command: str) -> None:
    _run("ip", "-n", namespace, *command.split())


def _in(namespace: str, *words: str) -> None:
    _run("ip", "netns", "exec", namespace, *words)


class Internet:
    """The network of all sites, until `close`."""

    def __init__(self) -> None:
        self._prefix = f"swarm{os.getpid()}"
        self._namespaces: list[str] = []
        self._sites = 0
        self._core = self._namespace("net")
        for private in ("192.168.0.0/16", "100.64.0.0/10"):
            _ip(self._core, f"route add blackhole {private}")

    def close(self) -> None:
        for namespace in self._namespaces:
            _run("ip", "netns", "del", namespace)

    def _namespace(self, name: str) -> str:
        namespace = f"{self._prefix}-{name}"
        _run("ip", "netns", "add", namespace)
        self._namespaces.append(namespace)
        _ip(namespace, "link set lo up")
        _in(namespace, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        _in(namespace, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        for scope in ("all", "default"):  # an address is usable at once
            _in(namespace, "sysctl", "-qw", f"net.ipv6.conf.{scope}.accept_dad=0")
        return namespace

    def _wire(self, outer: str, outer_name: str, inner: str, inner_name: str) -> None:
        _ip(outer, f"link add {outer_name} type veth peer name {inner_name} netns {inner}")
        _ip(outer, f"link set {outer_name} up")
        _ip(inner, f"link set {inner_name} up")

    def _link(self, outer: str, outer_name: str, inner: str, net: str, inner_name: str) -> None:
        """Wire two namespaces: NET.1 is the outer one's address, NET.2 the inner one's."""
        self._wire(outer, outer_name, inner, inner_name)
        _ip(outer, f"addr add {net}.1/24 dev {outer_name}")
        _ip(inner, f"addr add {net}.2/24 dev {inner_name}")
        _ip(inner, f"route add default via {net}.1")

    def _link6(self, outer: str, outer_name: str, inner: str, net: str, inner_name: str) -> None:
        _ip(outer, f"addr add {net}::1/64 dev {outer_name}")
        _ip(inner, f"addr add {net}::2/64 dev {inner_name}")
        _ip(inner, f"route add default via {net}::1")

    def site(self, kind: Kind) -> Site:
        """Add a site with range 11.0.N.0/24, and 2600:N::/48 where it has IPv6."""
        self._sites += 1
        number = self._sites
        host = self._namespace(f"{number}")
        outside, outside_name = self._core, f"site{number}"
        public, public6 = f"11.0.{number}", f"2600:{number}:0"
        private = f"11.1.{number}" if kind.firewall else "192.168.1"
        namespaces = [host]
        if kind.carrier:
            carrier = self._namespace(f"{number}c")
            namespaces.append(carrier)
            self._link(outside, outside_name, carrier, public, "wan")
            self._rules(carrier, CARRIER)
            outside, outside_name, public = carrier, "customer", "100.64.0"
        if kind.nat or kind.firewall:
            router = self._namespace(f"{number}r")
            namespaces.append(router)
            self._link(outside, outside_name, router, public, "wan")
            self._link(router, "lan", host, private, "eth0")
            if kind.firewall:
                _ip(outside, f"route add {private}.0/24 via {public}.2")
                rules = f"chain through {{ type filter hook forward priority 0; {kind.firewall} }}"
                self._rules(router, rules)
            else:
                self._rules(router, kind.nat)
            if kind.ip6:
                self._link6(outside, outside_name, router, public6, "wan")
                self._link6(router, "lan", host, f"2600:{number}:1", "eth0")
                _ip(outside, f"route add 2600:{number}:1::/64 via {public6}::2")
                public6 = f"2600:{number}:1"
            addresses = [f"{private}.2"]
        else:
            self._wire(outside, outside_name, host, "eth0")
            if kind.ip4:
                _ip(outside, f"addr add {public}.1/24 dev {outside_name}")
                _ip(host, f"addr add {public}.2/24 dev eth0")
                _ip(host, f"route add default via {public}.1")
            if kind.ip6:
                self._link6(outside, outside_name, host, public6, "eth0")
            addresses = [f"{public}.2"] if kind.ip4 else []
        addresses += [f"{public6}::2"] if kind.ip6 else []
        return Site(kind, number, tuple(namespaces), tuple(addresses))

    def _rules(self, namespace: str, rules: str) -> None:
        """Load a router's rules; it answers no packet from outside that is for none of its hosts,
        as RFC 5382 (REQ-4) asks, because a reset would end a hole punch."""
        closed = """chain closed { type filter hook input priority 0;
          iifname "wan" ct state established,related accept; iifname "wan" drop; }"""
        table = f"table ip n {{\n{rules}\n{closed}\n}}\n"
        _run("ip", "netns", "exec", namespace, "nft", "-f", "-", text=table)


@contextmanager
def internet(kinds: Sequence[Kind]) -> Iterator[list[Site]]:
    """Build a network of sites of these kinds, until the block ends."""
    network = Internet()
    try:
        yield [network.site(kind) for kind in kinds]
    finally:
        network.close()
