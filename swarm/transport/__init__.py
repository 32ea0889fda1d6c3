"""The seam to the network: the interfaces through which every peer uses it.

Two planes. *Control*: framed streams between authenticated peers. *Bulk*: blobs named by their
BLAKE3-256 hash, fetched into a sink or pushed, over HTTP where an address is known and over a
stream otherwise. Implementations: `swarm.transport.libp2p` (real) and `simnet` (simulation). One
contract suite runs against both.

For other rooms, by the names in docs/rooms.md: `__init__`, `base`, `http`, `http.client`,
`http.connections`, `http.local_server`, `http.messages`, `http.pace`, `http.server`,
`http.serving`, `http.wire`, `libp2p`, `libp2p.addresses`, `libp2p.circuits`, `limits`, `rates`,
`room`
"""

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from swarm.errors import PeerError
from swarm.wire.identity import PeerId
from swarm.world import Piece, Sink


@dataclass(frozen=True)
class DialFailure:
    """Why dialling one address failed."""

    address: str
    reason: str
    advice: str = "check the address, that the peer runs, and that no firewall is in between"
    """What a person who typed the address can do."""
    may_pass: bool = False
    """Silence, or a closed connection: a busy peer answers so, and a later attempt may succeed."""
    turned_away: bool = False
    """Whether the other side accepted and closed at once: it is there, and has no room."""

    def __str__(self) -> str:
        return f"{self.address}: {self.reason}"


class ConnectError(PeerError):
    """No connection to a peer could be made. The message names the peer, its addresses and the
    reasons; `failures` has one entry per address."""

    def __init__(self, message: str, failures: Sequence[DialFailure] = ()) -> None:
        super().__init__(message)
        self.failures = failures


class StreamError(PeerError):
    """A stream was reset, ended without END, sent garbage, or outgrew a bound."""


class FetchError(PeerError):
    """A blob could not be fetched or pushed. `retry`: the source may have it later. `busy`: it is
    only overloaded. `lacks`: it has not all of the blob, but may have others."""

    def __init__(
        self, message: str, *, retry: bool = False, busy: bool = False, lacks: bool = False
    ) -> None:
        super().__init__(message)
        self.retry = retry
        self.busy = busy
        self.lacks = lacks


RETRY_STATUSES = (404, 429, 503)
"""Refusals that may end with time: the source lacks the piece so far, or is overloaded."""

LACKS_STATUSES = (403, 404, 410)
"""A web server does not have the file, or serves it to nobody (buckets answer 403 for both)."""

BUSY_STATUSES = (429, 503)
"""Refusals that say nothing against the source."""


def refusal(name: str, status: int, reason: str) -> FetchError:
    """The error for a refusal by a source or target, from its HTTP status and reason."""
    return FetchError(
        f"{name} refused: {status} {reason}",
        retry=status in RETRY_STATUSES,
        busy=status in BUSY_STATUSES,
        lacks=status in LACKS_STATUSES,
    )


class Reachability(enum.Enum):
    """How other peers reach this one."""

    UNKNOWN = "unknown"
    PUBLIC = "public"
    """At an address of its own."""
    MAPPED = "port mapped"
    """At a router's port that is forwarded to it."""
    PUNCHED = "punched"
    """Behind a NAT in which holes can be punched; the first connection goes through a relay."""
    RELAY_ONLY = "relay only"
    """Behind a NAT or a firewall that lets nobody in: only through relays."""


class Stream(Protocol):
    """A bidirectional stream of frames to one authenticated peer. Whoever opened it calls `reset`
    in the end, which does nothing to a stream that both have ended."""

    peer: PeerId
    protocol: str

    async def send(self, frame: bytes) -> None:
        """Send one non-empty frame; waits for a reader that is far behind. Raises `StreamError`."""

    async def receive(self) -> bytes | None:
        """The next frame, or None after the other side's end. Raises `StreamError`."""

    async def end(self) -> None:
        """End this side: it sends no more frames. Receiving continues."""

    async def reset(self) -> None:
        """Tear the stream down at once, both ways, even when cancelled. Never raises."""


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Runs in a task of the transport; the stream is reset when it raises, ended when it returns."""


@dataclass(frozen=True)
class ConnectionEvent:
    peer: PeerId
    connected: bool
    relayed: bool = False
    """Through a circuit relay, not directly."""


@dataclass(frozen=True)
class BlobReference:
    """The hash and size of a blob to fetch or push; bytes with another hash are refused."""

    digest: bytes
    """BLAKE3-256, 32 bytes."""
    size_bytes: int


@dataclass(frozen=True)
class Source:
    """A peer or a web server that may have a blob."""

    peer: PeerId | None = None
    """The peer, if the source is one: fetched from by HTTP if it has an address, else by stream."""
    addresses: tuple[str, ...] = ()
    """`http://host:port` roots, a peer's or a mirror's, that answer `GET /blob/<hex digest>`."""


@dataclass
class Traffic:
    """Body bytes of blobs that this peer has sent and received since it started."""

    sent: int = 0
    received: int = 0


@dataclass
class OpenBlob:
    """The range of a local file that holds a blob to be sent."""

    path: str
    """On this peer's disk."""
    offset: int
    size_bytes: int
    release: Callable[[], None] = field(default=lambda: None)
    """Called once when sending has ended, whether or not it succeeded."""


