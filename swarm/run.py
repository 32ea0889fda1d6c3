"""A run: its signed manifest, who may say what in it, and how peers find it.

The owner signs a *run manifest*; its id is `<owner peer id>/<name>`. A peer hands out the manifests
it knows over `/swarm/runs/1.0.0`, older versions when asked for one by its digest, and takes newer
ones there. The owner's key is pinned on first use, so that a bootstrap peer cannot later hand out
another run under the same name.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import blake3
import msgspec
import trio

from swarm import PROTOCOL_VERSION, defaults
from swarm.changes import NEVER, Change, changes
from swarm.envelope import Dropped, Envelope, open_envelope
from swarm.errors import PeerError, UserError
from swarm.identity import InvalidPeerId, PeerId, public_key_of
from swarm.kademlia.providers import provider_key
from swarm.kademlia.records import InvalidRecord, RecordInfo
from swarm.messages import (
    Acknowledgement,
    Admission,
    AdmissionRefused,
    AdmissionRequest,
    Checkpoint,
    Eviction,
    Heartbeat,
    LogHead,
    Message,
    Optimiser,
    PeerRecord,
    Presence,
    Reinstatement,
    RunManifest,
    StepOrder,
    Verdict,
)
from swarm.run_check import check_batch, check_manifest_numbers
from swarm.transport import Stream, Transport
from swarm.world import Disk

PROTOCOL = "/swarm/runs/1.0.0"
VERSIONS_KEPT = 16
"""Versions of a run's manifest that a peer remembers (about 2 KB each): steps follow the one that
was the newest when they were opened, and few are open or young enough to be trained on."""
VERSION_REFUSED = "version_refused"
"""Why the gate drops a manifest that `Run.refusal` has a sentence for."""
BOOTSTRAP_SECONDS = 15.0
"""A trusted peer compares manifests with the bootstrap peers so often: an owner hands a new version
to one of them, or restarts it with a new file."""

LIST = b"list"
"""Asks for the newest manifest of every run known."""
DIGEST_BYTES = 32

RUN_NAMESPACE = "swarm-run"
PEER_NAMESPACE = "swarm-peer"
_PINS = "pinned-runs.json"

StructT = TypeVar("StructT", bound=msgspec.Struct)


def run_id(manifest: Envelope) -> str:
    """`<owner peer id>/<name>`."""
    message = manifest.message
    assert isinstance(message, RunManifest)
    return f"{manifest.sender}/{message.name}"


def manifest_in(envelope: Envelope) -> RunManifest:
    """The run manifest that an envelope carries."""
    assert isinstance(envelope.message, RunManifest)
    return envelope.message


def content_digest(manifest: Envelope) -> bytes:
    """BLAKE3-256 of a run manifest's payload: names what it says, whenever it was signed."""
    return blake3.blake3(manifest.body.payload).digest()


def run_key(run: str) -> bytes:
    """DHT key of a run's manifest."""
    return f"/{RUN_NAMESPACE}/{run}".encode()


def peer_key(peer: str) -> bytes:
    """DHT key of a peer's record."""
    return f"/{PEER_NAMESPACE}/{peer}".encode()


def checkpoint_key(manifest_digest: bytes) -> bytes:
    """DHT key under which holders of a checkpoint provide it: the multihash of its manifest."""
    return provider_key(manifest_digest)


# --- who may say what --------------------------------------------------------------------------


