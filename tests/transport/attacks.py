"""A catalogue of what a stranger may do below our own protocols, and how each is carried out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import trio

from swarm.transport.libp2p.yamux import WINDOW_BYTES
from swarm.wire.identity import Identity

from .hostile import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    MULTISTREAM,
    PING,
    RST,
    SYN,
    WINDOW,
    Hostile,
    connected,
    data,
    frame,
    name,
    opening,
    tcp,
)

HOLD_SECONDS = 0.02
"""What hangs is left hanging so long beside the next attack."""

BEFORE_NOISE = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 16,
    "a name of 2^63 bytes": b"\xff" * 8 + b"\x7f",
    "a length that never ends": b"\xff" * 64,
    "a name that is no text": MULTISTREAM + name(b"\xff\xfe\xfd"),
    "a name without newline": b"\x04/abc",
    "an empty name": MULTISTREAM + b"\x00",
    "plaintext": MULTISTREAM + name("/plaintext/2.0.0"),
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise that is none": MULTISTREAM + name("/noise") + b"\x00\x20" + bytes(32) + b"\xff" * 400,
    "noise of length 0": MULTISTREAM + name("/noise") + b"\x00\x00" * 100,
    "noise begun and left": MULTISTREAM + name("/noise") + b"\xff\xff" + bytes(100),
}
"""Bytes of a TCP connection that never gets to noise."""

NEGOTIATIONS = {
    "no text": MULTISTREAM + name(b"\xff\xfe\xfd"),
    "no text at once": name(b"\xff\xfe\xfd"),
    "a surrogate": MULTISTREAM + name(b"/\xed\xa0\x80"),
    "2^63 bytes": MULTISTREAM + b"\xff" * 8 + b"\x7f",
    "2^32 bytes": MULTISTREAM + b"\xff\xff\xff\xff\x0f" + bytes(1000),
    "an overlong length": MULTISTREAM + b"\x80" * 11 + b"\x01",
    "a length in 10 bytes for 1": MULTISTREAM + b"\x81" + b"\x80" * 8 + b"\x00\n",
    "empty": MULTISTREAM + b"\x00",
    "only a newline": MULTISTREAM + b"\x01\n",
    "no newline": MULTISTREAM + b"\x05/ping",
    "many newlines": MULTISTREAM + name("\n" * 200),
    "unknown": MULTISTREAM + name("/nobody/1.0.0"),
    "a thousand names": MULTISTREAM + name("/nobody/1.0.0") * 1000,
    "a thousand lists": MULTISTREAM + name("ls") * 1000,
    "a thousand greetings": MULTISTREAM * 1000,
    "half a greeting": MULTISTREAM[:10],
    "an older version": name("/multistream/0.1.0"),
    "a name as long as allowed": MULTISTREAM + name("/" * 1022),
    "a name longer than allowed": MULTISTREAM + name("/" * 5000),
    "a NUL": MULTISTREAM + name("\0"),
}
"""First bytes of a stream."""

FRAMES = {
    "a frame of version 1": frame(WINDOW, SYN, 1, 0, version=1),
    "an unknown kind": frame(77, SYN, 1, 0),
    "all flags": frame(WINDOW, 0xFFFF, 1, 0),
    "SYN with RST": frame(WINDOW, SYN | RST, 1, 0) * 300,
    "SYN with FIN": frame(WINDOW, SYN | FIN, 1, 0),
    "an even stream": frame(WINDOW, SYN, 2, 0),
    "stream 0": frame(DATA, SYN, 0, 0),
    "the last stream": frame(WINDOW, SYN, 2**32 - 1, 0),
    "SYN twice": frame(WINDOW, SYN, 1, 0) * 2,
    "2^32-1 bytes of data": frame(DATA, SYN, 1, 2**32 - 1) + bytes(1000),
    "more than a window at once": data(1, bytes(WINDOW_BYTES + 1), SYN),
    "data begun and left": frame(DATA, SYN, 1, 1000) + bytes(10),
    "a head begun and left": b"\x00\x00\x00",
    "windows that overflow": frame(WINDOW, SYN, 1, 0) + frame(WINDOW, 0, 1, 2**32 - 1) * 300,
    "data for unknown streams": b"".join(data(n, b"x" * 100) for n in range(1, 2001, 2)),
    "windows for unknown streams": frame(WINDOW, 0, 99, 1) * 1000,
    "FIN again and again": frame(WINDOW, SYN, 1, 0) + frame(WINDOW, FIN, 1, 0) * 100,
    "data after FIN": frame(WINDOW, SYN | FIN, 1, 0) + data(1, b"x"),
    "acknowledgements of nothing": frame(WINDOW, ACK, 1, 0) * 100,
    "go-away": frame(GO_AWAY, 0, 0, 0),
    "go-away with an unknown code, and on": frame(GO_AWAY, 0, 0, 9999) + frame(WINDOW, SYN, 1, 0),
    "a flood of pings": frame(PING, SYN, 0, 7) * 3000,
    "a flood of pongs": frame(PING, ACK, 0, 7) * 3000,
    "a flood of SYN": b"".join(frame(WINDOW, SYN, n, 0) for n in range(1, 4001, 2)),
    "a flood of SYN and RST": b"".join(
        frame(WINDOW, SYN, n, 0) + frame(WINDOW, RST, n, 0) for n in range(1, 2001, 2)
    ),
    "empty data": frame(WINDOW, SYN, 1, 0) + data(1, b"") * 3000,
}
"""Frames of yamux, sent at once."""


async def _overrun(mallory: Hostile, protocol: str) -> None:
    await mallory.send(opening(1, protocol))
    for _ in range(3):
        for _ in range(4):
            await mallory.send(data(1, bytes(WINDOW_BYTES // 2 - 100)))


async def _hang(mallory: Hostile, protocol: str) -> None:
    await mallory.send(b"".join(opening(n, protocol) for n in range(1, 129, 2)))


async def _half_close(mallory: Hostile, protocol: str) -> None:
    for n in range(1, 65, 2):
        await mallory.send(opening(n, protocol) + frame(WINDOW, FIN, n, 0))


async def _begin(mallory: Hostile, protocol: str) -> None:
    await mallory.send(opening(1, protocol) + data(1, b"\x00\xff\xff\x3f"))  # a long frame's head


async def _babble(mallory: Hostile, protocol: str) -> None:
    await mallory.send(opening(1, protocol) + data(1, bytes(range(256)) * 8))
    await mallory.send(opening(3, protocol) + data(3, b"\xff" * 64) + frame(WINDOW, FIN, 3, 0))


async def _reset(mallory: Hostile, protocol: str) -> None:
    for n in range(1, 65, 2):
        await mallory.send(opening(n, protocol) + frame(WINDOW, RST, n, 0))


STREAMS: dict[str, Callable[[Hostile, str], Awaitable[None]]] = {
    "more than its window": _overrun,
    "opened and left": _hang,
    "ended at once": _half_close,
    "a frame begun and left": _begin,
    "nonsense": _babble,
    "reset at once": _reset,
}
"""What is done with streams of a protocol that the peer serves."""

CATALOGUE: dict[str, Any] = {
    "before noise": BEFORE_NOISE,
    "negotiation": NEGOTIATIONS,
    "frames": FRAMES,
    "streams": STREAMS,
}
"""Every attack by its stage and name."""


async def attack(
    address: str,
    stage: str,
    which: str,
    key: Identity,
    protocols: Sequence[str],
    source: str | None = None,
) -> None:
    """Carry out one attack of the catalogue, two seconds long at most."""
    on_yamux = partial(_beside_reading, address, key, source)
    with trio.move_on_after(2), suppress(OSError, trio.BrokenResourceError):
        if stage == "before noise":
            async with tcp(address, source) as stream:
                await stream.send_all(BEFORE_NOISE[which])
                await trio.sleep(HOLD_SECONDS)
        elif stage == "streams":
            for protocol in protocols:
                await on_yamux(lambda mallory, p=protocol: STREAMS[which](mallory, p))  # type: ignore[misc]
        else:
            raw = FRAMES[which] if stage == "frames" else data(1, NEGOTIATIONS[which], SYN)
            await on_yamux(lambda mallory: mallory.send(raw))


async def flood(address: str, key: Identity, protocol: str, source: str) -> int:
    """As much data as a peer takes on streams that ignore their windows, for two seconds, again
    and again from the start when it ends the connection. Returns how many bytes were sent."""
    sent = 0

    async def fill(mallory: Hostile) -> None:
        nonlocal sent
        for stream in range(1, 2001, 2):
            await mallory.send(opening(stream, protocol))
            for _ in range(6):
                await mallory.send(data(stream, bytes(65000)))
                sent += 65000

    with trio.move_on_after(2):
        while True:
            with suppress(Exception):
                await _beside_reading(address, key, source, fill)
    return sent


async def _beside_reading(
    address: str, key: Identity, source: str | None, act: Callable[[Hostile], Awaitable[None]]
) -> None:
    """Do something on a connection whose answers are read."""
    async with connected(address, key, source) as mallory, trio.open_nursery() as nursery:
        nursery.start_soon(mallory.drain)
        with suppress(Exception):  # whatever libp2p raises when it is thrown out
            await act(mallory)
        await trio.sleep(HOLD_SECONDS)
        nursery.cancel_scope.cancel()


async def served_protocols(address: str, key: Identity) -> list[str]:
    """What a peer says that it serves."""
    async with connected(address, key) as mallory:
        await mallory.send(data(1, MULTISTREAM + name("ls"), SYN))
        got = bytearray()
        while len(got) <= len(MULTISTREAM) or not got.endswith(b"\n\n"):
            kind, _, stream, body = await mallory.receive()
            if kind == DATA and stream == 1:
                got += body
        listed = bytes(got[len(MULTISTREAM) :])
        return [line for line in listed[listed.index(b"/") :].decode().split("\n") if line]
