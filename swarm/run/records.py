"""Keys and validators of the DHT records about runs and peers."""

from collections.abc import Callable
from dataclasses import dataclass

from swarm.kademlia.providers import provider_key
from swarm.kademlia.records import InvalidRecord, RecordInfo
from swarm.run.manifest import run_id
from swarm.wire.envelope import FUTURE_SECONDS_MAX, Dropped, Envelope, open_envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Message, PeerRecord
from swarm.wire.succession import NotAuthorised, ownership_of

RUN_NAMESPACE = "swarm-run"

PEER_NAMESPACE = "swarm-peer"


def run_key(run: str) -> bytes:
    """Return the DHT key of a run's manifest."""
    return f"/{RUN_NAMESPACE}/{run}".encode()


def peer_key(peer: str) -> bytes:
    """Return the DHT key of a peer's record."""
    return f"/{PEER_NAMESPACE}/{peer}".encode()


def checkpoint_key(manifest_digest: bytes) -> bytes:
    """Return the DHT key of a checkpoint's providers: the multihash of its manifest."""
    return provider_key(manifest_digest)


@dataclass(eq=False)
class EnvelopeValidator:
    """Validates one namespace: signed envelopes of one message type under their own keys."""

    _message_type: type[Message]
    _key_of: Callable[[Envelope], bytes]
    _wall_time: Callable[[], float]

    def validate(self, key: bytes, value: bytes) -> RecordInfo:
        """Return a record's version (a manifest's precedence, then sequence) and expiry.

        Raises `InvalidRecord`."""
        try:
            envelope = open_envelope(value)
        except Dropped as dropped:
            raise InvalidRecord(str(dropped)) from dropped
        if not isinstance(envelope.message, self._message_type):
            raise InvalidRecord(f"a {envelope.body.kind} does not belong here")
        if self._key_of(envelope) != key:
            raise InvalidRecord("the envelope belongs under another key")
        body = envelope.body
        if body.issued_ms > (self._wall_time() + FUTURE_SECONDS_MAX) * 1000:
            raise InvalidRecord("issued in the future")
        try:
            is_manifest = isinstance(envelope.message, RunManifest)
            major = ownership_of(envelope).precedence if is_manifest else ()
        except NotAuthorised as error:
            raise InvalidRecord(str(error)) from error
        return RecordInfo(version=(*major, body.sequence), expires_wall_ms=body.expires_ms)


def record_validators(wall_time: Callable[[], float]) -> dict[str, EnvelopeValidator]:
    """Make the namespace validators of Swarm's DHT."""
    return {
        RUN_NAMESPACE: EnvelopeValidator(RunManifest, lambda e: run_key(run_id(e)), wall_time),
        PEER_NAMESPACE: EnvelopeValidator(PeerRecord, lambda e: peer_key(e.sender), wall_time),
    }