class Run:
    """What one peer believes about its run: its manifest's versions, and who is evicted.

    A step follows the version that its order names, whatever came since; `manifest`, the newest,
    says what belongs to no step: who is trusted, who may take part.
    """

    def __init__(self, manifest: Envelope, older: Sequence[Envelope] = ()) -> None:
        """`older`: versions known of this run, the newest last."""
        self.id = run_id(manifest)
        self.owner = manifest.sender
        self._envelope = manifest
        self._versions: dict[bytes, Envelope] = {}
        self._evictions: dict[str, Envelope] = {}
        self._reinstatements: dict[str, Envelope] = {}
        self.clocks_off: dict[str, float] = {}
        """Seconds by which trusted peers' clocks differ from this one's, where it matters
        (`swarm.membership.TrustedClock`)."""
        self.revision = 0
        """Grows with every manifest, eviction and reinstatement that is taken."""
        for version in [*older, manifest]:
            self.keep(version)

    @property
    def manifest(self) -> RunManifest:
        """The newest version."""
        return manifest_in(self._envelope)

    @property
    def manifest_envelope(self) -> Envelope:
        return self._envelope

    def update(self, manifest: Envelope) -> bool:
        """Take a newer manifest of the same run, unless there is a `refusal`; whether it was."""
        new = manifest_in(manifest)
        if run_id(manifest) != self.id or new.version <= self.manifest.version:
            return False
        if self.refusal(new) is not None:
            return False
        self._envelope = manifest
        self.keep(manifest)
        return True

    def keep(self, manifest: Envelope) -> None:
        """Remember a version of this run, the newest or not, for the steps that follow it."""
        self._versions[content_digest(manifest)] = manifest
        self.revision += 1
        if len(self._versions) > VERSIONS_KEPT:
            newest = content_digest(self._envelope)
            del self._versions[next(digest for digest in self._versions if digest != newest)]

    def versions(self) -> list[Envelope]:
        """The versions remembered, in the order in which they came."""
        return list(self._versions.values())

    def version(self, digest: bytes) -> Envelope | None:
        """The version of this content, if it is remembered."""
        return self._versions.get(digest)

    def manifest_of(self, order: StepOrder) -> RunManifest | None:
        """The manifest that an order's step follows, if it is remembered. An order that names none
        comes from an older Swarm, in which the newest counted."""
        if not order.run_digest:
            return self.manifest
        held = self._versions.get(order.run_digest)
        return manifest_in(held) if held is not None else None

    def refusal(self, new: RunManifest) -> str | None:
        """Why a manifest that the owner has signed is not taken, in one sentence, or None."""
        known = [manifest_in(each) for each in self._versions.values()]
        for held in known:
            if held.version == new.version and new not in known:
                return (
                    f"version {new.version} of the run was signed with other content before "
                    f"({_listed(changes(held, new))}); the first stays, and a change needs a "
                    "higher version"
                )
        if new.version <= self.manifest.version:
            return None
        impossible = [c.field for c in changes(self.manifest, new) if c.when == NEVER]
        if impossible:
            return f"version {new.version} changes {', '.join(impossible)}, which is {NEVER}"
        # Only what would end the trainer: peers with other versions of Swarm must agree on it.
        try:
            check_batch(new, f"version {new.version} of the run")
        except UserError as error:
            return str(error)
        problem = new.objective.problem(new.schedule)
        return None if problem is None else f"version {new.version} of the run: {problem}"

    @property
    def max_staleness(self) -> int:
        """The largest of any version remembered: what is older, no step can use."""
        return max(manifest_in(each).schedule.max_staleness for each in self._versions.values())

    def evict(self, envelope: Envelope) -> None:
        """Take an eviction by a trusted peer; the newest for each peer counts."""
        assert isinstance(envelope.message, Eviction)
        self._newest(self._evictions, envelope.message.peer, envelope)

    def reinstate(self, envelope: Envelope) -> None:
        """Take the owner's reinstatement."""
        assert isinstance(envelope.message, Reinstatement)
        self._newest(self._reinstatements, envelope.message.peer, envelope)

    def _newest(self, held: dict[str, Envelope], peer: str, envelope: Envelope) -> None:
        old = held.get(peer)
        if old is None or old.body.issued_ms < envelope.body.issued_ms:
            held[peer] = envelope
            self.revision += 1

    def evicted(self, peer: str) -> Eviction | None:
        """The eviction in force against a peer, if any. Trusted peers are never evicted."""
        eviction = self._evictions.get(peer)
        if eviction is None or peer in self.manifest.trusted_ids():
            return None
        reinstatement = self._reinstatements.get(peer)
        if reinstatement and reinstatement.body.issued_ms > eviction.body.issued_ms:
            return None
        assert isinstance(eviction.message, Eviction)
        return eviction.message

    def expulsions_of(self, peer: str) -> list[Envelope]:
        """The newest eviction and the newest reinstatement of a peer, as far as there are any."""
        found = (self._evictions.get(peer), self._reinstatements.get(peer))
        return [envelope for envelope in found if envelope is not None]

    def passes_on(self, peer: str, roles: Sequence[str]) -> bool:
        """Whether a peer with these roles passes on the checkpoints it has. In `relay-only` mode
        only relays and trusted peers do; others have nothing to do with a peer that does not."""
        if self.manifest.broadcast_mode == "open":
            return True
        return "relay" in roles or peer in self.manifest.trusted_ids()

    def trusts(self, peer: str) -> bool:
        """Whether a peer is the owner, or a trainer or validator in force."""
        return peer == self.owner or peer in self.manifest.trusted_ids()

    def clock_off(self, peer: str) -> float:
        """By how many seconds a trusted peer's clock is known to differ; 0 if it hardly does."""
        return self.clocks_off.get(peer, 0.0)

    def permits(self, sender: str, message: Message) -> str | None:
        """Why this sender may not send this message, or None (what `envelope.Gate` asks)."""
        manifest = self.manifest
        allowed = True
        if isinstance(message, RunManifest):
            allowed = sender == self.owner and message.name == manifest.name
            if allowed and self.refusal(message) is not None:
                return VERSION_REFUSED
        elif isinstance(message, (Checkpoint, StepOrder)):
            allowed = manifest.is_trainer(sender)
        elif isinstance(message, (Verdict, Acknowledgement)):
            allowed = manifest.is_validator(sender)
        elif isinstance(message, Reinstatement):
            allowed = sender == self.owner
        elif isinstance(message, (Presence, LogHead, Eviction, Admission, AdmissionRefused)):
            allowed = sender in manifest.trusted_ids()
        if not allowed:
            return "not_permitted"
        if isinstance(message, (Heartbeat, AdmissionRequest)):
            return None  # the registrar answers these with the reason
        return "evicted" if self.evicted(sender) is not None else None


