"""Measuring the line and the clock between two peers: `/swarm/line/1.0.0`, framing SWARM.

The asking peer sends `Ask`, the other `Offer` with its wall time. If bytes are offered, the asking
peer sends at most so many in frames of any size, then END; the other then sends as many bytes as it
received, then END. So nobody gets more bytes than it has sent, and the connection under the
stream has proved that it is the asking peer that gets them: the service amplifies nothing.

What the other side says is not proven: it may lie about its clock, and be slow on purpose. A
measurement is a sentence for a person, and no decision of a peer depends on it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from swarm.errors import DECODE_ERRORS, DeadlineError, PeerError
from swarm.transport import Stream, Transport
from swarm.transport.rates import Charge, HourlyBytes, NetworkBudgets, Spent
from swarm.wire.identity import PeerId
from swarm.world import World

PROTOCOL = "/swarm/line/1.0.0"

STREAMS = 4
"""Streams of one measurement. Each has at most 256 KiB under way, which on a line with a round
trip of 100 ms makes 80 Mbit/s for all."""

STREAM_BYTES_MAX = 1 << 20
"""Most bytes of one stream in one direction: 8 MiB for the whole measurement."""

FRAME_BYTES = 32 * 1024

SEND_SECONDS = 2.0
"""A slow line sends for this long, and then stops before `STREAM_BYTES_MAX`."""

MEASURE_SECONDS = 6.0
"""Deadline of a measurement; either side ends it then."""

CLOCK_SECONDS = 4.0
"""Deadline of a comparison of clocks."""

HOURLY = HourlyBytes(network=32 << 20, unplaced=128 << 20, all=256 << 20)
"""Bytes in one direction that a peer serves in an hour. All together: 0.6 Mbit/s on average."""

STREAM_BYTES_MIN = STREAM_BYTES_MAX // 8
"""What a stream costs at least. One that is held for `MEASURE_SECONDS` costs `STREAM_BYTES_MAX`
whatever it moved, since it holds up others."""

SPENT: Mapping[Spent, str] = {
    "": "",
    "network": "this network has measured enough in this hour",
    "all": "it has measured with many peers in this hour",
}

BUSY_SAMPLE_SECONDS = 0.25
BUSY_BYTES_PER_SECOND = 1e6
"""A peer that moves pieces faster than this declines: they matter more."""


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """The first frame of the asking peer."""

    size_bytes: Annotated[int, Meta(ge=0, le=STREAM_BYTES_MAX)]
    """Bytes that it wants to send and to get; 0: only the clock."""


class Offer(msgspec.Struct, array_like=True, frozen=True):
    """The answer."""

    wall_ms: Annotated[int, Meta(ge=0, le=2**53)]
    size_bytes: Annotated[int, Meta(ge=0, le=STREAM_BYTES_MAX)] = 0
    """Bytes that it takes and sends back."""
    reason: Annotated[str, Meta(max_length=100)] = ""
    """Why it takes none, if some were asked for."""


_encoder = msgspec.msgpack.Encoder()
_ask_decoder = msgspec.msgpack.Decoder(Ask)
_offer_decoder = msgspec.msgpack.Decoder(Offer)


class LineService:
    """Lets other peers measure their line to this one, one peer at a time, within bounds."""

    def __init__(self, transport: Transport, world: World) -> None:
        self._transport = transport
        self._world = world
        self._budgets = NetworkBudgets(HOURLY)
        self._measuring: PeerId | None = None
        self._streams = 0
        transport.serve(PROTOCOL, self._answer, frame_bytes_max=FRAME_BYTES)

    async def _answer(self, stream: Stream) -> None:
        with trio.move_on_after(MEASURE_SECONDS):
            raw = await stream.receive()
            try:
                wanted = _ask_decoder.decode(raw or b"").size_bytes
            except DECODE_ERRORS:
                wanted = 0
            if not wanted:
                await self._decline(stream, "")
                return
            peer, network = stream.peer, self._transport.network_of(stream.peer)
            charge = self._budgets.charge(peer, network, STREAM_BYTES_MAX)
            reason = await self._busy(peer) or SPENT[charge.take(self._world.now())]
            if reason:
                await self._decline(stream, reason)
            else:
                await self._measure(stream, wanted, charge)
            return
        await stream.reset()

    async def _busy(self, peer: PeerId) -> str:
        """Why this peer does not measure now; empty if it can."""
        if self._measuring not in (None, peer) or self._streams >= STREAMS:
            return "it measures with another peer"
        moved = self._transport.traffic
        before = moved.sent + moved.received
        await trio.sleep(BUSY_SAMPLE_SECONDS)
        if moved.sent + moved.received - before > BUSY_BYTES_PER_SECOND * BUSY_SAMPLE_SECONDS:
            return "its line is busy with pieces"
        # Another peer began meanwhile, or this one opened more streams at once.
        if self._measuring not in (None, peer) or self._streams >= STREAMS:
            return "it measures with another peer"
        return ""

    async def _measure(self, stream: Stream, wanted: int, charge: Charge) -> None:
        """Return what the asker sends."""
        self._measuring = stream.peer
        self._streams += 1
        self._transport.expect(stream.peer, wanted + wanted // 16)  # with the frames' heads
        received, began = 0, self._world.now()
        try:
            await self._offer(stream, wanted, "")
            while (frame := await stream.receive()) is not None:
                received += len(frame)
                if received > wanted:
                    await stream.reset()
                    return
            for frame in frames_of(received):
                await stream.send(frame)
            await stream.end()
        finally:
            held = (self._world.now() - began) / MEASURE_SECONDS
            charge.settle(max(received, int(held * STREAM_BYTES_MAX), STREAM_BYTES_MIN))
            self._transport.expect(stream.peer, min(received, wanted) - wanted)
            self._streams -= 1
            if not self._streams:
                self._measuring = None

    async def _decline(self, stream: Stream, reason: str) -> None:
        await self._offer(stream, 0, reason)
        await stream.end()

    async def _offer(self, stream: Stream, size: int, reason: str) -> None:
        wall_ms = max(0, int(self._world.wall_time() * 1000))
        await stream.send(_encoder.encode(Offer(wall_ms, size, reason)))


def frames_of(size: int) -> Sequence[bytes]:
    """Frames with `size` bytes in all. Connections are encrypted, so no carrier compresses them."""
    full, rest = divmod(size, FRAME_BYTES)
    frame = bytes(FRAME_BYTES)
    return [frame] * full + ([frame[:rest]] if rest else [])


# --- the asking side ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ClockReading:
    """Another peer's clock, by its own word."""

    ahead_seconds: float
    """Its wall time minus this machine's, with half of the round trip allowed for."""
    round_trip_seconds: float


