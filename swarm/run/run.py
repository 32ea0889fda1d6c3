"""What one peer believes about its run, and who may say what in it."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.envelope import Envelope
from swarm.errors import UserError
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
    Presence,
    Reinstatement,
    RunManifest,
    StepOrder,
    Verdict,
)
from swarm.run.bounds import check_batch
from swarm.run.changes import NEVER, Change, changes
from swarm.run.manifest import content_digest, manifest_in, run_id

VERSIONS_KEPT = 16
"""Versions of a run's manifest that a peer remembers (about 2 KB each): steps follow the one that
was the newest when they were opened, and few are open or young enough to be trained on."""

VERSION_REFUSED = "version_refused"
"""Why the gate drops a manifest that `Run.refusal` has a sentence for."""


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
        (`swarm.run.clock.TrustedClock`)."""
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

    def serves(self, peer: str, roles: Sequence[str]) -> bool:
        """Whether a peer with these roles serves checkpoints to others. In `relay-only` mode only
        relays and trusted peers do; no peer connects to one that does not."""
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
