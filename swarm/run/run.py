"""One peer's knowledge of its run, and the rules for who may send which message."""

from collections.abc import Sequence
from itertools import takewhile

from swarm.errors import UserError
from swarm.run.bounds import check_batch
from swarm.run.changes import NEVER, changes, values_listed
from swarm.run.manifest import content_digest, manifest_in, run_id
from swarm.wire import messages
from swarm.wire.envelope import Envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.outer import OuterStatus, RoundRecord
from swarm.wire.succession import NotAuthorised, Ownership, ownership, ownership_of
from swarm.wire.turns import EpisodeGrade, GradeRequest, Turn

VERSIONS_KEPT = 16
"""Number of versions of a run's manifest that a peer remembers (about 2 KB each). A step follows
the version that was the newest when it was opened, and few are open or young enough to train on."""

VERSION_REFUSED = "version_refused"
"""Cause with which the gate drops a manifest that `Run.refusal` refuses."""


class Run:
    """One peer's knowledge of its run: the manifest's versions and the evictions.

    A step follows the version that its order names, even if newer ones exist. `manifest`, the
    newest version, decides everything outside steps: which peers are trusted and admitted."""

    def __init__(self, manifest: Envelope, older: Sequence[Envelope] = ()) -> None:
        """`older` holds the known earlier versions of this run, newest last."""
        self.id = run_id(manifest)
        self._title = ownership_of(manifest)
        self.manifest_envelope = manifest
        self._trusted = frozenset(self.manifest.trusted_ids())
        self._versions: dict[bytes, Envelope] = {}
        self._evictions: dict[str, Envelope] = {}
        self._reinstatements: dict[str, Envelope] = {}
        self.clocks_off: dict[str, float] = {}
        """Seconds by which trusted peers' clocks differ from this peer's; small differences are
        left out (`swarm.run.clock.TrustedClock`)."""
        self.revision = 0
        """Counter of the manifests, evictions and reinstatements that were accepted."""
        for version in [*older, manifest]:
            self.keep(version)

    @property
    def owner(self) -> str:
        return self._title.owner

    @property
    def owners(self) -> tuple[str, ...]:
        """All owners that the run has had, the present one last."""
        return self._title.owners

    @property
    def takeovers(self) -> int:
        """How often a standby has taken a trainer's place since the owner signed last."""
        return self._title.takeovers

    @property
    def standby_place(self) -> int:
        """Place, among the standbys, of the one that signed the newest version; 0 if none did."""
        return -self._title.precedence[4]

    @property
    def manifest(self) -> RunManifest:
        return manifest_in(self.manifest_envelope)

    def update(self, manifest: Envelope) -> bool:
        """Accept a newer manifest of the same run unless there is a `refusal`.

        Returns whether it was accepted."""
        new = manifest_in(manifest)
        if run_id(manifest) != self.id or self.refusal(manifest.sender, new) is not None:
            return False
        new_title = ownership_of(manifest)
        if new_title.precedence <= self._title.precedence:
            return False
        self.manifest_envelope, self._title = manifest, new_title
        self._trusted = frozenset(new.trusted_ids())
        self.keep(manifest)
        return True

    def keep(self, manifest: Envelope) -> None:
        """Remember a version of this run, also an old one, for the steps that follow it."""
        self._versions[content_digest(manifest)] = manifest
        self.revision += 1
        if len(self._versions) > VERSIONS_KEPT:
            newest = content_digest(self.manifest_envelope)
            del self._versions[next(digest for digest in self._versions if digest != newest)]

    def versions(self) -> list[Envelope]:
        """List the remembered versions, in the order of their arrival."""
        return list(self._versions.values())

    def version(self, digest: bytes) -> Envelope | None:
        """Return the version with this content digest, if it is remembered."""
        return self._versions.get(digest)

    def manifest_of(self, order: messages.StepOrder) -> RunManifest | None:
        """Return the manifest that an order's step follows, if it is remembered.

        An order without a digest comes from an older Swarm, in which the newest version counted."""
        if not order.run_digest:
            return self.manifest
        held = self._versions.get(order.run_digest)
        return manifest_in(held) if held is not None else None

    def refusal(self, sender: str, new: RunManifest) -> str | None:
        """Return in one sentence why a version of the manifest is refused, or None."""
        try:
            found = ownership(self.id, sender, new)
        except NotAuthorised as error:
            return f"version {new.version} of the run: {error}"
        known = [(manifest_in(each), ownership_of(each)) for each in self._versions.values()]
        if any(held == new for held, _ in known):
            return None
        problem = self._usurpation(found, new)
        if problem is not None:
            return problem
        for held, its in known:
            if its.precedence == found.precedence:
                return (
                    f"version {new.version} of the run was signed with other content before "
                    f"({values_listed(changes(held, new))}); the first stays, and a change needs a "
                    "higher version"
                )
        if found.precedence <= self._title.precedence:
            return None
        impossible = [
            each.field
            for each in changes(self.manifest, new)
            if each.when == NEVER
            and (each.field != "successors" or found.owners == self._title.owners)
        ]
        if impossible:
            return f"version {new.version} changes {', '.join(impossible)}, which is {NEVER}"
        # Peers with other versions of Swarm must refuse the same manifests. Therefore only faults
        # that would end the trainer are checked.
        try:
            check_batch(new, f"version {new.version} of the run")
        except UserError as error:
            return str(error)
        problem = new.objective.problem(new.schedule)
        return None if problem is None else f"version {new.version} of the run: {problem}"

    def _usurpation(self, found: Ownership, new: RunManifest) -> str | None:
        """Why a manifest comes from another line of owners than this run's, or None."""
        mine, theirs = self._title.owners, found.owners
        if len(theirs) < len(mine):
            return (
                f"version {new.version} of the run is signed by {theirs[-1]}, whom {mine[-1]} has "
                "succeeded as the owner"
            )
        pairs = zip(mine, theirs, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        named = (*self._title.named, self.manifest.successors)[shared - 1]
        if shared < len(theirs) and theirs[shared] not in named:
            return f"version {new.version} of the run names an owner that no owner has named"
        return None

    @property
    def max_staleness(self) -> int:
        """Largest `max_staleness` of the remembered versions; no step can use older rollouts."""
        return max(manifest_in(each).schedule.max_staleness for each in self._versions.values())

    @property
    def checkpoints_kept(self) -> int:
        """Policies that a peer keeps: all whose rollouts may still be trained on, since they must
        be checked. With an outer loop, also the outer states that contributions may begin from, and
        the contributions of as many rounds, and their merged shards."""
        policies = max(self.manifest.checkpoints_kept, self.max_staleness + 2)
        outer = self.manifest.outer
        if not outer.rounds:
            return policies
        merged = outer.shards if outer.shards > 1 else 0
        contributors = len(self.manifest.trainers) + outer.strangers_max * outer.is_scored
        return policies + (2 * outer.staleness_max + 4) * (1 + contributors + merged)

    def _entitles(self, sender: str, manifest: RunManifest) -> bool:
        try:
            ownership(self.id, sender, manifest)
        except NotAuthorised:
            return False
        return True

    def expel(self, envelope: Envelope) -> None:
        """Accept a trusted peer's eviction or the owner's reinstatement. The newest counts."""
        message = envelope.message
        assert isinstance(message, (messages.Eviction, messages.Reinstatement))
        held = self._evictions if isinstance(message, messages.Eviction) else self._reinstatements
        old = held.get(message.peer)
        if old is None or old.body.issued_ms < envelope.body.issued_ms:
            held.pop(message.peer, None)  # the newest comes last
            held[message.peer] = envelope
            self.revision += 1

    def forget_evictions(self, kept: int) -> None:
        """Forget all evictions but as many, those that were learned last."""
        for peer in list(self._evictions)[: max(0, len(self._evictions) - kept)]:
            del self._evictions[peer]
            self.revision += 1

    def evicted(self, peer: str) -> messages.Eviction | None:
        """Return the eviction in force against a peer, if any. Trusted peers are never evicted."""
        eviction = self._evictions.get(peer)
        if eviction is None or peer in self._trusted:
            return None
        reinstatement = self._reinstatements.get(peer)
        if reinstatement and reinstatement.body.issued_ms > eviction.body.issued_ms:
            return None
        return eviction.expect(messages.Eviction)

    def expulsions_of(self, peer: str) -> list[Envelope]:
        """List the newest eviction and the newest reinstatement of a peer, if there are any."""
        found = (self._evictions.get(peer), self._reinstatements.get(peer))
        return [envelope for envelope in found if envelope is not None]

    def serves(self, peer: str, roles: Sequence[str]) -> bool:
        """Whether a peer with these roles serves checkpoints to others.

        In `relay-only` mode only relays and trusted peers do, and no peer connects to the others.
        """
        if self.manifest.broadcast_mode == "open":
            return True
        return "relay" in roles or peer in self._trusted

    def trusts(self, peer: str) -> bool:
        """Whether a peer is the owner, or one that the newest version names."""
        return peer in self._trusted or peer == self.owner

    def environment_peers(self, order: messages.StepOrder) -> list[str]:
        """The environment peers that a step's version names and the newest has not removed."""
        manifest = self.manifest_of(order)
        named = manifest.environment_ids() if manifest is not None else []
        return [peer for peer in named if self.manifest.is_environment_peer(peer)]

    def clock_off(self, peer: str) -> float:
        """Return the seconds by which a trusted peer's clock differs; 0 for a small difference."""
        return self.clocks_off.get(peer, 0.0)

    def may_be_shown(self, shown: Envelope) -> bool:
        """Whether a message that another peer presents is this run's, from a permitted sender."""
        return shown.body.run == self.id and self.permits(shown.sender, shown.message) is None

    def permits(self, sender: str, message: messages.Message) -> str | None:
        """Return why this sender may not send this message, or None. `envelope.Gate` calls it."""
        manifest = self.manifest
        allowed = True
        if isinstance(message, RunManifest):
            allowed = message.name == manifest.name and self._entitles(sender, message)
            if allowed and self.refusal(sender, message) is not None:
                return VERSION_REFUSED
        elif isinstance(
            message, (messages.Checkpoint, messages.StepOrder, OuterStatus, RoundRecord)
        ):
            allowed = manifest.is_trainer(sender)
        elif isinstance(message, messages.Evaluation):
            allowed = manifest.is_trainer(sender) or manifest.is_validator(sender)
        elif isinstance(message, (messages.Verdict, messages.Acknowledgement)):
            allowed = manifest.is_validator(sender)
        elif isinstance(message, (Turn, EpisodeGrade)):
            allowed = manifest.is_environment_peer(sender)
        elif isinstance(message, GradeRequest):
            allowed = manifest.is_validator(sender)
        elif isinstance(message, (messages.Reinstatement, messages.Invite)):
            allowed = sender == self.owner
        elif isinstance(
            message,
            (
                messages.Presence,
                messages.LogHead,
                messages.Eviction,
                messages.Admission,
                messages.AdmissionRefused,
            ),
        ):
            allowed = sender in manifest.trusted_ids()
        if not allowed:
            return "not_permitted"
        if isinstance(message, (messages.Heartbeat, messages.AdmissionRequest)):
            return None  # the registrar answers an evicted sender with the reason
        return "evicted" if self.evicted(sender) is not None else None