@dataclass(frozen=True)
class LineReading:
    """The line to another peer, in bytes per second of payload."""

    up_bytes_per_second: float
    down_bytes_per_second: float
    round_trip_seconds: float
    moved_bytes: int
    """Both directions together."""


class Declined(PeerError):
    """The other peer measures nothing now."""


async def read_clock(
    transport: Transport, world: World, peer: PeerId, wall_time: Callable[[], float] | None = None
) -> ClockReading:
    """Compare clocks with a connected peer; raises `PeerError`.

    `wall_time`: this machine's clock; by default the world's, which a peer in a run corrects.
    """
    own = wall_time or world.wall_time
    best: ClockReading | None = None
    try:
        with trio.fail_after(CLOCK_SECONDS):
            for _ in range(2):  # the first may wait for the stream's negotiation
                began = world.now()
                stream, offer = await _open(transport, peer, 0)
                seconds, wall = world.now() - began, own()
                await stream.reset()
                if best is None or seconds < best.round_trip_seconds:
                    ahead = offer.wall_ms / 1000 + seconds / 2 - wall
                    best = ClockReading(ahead, seconds)
    except trio.TooSlowError:
        raise DeadlineError(f"{peer} did not tell its clock within {CLOCK_SECONDS:g} s") from None
    assert best is not None
    return best


def median_ahead(readings: Sequence[ClockReading]) -> float:
    """The seconds by which most others' clocks are ahead."""
    return statistics.median(reading.ahead_seconds for reading in readings)


async def measure_line(transport: Transport, world: World, peer: PeerId) -> LineReading:
    """Measure the line to a connected peer with at most 8 MiB in at most `MEASURE_SECONDS`.

    Raises `Declined` if the other peer has no time, and other `PeerError`s.
    """
    try:
        with trio.fail_after(MEASURE_SECONDS):
            clock = await read_clock(transport, world, peer)
            measured = _Measured(world)
            async with trio.open_nursery() as nursery:
                for _ in range(STREAMS):
                    nursery.start_soon(_measure_stream, transport, peer, measured)
    except trio.TooSlowError:
        raise DeadlineError(
            f"{peer} did not finish a measurement within {MEASURE_SECONDS:g} s"
        ) from None
    except BaseExceptionGroup as group:
        leaves = [leaf for leaf in group.exceptions if isinstance(leaf, PeerError)]
        if len(leaves) < len(group.exceptions):
            raise
        raise leaves[0] from None
    return measured.reading(clock.round_trip_seconds)


class _Measured:
    """Counts the bytes of all streams of one measurement."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.began = self.turned = self.ended = world.now()
        self.up = self.down = 0

    def reading(self, round_trip: float) -> LineReading:
        # The first byte comes back a round trip after the last one was sent.
        up_seconds = max(self.turned - self.began - round_trip, 1e-3)
        down_seconds = max(self.ended - self.turned, 1e-3)
        return LineReading(
            self.up / up_seconds, self.down / down_seconds, round_trip, self.up + self.down
        )


async def _measure_stream(transport: Transport, peer: PeerId, measured: _Measured) -> None:
    stream, offer = await _open(transport, peer, STREAM_BYTES_MAX)
    try:
        if not offer.size_bytes:
            raise Declined(f"{peer} measures nothing now: {offer.reason or 'it gives no reason'}")
        now = measured.world.now
        if not measured.up:
            measured.began = now()
        sent = received = 0
        for frame in frames_of(offer.size_bytes):
            if now() - measured.began > SEND_SECONDS:
                break
            await stream.send(frame)
            sent += len(frame)
            measured.up += len(frame)
        await stream.end()
        while (back := await stream.receive()) is not None:
            if not measured.down:
                measured.turned = now()
            received += len(back)
            measured.down += len(back)
            measured.ended = now()
            if received > sent:
                raise PeerError(f"{peer} sent more than it was sent")
        if received < sent:
            raise PeerError(f"{peer} sent {received} of {sent} bytes back")
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await stream.reset()


async def _open(transport: Transport, peer: PeerId, size: int) -> tuple[Stream, Offer]:
    """Ask for a measurement; the caller resets the stream. Raises `PeerError`."""
    stream = await transport.open_stream(peer, PROTOCOL)
    try:
        await stream.send(_encoder.encode(Ask(size)))
        raw = await stream.receive()
        if raw is None:
            raise PeerError(f"{peer} did not answer about its line")
        offer = _offer_decoder.decode(raw)
        if offer.size_bytes > size:
            raise PeerError(f"{peer} offered more bytes than were asked for")
    except DECODE_ERRORS as error:
        await stream.reset()
        raise PeerError(f"{peer} sent a malformed answer about its line ({error})") from error
    except BaseException:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
            await stream.reset()
        raise
    return stream, offer
