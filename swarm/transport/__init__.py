"""The seam to the network: what every peer may ask of it, and nothing more.

Two planes. *Control*: framed streams between authenticated peers. *Bulk*: blobs named by their
BLAKE3-256 hash, fetched into a sink or pushed, over HTTP where an address is known and over a
stream otherwise. Implementations: `swarm.transport.libp2p` (real), `swarm.transport.memory`
(tests, one process), `simnet` (simulation). One contract suite runs against all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from swarm.errors import PeerError
from swarm.identity import PeerId
from swarm.world import Piece, Sink

__all__ = [
    "Arrived",
    "BlobReference",
    "BlobTransport",
    "BulkBytes",
    "BulkService",
    "ConnectError",
    "ConnectionEvent",
    "DialFailure",
    "FetchError",
    "Framing",
    "OpenBlob",
    "Reachability",
    "Refused",
    "Source",
    "Stream",
    "StreamError",
    "StreamHandler",
    "Transport",
    "fetch_in_turn",
]


@dataclass(frozen=True)
class DialFailure:
    """Why one address led nowhere."""

    address: str
    reason: str
    advice: str = "check the address, that the peer runs, and that no firewall is in between"
    """What helps, if a person gave the address."""

    def __str__(self) -> str:
        return f"{self.address}: {self.reason}"


class ConnectError(PeerError):
    """No connection to a peer could be made. Says who, where, and why; `failures` by address."""

    def __init__(self, message: str, failures: Sequence[DialFailure] = ()) -> None:
        super().__init__(message)
        self.failures = failures


class StreamError(PeerError):
    """A stream was reset, ended without END, sent garbage, or outgrew a bound."""


class FetchError(PeerError):
    """A blob could not be fetched or pushed. `retry` says whether the source may have it later,
    `busy` that it only has too much to do at the moment, `lacks` that it has not this blob, or not
    whole, and may have others."""

    def __init__(
        self, message: str, *, retry: bool = False, busy: bool = False, lacks: bool = False
    ) -> None:
        super().__init__(message)
        self.retry = retry
        self.busy = busy
        self.lacks = lacks


class Framing(enum.Enum):
    """How messages are cut out of a stream."""

    SWARM = "swarm"
    """Swarm's own: length-prefixed frames, an END frame, credit. Ending without END is a reset."""

    DELIMITED = "delimited"
    """unsigned-varint length before each message, clean end allowed: what kad-dht speaks."""


class Reachability(enum.Enum):
    UNKNOWN = "unknown"
    PUBLIC = "public"
    PRIVATE = "private"
    """Behind NAT: others reach it through a relay, or by hole punching."""


class Stream(Protocol):
    """A bidirectional stream of frames to one authenticated peer."""

    peer: PeerId
    protocol: str

    async def send(self, frame: bytes) -> None:
        """Send one non-empty frame; waits for the reader's credit. Raises `StreamError`."""
        ...

    async def receive(self) -> bytes | None:
        """The next frame, or None after the other side's END. Raises `StreamError`."""
        ...

    async def end(self) -> None:
        """Say END: this side sends no more. Receiving goes on."""
        ...

    async def reset(self) -> None:
        """Tear the stream down at once, both ways. Never raises."""
        ...


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
    """What is wanted, exactly: nothing is believed that does not hash to `digest`."""

    digest: bytes
    """BLAKE3-256, 32 bytes."""
    size_bytes: int


@dataclass(frozen=True)
class Source:
    """Somebody who may have a blob."""

    peer: PeerId | None = None
    """A peer: its bulk address is used if there is one, a stream otherwise."""
    addresses: tuple[str, ...] = ()
    """`http://host:port` roots where `GET /blob/<hex digest>` works: a peer's own, a mirror's."""


@dataclass(frozen=True)
class BulkBytes:
    """Bytes of blobs this peer has moved since it started."""

    sent: int
    received: int


@dataclass
class OpenBlob:
    """A range of a local file that is a blob: what a server sends."""

    path: str
    """On this peer's disk."""
    offset: int
    size_bytes: int
    release: Callable[[], None] = field(default=lambda: None)
    """Called once when sending ended, in whatever way."""


