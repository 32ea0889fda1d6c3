"""Bootstrap addresses by name: `/dnsaddr/example.org`, as libp2p defines it.

The TXT records of `_dnsaddr.example.org` hold `dnsaddr=<multiaddr>`, each the address of a peer or
another `/dnsaddr/…`. So a lab changes its bootstrap peers in its DNS, and no contributor's settings
change. (github.com/multiformats/multiaddr, protocols/DNSADDR.md)

Whoever answers for the name is a stranger: the answers are bounded, and only what parses as the
address of a peer counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import trio
from multiaddr import Multiaddr

from swarm.errors import UserError
from swarm.transport import ConnectError, DialFailure
from swarm.transport.libp2p.addresses import parse_multiaddr, require_peer

if TYPE_CHECKING:
    import dns.asyncresolver

PREFIX = "/dnsaddr/"

RECORDS_MAX = 64
"""TXT records read of one name."""

ADDRESSES_MAX = 32
"""Addresses that one name may give."""

LOOKUPS_MAX = 16
"""Names asked for one address, itself included."""

DEPTH_MAX = 4
"""Length of a chain of names, each named by the one before."""

RECORD_CHARACTERS_MAX = 512
"""Longest record that is read; a multiaddr of a name and a peer id has at most about 330."""

LOOKUP_SECONDS = 5.0
"""Deadline of one question, with all its repetitions."""

LookUp: TypeAlias = Callable[[str], Awaitable[Sequence[str]]]
"""Finds the TXT records of a name; raises `NoRecords`."""


class NoRecords(Exception):
    """A name has no TXT records, or no DNS server answers. The message is the reason."""


async def look_up(name: str, resolver: dns.asyncresolver.Resolver | None = None) -> Sequence[str]:
    """Find the TXT records of a name with this machine's DNS servers, or those of `resolver`."""
    # Here, since it takes 3 MB, and most peers look no name up. Without DNS over HTTPS and QUIC,
    # which would import HTTP clients.
    import dns._features

    for feature in ("doh", "doq"):
        dns._features.force(feature, False)
    import dns.asyncresolver
    import dns.exception
    import dns.resolver

    try:
        asked = resolver or dns.asyncresolver.Resolver()
        with trio.fail_after(LOOKUP_SECONDS):
            answer = await asked.resolve(name, "TXT", lifetime=LOOKUP_SECONDS)
    except dns.resolver.NXDOMAIN as error:
        raise NoRecords(f"the name {name} does not exist") from error
    except dns.resolver.NoAnswer as error:
        raise NoRecords(f"the name {name} has no TXT records") from error
    except (dns.exception.Timeout, trio.TooSlowError) as error:
        raise NoRecords(f"no DNS server answered within {LOOKUP_SECONDS:g} s") from error
    except (dns.exception.DNSException, OSError, ValueError) as error:
        raise NoRecords(f"the DNS servers gave no answer ({type(error).__name__})") from error
    texts = (b"".join(record.strings) for record in answer)
    return [text.decode("ascii", "replace") for text in texts]


def check_bootstrap(text: str) -> None:
    """Raise `UserError` unless a text is the address of a peer, or a `/dnsaddr/…` name."""
    if not text.startswith(PREFIX):
        require_peer(text)
        return
    try:
        _name_and_peer(text)
    except ValueError as error:
        raise UserError(
            f"{text!r} is not a name of bootstrap peers; write it like /dnsaddr/example.org, or "
            "with one peer of it like /dnsaddr/example.org/p2p/12D3KooW…"
        ) from error


async def expand(text: str, look_up: LookUp = look_up) -> list[str]:
    """Find the peers' addresses behind a bootstrap address; one without `/dnsaddr` is its own.

    `/dnsaddr/NAME/p2p/ID` gives only that peer's. Raises `ConnectError` if there are none.
    """
    if not text.startswith(PREFIX):
        return [text]
    return await _Expansion(text, look_up).run()


class _Expansion:
    """The questions and answers about one `/dnsaddr` address."""

    def __init__(self, text: str, look_up: LookUp) -> None:
        self._text = text
        self._look_up = look_up
        self._asked: set[str] = set()
        self._found: dict[str, None] = {}
        self._problems: list[str] = []

    async def run(self) -> list[str]:
        level = [self._text]
        for _ in range(DEPTH_MAX):
            # The names of one level are asked side by side: one dead server delays no other.
            further: list[str] = []
            async with trio.open_nursery() as nursery:
                for text in level:
                    if len(self._asked) < LOOKUPS_MAX and text not in self._asked:
                        self._asked.add(text)
                        nursery.start_soon(self._ask, text, further)
            level = further
            if not level:
                break
        if not self._found:
            reason = "; ".join(self._problems[:3]) or "it names no peer that answers over TCP"
            advice = "check its spelling, and this machine's DNS"
            raise ConnectError(f"{self._text}: {reason}", [DialFailure(self._text, reason, advice)])
        return list(self._found)[:ADDRESSES_MAX]

    async def _ask(self, text: str, further: list[str]) -> None:
        name, peer = _name_and_peer(text)
        try:
            records = await self._look_up(f"_dnsaddr.{name}")
        except NoRecords as error:
            self._problems.append(str(error))
            return
        for record in sorted(records)[:RECORDS_MAX]:
            key, _, value = record.partition("=")
            if key != "dnsaddr" or len(record) > RECORD_CHARACTERS_MAX:
                continue
            if value.startswith(PREFIX):
                self._follow(value, peer, further)
            elif (found := _address_of_a_peer(value, peer)) is not None:
                self._found[found] = None

    def _follow(self, value: str, peer: str | None, further: list[str]) -> None:
        try:
            name, only = _name_and_peer(value)
        except ValueError:
            return
        if peer is None or only in (None, peer):
            wanted = peer or only
            further.append(f"{PREFIX}{name}" + (f"/p2p/{wanted}" if wanted else ""))


def _name_and_peer(text: str) -> tuple[str, str | None]:
    """Split `/dnsaddr/NAME[/p2p/ID]`; raises `ValueError` for anything else."""
    try:
        address = Multiaddr(text)
        protocols = [protocol.name for protocol in address.protocols()]
        name = address.value_for_protocol("dnsaddr")
    except Exception as error:  # multiaddr raises a dozen unrelated types
        raise ValueError("not a multiaddr") from error
    if protocols not in (["dnsaddr"], ["dnsaddr", "p2p"]) or name is None:
        raise ValueError("not a name, or more than a name")
    return str(name), address.get_peer_id()


def _address_of_a_peer(text: str, wanted: str | None) -> str | None:
    """Return `/<host>/tcp/<port>/p2p/<id>` of the wanted peer, or of any; None for other texts.

    Public names list other ways to the same peers as well, such as QUIC and WebSocket.
    """
    try:
        address, peer = parse_multiaddr(text)
    except UserError:
        return None
    names = [protocol.name for protocol in address.protocols()]
    fits = peer is not None and names[1:] == ["tcp", "p2p"] and wanted in (None, peer)
    return str(address) if fits else None
