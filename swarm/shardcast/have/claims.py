"""Claims: what the neighbours say they hold, and the frames of `/swarm/have/2.0.0` that say it.

A claim only decides which source is asked for which piece. So a lie costs one refused request, and
lowers the liar's success rate as a source."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
import trio
from msgspec import Meta

from swarm.shardcast import limits
from swarm.shardcast.rarity import Rarity, bits_of
from swarm.wire.identity import PeerId
from swarm.wire.messages import Digest

ENTRIES_MAX = 16

CLAIMS_MAX = 256
"""Checkpoints remembered per neighbour; the oldest is forgotten. Trainers that merge hold one for
each contribution of some rounds."""

CLAIMED_PIECES_MAX = 16 * limits.CHECKPOINT_PIECES_MAX
"""Pieces of all checkpoints remembered per neighbour: 128 KiB."""

PROTOCOL = "/swarm/have/2.0.0"

_BITMAP_BYTES_MAX = limits.CHECKPOINT_PIECES_MAX // 8
_INDICES_MAX = 4096
"""Pieces named in one entry; more are sent as a bitmap."""
FRAME_BYTES_MAX = 512 * 1024
_Index = Annotated[int, Meta(ge=0, lt=limits.CHECKPOINT_PIECES_MAX)]


class Bitmap(msgspec.Struct, array_like=True, frozen=True, tag="bitmap"):
    manifest: Digest
    pieces: Annotated[bytes, Meta(max_length=_BITMAP_BYTES_MAX)]


class Pieces(msgspec.Struct, array_like=True, frozen=True, tag="pieces"):
    manifest: Digest
    indices: Annotated[list[_Index], Meta(max_length=_INDICES_MAX)]
    count: Annotated[int, Meta(ge=0, le=limits.CHECKPOINT_PIECES_MAX)]
    """Number of all pieces held: `indices` leaves out those that the receiver claims itself."""


class Complete(msgspec.Struct, array_like=True, frozen=True, tag="complete"):
    manifest: Digest


class Gone(msgspec.Struct, array_like=True, frozen=True, tag="gone"):
    manifest: Digest


Entry: TypeAlias = Bitmap | Pieces | Complete | Gone
Frame: TypeAlias = Annotated[list[Entry], Meta(max_length=ENTRIES_MAX)]

_decoder: msgspec.msgpack.Decoder[list[Entry]] = msgspec.msgpack.Decoder(Frame)
decode = _decoder.decode
"""The entries of a frame; raises `DECODE_ERRORS`."""


def bitmap(manifest: bytes, bits: int) -> Bitmap:
    return Bitmap(manifest, bits.to_bytes((bits.bit_length() + 7) // 8, "little"))


def indices_of(bits: int) -> list[int]:
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def encode(entries: list[Entry]) -> bytes:
    return msgspec.msgpack.encode(entries)


@dataclass(slots=True, eq=False)
class Claim:
    """The pieces that one peer claims to hold of one checkpoint."""

    complete: bool = False
    bits: int = 0
    """Bit i is piece i; 0 once complete. Pieces that were announced to it may be absent."""
    count: int = 0
    """Number of pieces that it claimed to hold at `at`, unless it is complete."""
    at: float = 0.0
    pieces_per_second: float = 0.0
    """How fast that number grew before."""

    def has(self, index: int) -> bool:
        """Whether it claims this piece; the manifest (-1) only with the whole checkpoint."""
        return self.complete or (index >= 0 and bool(self.bits >> index & 1))

    def of(self, pieces: int) -> int:
        return pieces if self.complete else pieces & self.bits

    def lacks(self, pieces: int, now: float) -> float:
        """Number of pieces that it lacks by now, of a checkpoint with `pieces` pieces, if it goes
        on as before its last announcement, which may be a minute old."""
        if self.complete:
            return 0.0
        since = self.pieces_per_second * (now - self.at)
        return max(0.0, pieces - self.count - since)

    def counted(self, count: int) -> None:
        now = trio.current_time()
        if self.at:
            self.pieces_per_second = max(0, count - self.count) / max(now - self.at, 1.0)
        self.at, self.count = now, count


class Claims:
    """The claims of every neighbour that announces to this peer."""

    def __init__(self) -> None:
        self._claims: dict[PeerId, OrderedDict[bytes, Claim]] = {}
        self._pieces: dict[PeerId, int] = {}
        """Length of all bit sets of a neighbour's claims."""
        self._rarity: dict[bytes, Rarity] = {}
        self._on_change: list[Callable[[PeerId, Collection[bytes] | None], None]] = []
        self._heard = trio.Event()
        """Set at the next announcement of any neighbour, and then replaced."""

    def __len__(self) -> int:
        return len(self._claims)

    def begin(self, peer: PeerId) -> None:
        """Start an empty record of a peer's claims; forgets its earlier ones."""
        self.forget(peer)
        self._claims[peer] = OrderedDict()
        self._pieces[peer] = 0

    def of(self, peer: PeerId, manifest: bytes) -> Claim | None:
        """A neighbour's claim on a checkpoint; None if it announced nothing of it."""
        claims = self._claims.get(peer)
        return claims.get(manifest) if claims is not None else None

    def announces(self, peer: PeerId) -> bool:
        """Whether a peer announces to this one: then its silence about a checkpoint has meaning."""
        return peer in self._claims

    def claiming(self, manifest: bytes) -> list[PeerId]:
        """The neighbours that announced anything of a checkpoint."""
        return [peer for peer, claims in self._claims.items() if manifest in claims]

    async def wait_claimed(self, manifest: bytes, seconds: float) -> bool:
        """Whether any neighbour claims anything of a checkpoint, now or within `seconds`."""
        with trio.move_on_after(seconds):
            while not self.claiming(manifest):
                await self._heard.wait()
        return bool(self.claiming(manifest))

    def rarest(self, manifest: bytes, pieces: int) -> int:
        """The subset of `pieces` that fewest neighbours have. Complete neighbours are not counted:
        they make no piece rarer than another."""
        rarity = self._rarity.get(manifest)
        return rarity.rarest(pieces) if rarity is not None else pieces

    def on_change(self, callback: Callable[[PeerId, Collection[bytes] | None], None]) -> None:
        """Call `callback(peer, manifests)` at each change of a neighbour's claims."""
        self._on_change.append(callback)

    def changed(self, peer: PeerId, manifests: Collection[bytes] | None = None) -> None:
        """Notify all that wait for claims (of `manifests`; None: any) that may have changed."""
        self._heard.set()
        self._heard = trio.Event()
        for callback in self._on_change:
            callback(peer, manifests)

    def forget(self, peer: PeerId) -> None:
        self._pieces.pop(peer, None)
        for digest, claim in self._claims.pop(peer, {}).items():
            self._count(digest, claim.bits, 0)

    def _count(self, digest: bytes, old: int, new: int) -> None:
        """Count that one neighbour now claims the pieces `new` instead of `old`."""
        rarity = self._rarity.get(digest)
        if rarity is None:
            if not new:
                return
            rarity = self._rarity[digest] = Rarity()
        rarity.remove(old & ~new)
        rarity.add(new & ~old)
        if rarity.empty():
            del self._rarity[digest]

    def apply(self, peer: PeerId, entry: Entry) -> None:
        """Apply an entry to a neighbour's claims; too many, and the oldest are forgotten."""
        claims, digest = self._claims[peer], entry.manifest
        if isinstance(entry, Gone):
            if digest in claims:
                self._drop(peer, digest)
            return
        claim = claims.setdefault(digest, Claim())
        old = claim.bits
        if isinstance(entry, Complete):
            claim.complete = True
            claim.bits = 0
        elif isinstance(entry, Bitmap):
            claim.complete = False
            claim.bits = int.from_bytes(entry.pieces, "little")
            claim.counted(claim.bits.bit_count())
        elif not claim.complete:
            named = bytearray(max(entry.indices, default=-1) + 1)
            for index in entry.indices:
                named[index] = 1
            claim.bits |= bits_of(named)
            claim.counted(entry.count)
        self._count(digest, old, claim.bits)
        self._pieces[peer] += claim.bits.bit_length() - old.bit_length()
        while len(claims) > CLAIMS_MAX or self._pieces[peer] > CLAIMED_PIECES_MAX:
            self._drop(peer, next(iter(claims)))

    def _drop(self, peer: PeerId, digest: bytes) -> None:
        bits = self._claims[peer].pop(digest).bits
        self._count(digest, bits, 0)
        self._pieces[peer] -= bits.bit_length()