def _listed(found: Sequence[Change]) -> str:
    return "; ".join(f"{each.field} {each.old} → {each.new}" for each in found)


# --- manifests on disk -------------------------------------------------------------------------


def load_manifest(path: Path) -> Envelope:
    """A signed manifest from a file written by `swarm run create`; raises `UserError`."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"run manifest {path} cannot be read ({error.strerror})") from error
    return check_manifest(raw, str(path))


def check_manifest(raw: bytes, where: str) -> Envelope:
    """Bytes as a signed manifest; raises `UserError` saying what is wrong and `where`."""
    try:
        envelope = open_envelope(raw)
    except Dropped as dropped:
        hint = (
            f"; it needs another version of Swarm (this one speaks {PROTOCOL_VERSION})"
            if dropped.cause == "unknown_version"
            else ""
        )
        raise UserError(f"{where} is not a valid run manifest ({dropped}){hint}") from dropped
    if not isinstance(envelope.message, RunManifest) or envelope.body.run != run_id(envelope):
        raise UserError(f"{where} holds a {envelope.body.kind}, not a run manifest")
    return envelope


def manifest_from_toml(path: Path, computed: Mapping[str, Any]) -> RunManifest:
    """The manifest that a TOML file describes; `computed` are fields no person should type.

    Tables and keys are named as the fields of `swarm.messages.RunManifest`; peers are listed by
    id. Raises `UserError` naming the field and the value.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    _refuse_old_keys(table, path)
    for field in ("trainers", "validators"):
        entries = table.setdefault(field, [])
        if isinstance(entries, list):
            table[field] = [
                {"peer": _peer_id(entry, f"{path}: {field}")} if isinstance(entry, str) else entry
                for entry in entries
            ]
    for name, value in computed.items():
        section, _, key = name.rpartition(".")
        target = table.setdefault(section, {}) if section else table
        if isinstance(target, dict):
            target[key] = value
    manifest = struct_from_mapping(RunManifest, table, str(path))
    check_manifest_numbers(manifest, str(path))
    return manifest


