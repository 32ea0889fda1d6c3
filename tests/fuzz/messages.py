"""Targets for messages: envelopes, ledger, gossip, HAVE, DHT, manifests, child processes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import trio

from swarm.errors import DECODE_ERRORS, PeerError, UserError
from swarm.gossip import topics as gossip
from swarm.kademlia import wire as dht
from swarm.ledger import entries, merkle
from swarm.ledger import wire as ledger
from swarm.ledger.client import LedgerClient
from swarm.run.manifest import check_manifest, content_digest, manifest_in
from swarm.run.run import Run
from swarm.shardcast import limits as shardcast_limits
from swarm.shardcast import manifest as checkpoints
from swarm.shardcast.have import claims as have
from swarm.shardcast.mirror.folder import Index
from swarm.transport.http import messages as pieces
from swarm.transport.http.messages import split_root
from swarm.wire.envelope import UNKNOWN_BYTES_MAX, Dropped, Envelope, open_envelope
from swarm.wire.identity import Identity
from swarm.wire.kinds import KINDS, kind_of
from swarm.wire.messages import (
    AdmissionRequest,
    Checkpoint,
    CheckpointReference,
    EnvironmentEvaluation,
    Evaluation,
    Eviction,
    Heartbeat,
    Invite,
    LogHead,
    Message,
    PeerRecord,
    Present,
    Submission,
)
from swarm.world import frames as children
from tests.docs import vectors
from tests.fuzz.target import Target
from tests.network.harness import manifest as run_manifest
from tests.network.harness import sealed

OWNER = Identity(bytes(32))
WORKER = Identity(bytes(range(32)))
RUN = f"{OWNER.peer_id}/test"
DIGEST = bytes([1]) * 32

REFERENCE = CheckpointReference(lineage=0, step=3, digest=DIGEST, size_bytes=400)

MESSAGES: list[Message] = [
    Heartbeat(roles=["relay"], step=3, policy=2, doing="generating"),
    run_manifest([OWNER], [WORKER]),
    Checkpoint(reference=REFERENCE, total_bytes=10_000),
    vectors.verdict(),
    LogHead(size=5, root=DIGEST),
    Evaluation(
        reference=REFERENCE,
        state="done",
        environments=[EnvironmentEvaluation(label="a", reward=0.5, low=0.4, high=0.6, tokens=9.5)],
    ),
    Eviction(peer=WORKER.peer_id, reason="a forged file", submission=DIGEST),
    PeerRecord(roles=["relay"], addresses=["/ip4/127.0.0.1/tcp/4001"]),
    AdmissionRequest(roles=["inference"]),
    Invite(id=bytes(16)),
    Submission(lineage=0, step=3, policy=2, number=0, digest=DIGEST, size_bytes=4096, groups=4),
]

# --- envelopes ---


def _body(message: Message) -> bytes:
    return sealed(OWNER, message, RUN).raw[64:]


def _open(raw: bytes) -> Envelope | None:
    try:
        envelope = open_envelope(raw)
    except Dropped:
        return None
    body, message = envelope.body, envelope.message
    assert KINDS[body.kind] is type(message)
    for moment_ms in (body.issued_ms, body.expires_ms):
        assert datetime.fromtimestamp(moment_ms / 1000, UTC)  # commands print it
    assert _finite(msgspec.to_builtins(message)), "a number that is none passed the bounds"
    encoded = msgspec.msgpack.encode(message)
    assert len(body.payload) <= len(encoded) + UNKNOWN_BYTES_MAX
    again = msgspec.msgpack.decode(encoded, type=type(message))
    assert msgspec.msgpack.encode(again) == encoded
    return envelope


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return True


def check_envelope(raw: bytes) -> None:
    """Open bytes, and the same bytes as a body that their sender has signed."""
    _open(raw)
    try:
        kind = str(msgspec.msgpack.decode(raw)[1])
        domain = b"swarm/1/" + kind.encode() + b"\0"
    except (*DECODE_ERRORS, TypeError, LookupError, ValueError):
        return
    _open(OWNER.sign(domain + raw) + raw)


_KINDS = list(KINDS)


def check_message(raw: bytes) -> None:
    """Open the payload of a signed message; the first byte chooses its kind."""
    kind = _KINDS[raw[0] % len(_KINDS)] if raw else _KINDS[0]
    _open(signed(kind, raw[1:]))


def signed(kind: str, payload: bytes, run: str = RUN) -> bytes:
    """An envelope with any payload, signed by its sender."""
    fields = [1, kind, run, OWNER.peer_id, 1, 0, 1000, payload]
    body = msgspec.msgpack.encode(fields)
    return OWNER.sign(b"swarm/1/" + kind.encode() + b"\0" + body) + body


def check_run_manifest(raw: bytes) -> None:
    """Take a run manifest as a joining peer does, and as one that already has a version."""
    name = "test"
    with contextlib.suppress(*DECODE_ERRORS):
        name = msgspec.msgpack.decode(raw, type=KINDS["run_manifest"]).name  # type: ignore[attr-defined]
    try:
        envelope = check_manifest(signed("run_manifest", raw, f"{OWNER.peer_id}/{name}"), "here")
    except UserError as error:
        assert str(error).startswith("here is not a valid run manifest")
        return
    run = Run(envelope)
    assert run.version(content_digest(envelope)) is envelope
    held = Run(sealed(OWNER, run_manifest([OWNER], [WORKER]), RUN))
    held.refusal(envelope.sender, manifest_in(envelope))
    held.update(envelope)


def _payloads() -> list[bytes]:
    return [
        bytes([_KINDS.index(kind_of(message))]) + msgspec.msgpack.encode(message)
        for message in MESSAGES
    ]


# --- frames of msgpack ---


def again(
    decode: Callable[[bytes], Any],
    encode: Callable[[Any], bytes],
    raw: bytes,
    refusals: tuple[type[Exception], ...] = DECODE_ERRORS,
) -> Any:
    """Decode bytes; None if they are refused. What was read must survive another round."""
    try:
        value = decode(raw)
    except refusals:
        return None
    encoded = encode(value)
    assert encode(decode(encoded)) == encoded
    return value


def check_gossip(raw: bytes) -> None:
    frame = again(gossip.decode, gossip.encode, raw)
    if isinstance(frame, gossip.Have | gossip.Want):
        assert all(len(digest) == 32 for digest in frame.digests)
        assert len(list(gossip.chunks(frame.digests))) <= 1


def check_have(raw: bytes) -> None:
    for entry in again(have.decode, have.encode, raw) or []:
        if isinstance(entry, have.Bitmap):
            bits = int.from_bytes(entry.pieces, "little")
            assert bits.bit_length() <= shardcast_limits.CHECKPOINT_PIECES_MAX
        elif isinstance(entry, have.Pieces):
            assert max(entry.indices, default=0) < shardcast_limits.CHECKPOINT_PIECES_MAX


def check_entry(raw: bytes) -> None:
    entry = again(entries.decode, entries.encode, raw, (ValueError,))
    if entry is not None:
        assert _finite(msgspec.to_builtins(entry))


def check_pieces(raw: bytes) -> None:
    for decode in (pieces.decode_proof, pieces.decode_ask, pieces.decode_answer):
        again(decode, pieces.encode, raw)


class _Scripted:
    """A stream whose other side sends one frame."""

    peer = OWNER.peer_id

    def __init__(self, frame: bytes) -> None:
        self._frame = frame

    async def send(self, frame: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._frame


def check_ledger(raw: bytes) -> None:
    """Read an answer with every method of the client; also decode the bytes as a request."""
    again(ledger.request_decoder.decode, ledger.encoder.encode, raw)
    trio.run(_ask_everything, LedgerClient(_Scripted(raw)))  # type: ignore[arg-type]


async def _ask_everything(client: LedgerClient) -> None:
    with contextlib.suppress(PeerError):
        await client.head(OWNER.peer_id)
    with contextlib.suppress(PeerError):
        for raw in await client.entries(OWNER.peer_id, 0, 3):
            check_entry(raw)
    with contextlib.suppress(PeerError):
        hashes = await client.consistency(OWNER.peer_id, 3, 5)
        assert not merkle.verify_consistency(3, 5, DIGEST, bytes(32), hashes)
    with contextlib.suppress(PeerError):
        for proof in await client.inclusions(OWNER.peer_id, [0, 7], 9):
            assert not merkle.verify_inclusion(DIGEST, 7, 9, proof, bytes(32))
    with contextlib.suppress(PeerError):
        for verdict in await client.verdicts(OWNER.peer_id, 0):
            check_entry(verdict.entry)
    with contextlib.suppress(PeerError):
        await client.status()
    with contextlib.suppress(PeerError):
        assert len((await client.expulsions(OWNER.peer_id)).envelopes) <= ledger.EXPULSIONS_MAX


def check_child(raw: bytes) -> None:
    """Read a stream of frames as the owner of a compromised child, and one as a child."""
    trio.run(_read_frames, raw)
    again(children.decode_request, lambda frame: children.encode(frame)[4:], raw)


async def _read_frames(raw: bytes) -> None:
    left = bytearray(raw)

    async def receive(bytes_max: int) -> bytes:
        await trio.lowlevel.checkpoint()
        some = bytes(left[: min(bytes_max, 50)])
        del left[: len(some)]
        return some

    reader = children.FrameReader(receive)
    with contextlib.suppress(EOFError, *DECODE_ERRORS):
        while True:
            body = await reader.next()
            again(children.decode_response, lambda frame: children.encode(frame)[4:], body)


# --- the DHT, checkpoint manifests and mirrors ---


def check_dht(raw: bytes) -> None:
    message = again(dht.decode, dht.encode, raw, (dht.WireError,))
    if message is None:
        return
    assert dht.decode(dht.encode(message)) == message
    for peers in (message.closer_peers, message.provider_peers):
        assert len(peers) <= dht.PEERS_PER_MESSAGE_MAX
        for neighbour in peers:
            assert len(neighbour.addresses) <= dht.ADDRESSES_PER_PEER_MAX


def check_checkpoint_manifest(raw: bytes) -> None:
    try:
        manifest = checkpoints.parse(raw)
    except checkpoints.BadManifest as error:
        assert "\n" not in str(error)
        return
    assert checkpoints.parse(manifest.encode()) == manifest
    assert sum(piece.size_bytes for piece in manifest.pieces) == manifest.total_bytes
    for mirror in manifest.mirrors:
        split_root(mirror)


def check_mirror_index(raw: bytes) -> None:
    try:
        index = msgspec.json.decode(raw, type=Index)
    except DECODE_ERRORS:
        return
    with contextlib.suppress(UserError):
        assert len(index.checkpoint().reference.digest) == 32


def _checkpoint_manifests() -> list[bytes]:
    size = shardcast_limits.PIECE_BYTES_MIN
    sizes = {"config.json": 700, "a/model.safetensors": 2 * size + 5}
    files = [checkpoints.ManifestFile(name, each, DIGEST) for name, each in sizes.items()]
    return [
        checkpoints.CheckpointManifest(
            run=RUN,
            lineage=0,
            step=3,
            piece_size=size,
            files=files,
            pieces=[
                checkpoints.ManifestPiece(file, offset, length, DIGEST)
                for file, offset, length in checkpoints.cut(list(sizes.values()), size)
            ],
            deltas=[checkpoints.DeltaLink(2, DIGEST, bytes(32), 300, 4000)],
            mirrors=["http://127.0.0.1:8000/a", "https://[::1]/"],
        ).encode()
    ]


def _dht_messages() -> list[bytes]:
    peer = dht.Neighbour(OWNER.peer_id, ("/ip4/9.9.9.9/tcp/1", "/dns4/example.org/tcp/2"))
    return [
        dht.encode(dht.Message(dht.MessageType.PING, record=dht.Record())),
        dht.encode(dht.Message(dht.MessageType.FIND_NODE, b"key", closer_peers=(peer, peer))),
        dht.encode(dht.Message(dht.MessageType.PUT_VALUE, b"/a/b", dht.Record(b"/a/b", bytes(90)))),
        dht.encode(dht.Message(dht.MessageType.ADD_PROVIDER, DIGEST, provider_peers=(peer,))),
    ]


def _ledger_frames() -> list[bytes]:
    envelope = sealed(OWNER, LogHead(size=5, root=DIGEST), RUN).raw
    entry = entries.encode(entries.judged(vectors.verdict()))
    present = Present(
        peer=WORKER.peer_id,
        heartbeat=Heartbeat(roles=["inference"]),
        age_seconds=1.5,
        standing="live",
    )
    frames: Sequence[Any] = [
        ledger.Head(envelope),
        ledger.Entries([entry, entry]),
        ledger.Origin(3, [DIGEST, DIGEST]),
        ledger.Proof([DIGEST, DIGEST]),
        ledger.Proofs([[DIGEST], []]),
        ledger.Verdicts([ledger.LoggedVerdict(4, entry, envelope)]),
        ledger.Status([envelope], [present]),
        ledger.Expulsions([envelope]),
        ledger.Refusal("not here"),
        ledger.EntriesRequest(OWNER.peer_id, 0, 5),
        ledger.OriginRequest(OWNER.peer_id),
        ledger.InclusionsRequest(OWNER.peer_id, [1, 2], 9),
    ]
    return [ledger.encoder.encode(frame) for frame in frames]


def _entries() -> list[bytes]:
    envelope = sealed(OWNER, MESSAGES[5], RUN).raw
    return [
        entries.encode(entry)
        for entry in (
            entries.judged(vectors.verdict()),
            entries.Evicted(peer=WORKER.peer_id, reason="a reason", envelope=envelope),
            entries.CheckpointPublished(
                lineage=0, step=3, manifest=DIGEST, round=entries.RoundFigures(loss=1.5)
            ),
            entries.Consumed(step=3, submission=DIGEST, outcomes=["consumed", "stale"]),
            entries.Carried(position=3, entry=b"an entry"),
            entries.SealedWorker(
                worker=WORKER.peer_id,
                final=3,
                capitals=[entries.SealedCapital(submissions=1, entered=[-5, 3])],
            ),
            entries.Sealed(
                epoch=1,
                lineage=0,
                step=3,
                logs=[entries.SealedLog(owner=WORKER.peer_id, size=4, root=DIGEST, first=2)],
                rules=DIGEST,
                totals=DIGEST,
                block=2,
            ),
        )
    ]


def _child_frames() -> list[bytes]:
    said: list[children.Response] = [
        children.Progress(1),
        children.Answer(1, children.raw({"a": 1})),
        children.Failed(2, "ValueError", "no"),
    ]
    calls: list[children.Request] = [
        children.Call(1, "read", children.raw({"path": "x"})),
        children.Cancel(1),
    ]
    return [b"".join(map(children.encode, said)), *(children.encode(call)[4:] for call in calls)]


TARGETS = [
    Target("envelope", check_envelope, lambda: [_body(message) for message in MESSAGES]),
    Target("message", check_message, _payloads),
    Target("run-manifest", check_run_manifest, lambda: [msgspec.msgpack.encode(MESSAGES[1])]),
    Target(
        "gossip",
        check_gossip,
        lambda: [
            gossip.encode(frame)
            for frame in (
                gossip.Hello(RUN, 1_800_000_000_000, ["run", "work"], [bytes(70)], bytes(70)),
                gossip.Shown(bytes(70)),
                gossip.Push(bytes(70)),
                gossip.Have([DIGEST] * 3),
                gossip.Want([DIGEST]),
            )
        ],
    ),
    Target(
        "have",
        check_have,
        lambda: [
            have.encode([have.bitmap(DIGEST, 0x1234567), have.Pieces(DIGEST, [0, 5, 65_535], 9)]),
            have.encode([have.Complete(DIGEST), have.Gone(bytes(32))]),
        ],
    ),
    Target("ledger", check_ledger, _ledger_frames),
    Target("entry", check_entry, _entries),
    Target(
        "pieces",
        check_pieces,
        lambda: [
            pieces.encode(pieces.Proof(OWNER.peer_id, bytes(64), bytes(80))),
            pieces.encode(pieces.Ask(True, DIGEST, 5, bytes(80))),
            pieces.encode(pieces.Answer(403, "no", 0)),
        ],
    ),
    Target("child", check_child, _child_frames),
    Target("dht", check_dht, _dht_messages),
    Target("checkpoint-manifest", check_checkpoint_manifest, _checkpoint_manifests),
    Target(
        "mirror-index",
        check_mirror_index,
        lambda: [
            msgspec.json.encode(
                Index(
                    run=RUN,
                    lineage=0,
                    step=3,
                    manifest=DIGEST.hex(),
                    manifest_bytes=300,
                    total_bytes=9,
                )
            )
        ],
    ),
]