class Refused(Exception):
    """A bulk service declines: becomes an HTTP status with a one-line reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class BulkService(Protocol):
    """What this peer lets others fetch and push. Called by the transport for each request."""

    def admits(self, peer: PeerId | None, credential: bytes) -> bool:
        """Whether this client may use the plane: called after the client has proved that it holds
        `peer`'s key (None: it proved nothing), and again each second that it uses the plane.
        `credential` is its admission envelope, or empty."""
        ...

    def open(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        """The blob, to be sent; raises `Refused` (404 when unknown)."""
        ...

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        """A sink for a blob that a client pushes; raises `Refused` (403, 413, 429, 503, 507).

        The transport commits the piece once it is whole and its hash is right, which may raise
        `Refused` too, and abandons the sink otherwise.
        """
        ...


Arrived = Callable[[Piece], Awaitable[None]]
"""Takes each blob of a run as it arrives: verifies and commits it, before the next."""


async def fetch_in_turn(
    transport: BlobTransport,
    source: Source,
    wanted: Sequence[tuple[BlobReference, Sink]],
    arrived: Arrived,
) -> None:
    """A `fetch_run` for transports that gain nothing from asking for several blobs at once."""
    for reference, sink in wanted:
        await arrived(await transport.fetch(source, reference, sink))


class BlobTransport(Protocol):
    """The part of a transport that fetching needs."""

    peer_id: PeerId

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        """See `Transport.fetch`."""
        ...

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        """See `Transport.fetch_run`."""
        ...

    def round_trip_seconds(self, source: Source) -> float:
        """See `Transport.round_trip_seconds`."""
        ...


class Transport(Protocol):
    """A peer's own end of the network."""

    peer_id: PeerId

    def addresses(self) -> Sequence[str]:
        """Own multiaddrs, each ending in `/p2p/<peer id>`; relayed ones included."""
        ...

    def bulk_addresses(self) -> Sequence[str]:
        """Own `http://host:port` roots; empty when nobody can reach them."""
        ...

    def reachability(self) -> Reachability: ...

    def connected(self) -> Sequence[PeerId]:
        """Peers with a live connection, sorted."""
        ...

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Connect, trying the addresses in turn; returns at once if connected.

        Raises `ConnectError` naming the peer and each address's reason, within
        `limits.CONNECT_DEADLINE_SECONDS`.
        """
        ...

    async def disconnect(self, peer: PeerId) -> None: ...

    def ban(self, peer: PeerId, seconds: float) -> None:
        """Drop the connection and refuse the peer, both ways, for a while."""
        ...

    def vouch(self, peer: PeerId, seconds: float) -> None:
        """Say that a peer is trusted or admitted: for so long its connection does not make way for
        a stranger's when there is no more room."""
        ...

    def network_of(self, peer: PeerId) -> str:
        """The /24 (IPv6: /48) that a connected peer calls from: what one owner gets easily. Empty
        where it says nothing: private and relayed addresses, and peers not connected."""
        ...

    def connection_events(self) -> trio.MemoryReceiveChannel[ConnectionEvent]:
        """A new subscription; bounded: a subscriber that lags loses its oldest events."""
        ...

    async def open_stream(
        self, peer: PeerId, protocol: str, framing: Framing = Framing.SWARM
    ) -> Stream:
        """A stream to a connected peer; raises `StreamError` if it lacks the protocol."""
        ...

    def serve(
        self,
        protocol: str,
        handler: StreamHandler,
        framing: Framing = Framing.SWARM,
        *,
        frame_bytes_max: int = 1 << 20,
    ) -> None:
        """Answer a protocol. At most one handler each; bounded concurrent streams per peer."""
        ...

    async def fetch(self, source: Source, reference: BlobReference, sink: Sink) -> Piece:
        """Fetch a blob from one source into `sink`; the caller verifies and commits.

        Raises `FetchError` when the source refuses, stalls, breaks off or sends a wrong size.
        """
        ...

    async def fetch_run(
        self, source: Source, wanted: Sequence[tuple[BlobReference, Sink]], arrived: Arrived
    ) -> None:
        """Fetch several blobs from one source, asked for at once where that is possible.

        They arrive in the order of `wanted`, each into its sink, and `arrived` gets each before
        the next is received. Raises `FetchError` at the first that fails, which ends the run, and
        whatever `arrived` raises.
        """
        ...

    def round_trip_seconds(self, source: Source) -> float:
        """The shortest time so far that a request to a source took there and back; 0 if none was
        measured."""
        ...

    async def push(self, target: Source, reference: BlobReference, path: str) -> None:
        """Send the blob in local file `path` to `target`, which checks its hash (HTTP PUT).

        Raises `FetchError` with the target's reason.
        """
        ...

    def bulk_bytes(self) -> BulkBytes:
        """Body bytes of blobs moved so far, pushes included."""
        ...

    def serve_bulk(self, service: BulkService) -> None:
        """What to answer on the bulk plane. At most once."""
        ...

    async def use_relay(self, address: str) -> None:
        """Let the relay at this multiaddr carry connections to this peer, from now on.

        Raises `ConnectError` when it cannot be reached or declines.
        """
        ...

    def set_credential(self, credential: bytes) -> None:
        """The admission envelope shown to bulk servers."""
        ...