OLD_KEYS = {f"objective.{name}": f"optimiser.{name}" for name in Optimiser.__struct_fields__}
"""What keys of a run's TOML file were called before, and their names now."""


def _refuse_old_keys(table: Mapping[str, Any], path: Path) -> None:
    for old, new in OLD_KEYS.items():
        section, _, key = old.rpartition(".")
        found = table.get(section) if section else table
        if isinstance(found, dict) and key in found:
            raise UserError(f"{path}: {old} is called {new} now; rename it")


def _peer_id(text: str, field: str) -> str:
    try:
        public_key_of(text)
    except InvalidPeerId as error:
        raise UserError(f"{field}: {error}") from error
    return text


def struct_from_mapping(type_: type[StructT], table: Any, where: str) -> StructT:
    """Build a struct from a mapping by field name, refusing unknown keys; raises `UserError`."""
    if not isinstance(table, dict):
        raise UserError(f"{where} must be a table, not {type(table).__name__}")
    fields = {field.name: field for field in msgspec.structs.fields(type_)}
    for key in table:
        if key not in fields:
            raise UserError(f"{where}: unknown key {key!r}; there are: {', '.join(sorted(fields))}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        place = f"{where}: {name}"
        if name not in table:
            if field.required:
                raise UserError(f"{place} is missing")
            continue
        values[name] = _convert(field.type, table[name], place)
    return type_(**values)


def _convert(type_: Any, value: Any, where: str) -> Any:
    info = msgspec.inspect.type_info(type_)
    if isinstance(info, msgspec.inspect.StructType):
        return struct_from_mapping(info.cls, value, where)
    if isinstance(info, msgspec.inspect.ListType) and isinstance(
        info.item_type, msgspec.inspect.StructType
    ):
        if not isinstance(value, list):
            raise UserError(f"{where} must be a list, not {type(value).__name__}")
        if info.max_length is not None and len(value) > info.max_length:
            raise UserError(f"{where} has {len(value)} entries; {info.max_length} are the most")
        return [struct_from_mapping(info.item_type.cls, item, where) for item in value]
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise UserError(f"{where} is {value!r}: {error}") from error


# --- finding a run -----------------------------------------------------------------------------


def serve_manifests(
    transport: Transport,
    *,
    newest: Callable[[], Sequence[Envelope]],
    version: Callable[[bytes], Envelope | None],
    hear: Callable[[Envelope], Envelope | None],
) -> None:
    """Hand out run manifests: the `newest` of each run known, or the `version` of some content.
    `hear` takes one that is brought here, and gives the newest known of its run after that."""

    async def answer(stream: Stream) -> None:
        asked = await stream.receive()
        if asked is None:
            return
        found: Sequence[Envelope | None]
        if asked == LIST:
            found = newest()[: defaults.MANIFESTS_MAX]
        elif len(asked) == DIGEST_BYTES:
            found = [version(asked)]
        else:
            try:
                found = [hear(check_manifest(asked, f"what {stream.peer} sent"))]
            except UserError:
                found = []
        for envelope in found:
            if envelope is not None:
                await stream.send(envelope.raw)
        await stream.end()

    transport.serve(PROTOCOL, answer, frame_bytes_max=defaults.ENVELOPE_BYTES_MAX)


async def ask_for_manifests(
    transport: Transport, peer: PeerId, asked: bytes = LIST
) -> list[Envelope]:
    """The manifests with which a connected peer answers, signatures checked; raises `PeerError`.

    `asked`: `LIST` for the newest of each run; a content's digest for that version; a whole
    manifest to bring it there and have the newest of its run.
    """
    found: dict[str, Envelope] = {}
    try:
        with trio.fail_after(defaults.REQUEST_DEADLINE_SECONDS):
            stream = await transport.open_stream(peer, PROTOCOL)
            await stream.send(asked)
            await stream.end()
            while (raw := await stream.receive()) is not None and len(
                found
            ) < defaults.MANIFESTS_MAX:
                try:
                    envelope = check_manifest(raw, f"what {peer} sent")
                except UserError as error:
                    raise PeerError(str(error)) from error
                found[run_id(envelope)] = envelope
    except trio.TooSlowError as error:
        raise PeerError(f"{peer} did not list its runs in time") from error
    return [envelope for _, envelope in sorted(found.items())]


def choose_run(manifests: Sequence[Envelope], wanted: str | None) -> Envelope:
    """The manifest to join: the only one, or the one `--run` names; raises `UserError`."""
    names = ", ".join(run_id(envelope) for envelope in manifests) or "none"
    if wanted is None:
        if len(manifests) == 1:
            return manifests[0]
        if not manifests:
            raise UserError(
                "the bootstrap peer knows no run; ask its operator, or start it with "
                "--manifest FILE"
            )
        raise UserError(f"the bootstrap peer knows several runs; choose one with --run: {names}")
    matching = [
        envelope
        for envelope in manifests
        if wanted in (run_id(envelope), run_id(envelope).partition("/")[2])
    ]
    if len(matching) != 1:
        problem = "no run" if not matching else "several runs"
        raise UserError(f"the bootstrap peer knows {problem} named {wanted!r}; it knows: {names}")
    return matching[0]


async def pin_owner(disk: Disk, manifest: Envelope) -> None:
    """Remember a run's owner on first use; raises `UserError` when the name changes hands."""
    run = run_id(manifest)
    owner, _, name = run.partition("/")
    pins = json.loads(await disk.read(_PINS)) if disk.exists(_PINS) else {}
    pinned = pins.get(name)
    if pinned is None:
        await disk.write(_PINS, json.dumps({**pins, name: owner}, indent=1).encode())
    elif pinned != owner:
        raise UserError(
            f"the run {name!r} is signed by {owner}, but you joined it before when it was signed "
            f"by {pinned}; if the owner really changed, remove the entry from {_PINS} in --home"
        )


# --- records in the DHT ------------------------------------------------------------------------


class EnvelopeValidator:
    """Checks records of one namespace: a signed envelope of the right kind under its own key."""

    def __init__(
        self,
        message_type: type[Message],
        key_of: Callable[[Envelope], bytes],
        wall_time: Callable[[], float],
    ) -> None:
        self._message_type = message_type
        self._key_of = key_of
        self._wall_time = wall_time

    def validate(self, key: bytes, value: bytes) -> RecordInfo:
        """Version (manifest version, then sequence) and expiry; raises `InvalidRecord`."""
        try:
            envelope = open_envelope(value)
        except Dropped as dropped:
            raise InvalidRecord(str(dropped)) from dropped
        if not isinstance(envelope.message, self._message_type):
            raise InvalidRecord(f"a {envelope.body.kind} does not belong here")
        if self._key_of(envelope) != key:
            raise InvalidRecord("the envelope belongs under another key")
        body = envelope.body
        if body.issued_ms > (self._wall_time() + defaults.ENVELOPE_FUTURE_SECONDS_MAX) * 1000:
            raise InvalidRecord("issued in the future")
        major = envelope.message.version if isinstance(envelope.message, RunManifest) else 0
        return RecordInfo(version=(major << 64) | body.sequence, expires_wall_ms=body.expires_ms)


def record_validators(wall_time: Callable[[], float]) -> dict[str, EnvelopeValidator]:
    """The namespace validators of Swarm's DHT."""
    return {
        RUN_NAMESPACE: EnvelopeValidator(RunManifest, lambda e: run_key(run_id(e)), wall_time),
        PEER_NAMESPACE: EnvelopeValidator(PeerRecord, lambda e: peer_key(e.sender), wall_time),
    }