class Refused(Exception):
    """A bulk service declines a request: sent as an HTTP status with a one-line reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class BulkService(Protocol):
    """Decides what others may fetch from and push to this peer. Called for each request."""

    def admits(self, peer: PeerId | None, credential: bytes) -> bool:
        """Whether a client may use the bulk plane, asked again each second. It has proved that it
        holds the key of `peer` (None: nothing); `credential` is its admission envelope, or
        empty."""

    def open(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        """Open a blob to be sent; raises `Refused` (404 when unknown)."""

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        """A sink for a pushed blob, committed once complete and of the right hash, else abandoned.
        Raises `Refused` (403, 413, 429, 503, 507), as may the commit."""


Arrived = Callable[[Piece], Awaitable[None]]
"""Verifies and commits each blob of a `fetch_run`, before the next is received."""


class BlobTransport(Protocol):
    """The part of a transport that fetching needs."""

    peer_id: PeerId

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        """Fetch a blob into `sink`, which the caller verifies and commits. Raises `FetchError` when
        the source refuses, stalls, breaks off or sends a wrong size."""
        pieces: list[Piece] = []

        async def arrived(piece: Piece) -> None:
            pieces.append(piece)

        await self.fetch_run(source, [(reference, sink)], arrived)
        return pieces[0]

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        """Fetch several blobs in the order of `wanted`, requesting all at once where possible.
        `arrived` gets each before the next is received. The first failure ends the run with
        `FetchError`, or with what `arrived` raises."""

    def round_trip_seconds(self, source: Source) -> float:
        """The shortest round trip to a source measured so far, in seconds; 0 if none was."""


class Transport(BlobTransport, Protocol):
    """A peer's own end of the network."""

    traffic: Traffic
    """Pushes are counted too."""

    def addresses(self) -> Sequence[str]:
        """This peer's multiaddrs, each ending in `/p2p/<peer id>`; relayed ones included."""

    def bulk_addresses(self) -> Sequence[str]:
        """This peer's `http://host:port` roots; empty when no other peer can reach them."""

    def reachability(self) -> Reachability: ...

    def reachability_reason(self) -> str:
        """How the reachability is known, or why it is not: a clause for a person."""

    def wants_relay(self) -> bool:
        """Whether some peers can reach this one only through a relay."""

    def connected(self) -> Sequence[PeerId]:
        """Peers with a live connection, sorted."""

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Connect, trying the addresses in turn, unless connected. Raises `ConnectError` naming
        each address's reason, within `limits.CONNECT_DEADLINE_SECONDS`."""

    async def disconnect(self, peer: PeerId) -> None: ...

    def ban(self, peer: PeerId, seconds: float) -> None:
        """Drop the connection to a peer, and neither dial nor accept it for `seconds`."""

    def vouch(self, peer: PeerId, seconds: float) -> None:
        """Mark a peer as trusted or admitted for `seconds`: meanwhile its connection is not closed
        to make room for a stranger's."""

    def keep_many(self) -> None:
        """Keep as many connections as there is room for, not only `limits.CONNECTIONS_KEPT`: all
        peers of a run call this one."""

    def network_of(self, peer: PeerId) -> str:
        """The /24 (IPv6: /48) of a connected peer, a range that one owner gets easily. Empty where
        it says nothing: private and relayed addresses, peers not connected."""

    def connection_events(self) -> trio.MemoryReceiveChannel[ConnectionEvent]:
        """A new subscription to connection events; a subscriber that lags loses its oldest."""

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream to a connected peer; raises `StreamError` if it lacks the protocol."""

    def serve(
        self, protocol: str, handler: StreamHandler, *, frame_bytes_max: int = 1 << 20
    ) -> None:
        """Answer a protocol: one handler per protocol, a bounded number of streams per peer."""

    async def push(self, target: Source, reference: BlobReference, path: str) -> None:
        """Send the blob in a local file to `target`, which checks its hash (HTTP PUT). Raises
        `FetchError` with the target's reason."""

    def serve_bulk(self, service: BulkService) -> None:
        """Answer the bulk plane with `service`. Call it at most once."""

    async def use_relay(self, relay: PeerId, addresses: Sequence[str]) -> None:
        """Let the relay carry connections to this peer from now on. Raises `ConnectError` when it
        cannot be reached or declines."""

    def set_credential(self, credential: bytes) -> None:
        """Set the admission envelope that this peer shows to bulk servers."""
