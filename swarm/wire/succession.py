"""Who may sign a version of a run's manifest, and which of two versions counts.

A run's id names its first owner, who signs its versions. Two kinds of keys may sign one in the
owner's place, and carry what entitles them: the signed manifest that names them, their
*delegation*.

- A *standby* takes a trainer's place: its version is its delegation, except that the two have
  changed places. Nothing else may differ.
- A *successor* becomes the owner, and signs every later version. The run's id stays.

Of two versions the one with the higher precedence counts, whatever their numbers. An owner's next
version beats every takeover, and a successor's version all those of the owner before."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from swarm.errors import UserError
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.manifest import RunManifest

DELEGATIONS_MAX = 8
"""Longest chain of delegations. Each holds a whole manifest (2 to 3 KB), so an owner signs a new
version now and then, which needs none."""


class NotAuthorised(ValueError):
    """A manifest is signed by somebody who may not sign it. The message is a clause."""


@dataclass(frozen=True)
class Ownership:
    """What the signatures of a manifest say."""

    owners: tuple[str, ...]
    """The run's owners, the first one first."""
    owner_delegation: bytes
    """The delegation by which the present owner owns the run; empty for the first owner."""
    precedence: tuple[int, ...]
    """Of two versions of a run the one with the higher precedence counts. `(generation of the
    owner, minus the successor's place, the owner's version, takeovers since, minus the standby's
    place)`; of two at once, the one named first in the manifest prevails."""
    named: tuple[Sequence[str], ...] = ()
    """The successors of which each later owner was one."""

    @property
    def owner(self) -> str:
        """The present owner."""
        return self.owners[-1]

    @property
    def takeovers(self) -> int:
        """Takeovers since the owner signed last."""
        return self.precedence[3]


def ownership(run: str, sender: str, manifest: RunManifest) -> Ownership:
    """Return what entitles `sender` to sign a version of `run`; raises `NotAuthorised`."""
    return _ownership(run, sender, manifest, DELEGATIONS_MAX)


def ownership_of(envelope: Envelope) -> Ownership:
    """The same for a signed manifest."""
    return ownership(envelope.body.run, envelope.sender, envelope.expect(RunManifest))


def _ownership(run: str, sender: str, manifest: RunManifest, depth_max: int) -> Ownership:
    if not manifest.delegation:
        if run != f"{sender}/{manifest.name}":
            raise NotAuthorised(f"{sender} does not own run {run}")
        return Ownership((sender,), b"", (0, 0, manifest.version, 0, 0))
    if depth_max == 0:
        raise NotAuthorised(f"more than {DELEGATIONS_MAX} delegations lead to it")
    try:
        delegation = open_envelope(manifest.delegation)
    except Dropped as dropped:
        raise NotAuthorised(f"its delegation is not valid ({dropped})") from dropped
    named = delegation.message
    if not isinstance(named, RunManifest) or delegation.body.run != run:
        raise NotAuthorised(f"its delegation is no manifest of run {run}")
    if manifest.name != named.name or manifest.version <= named.version:
        raise NotAuthorised("it is not a later version than its delegation")
    before = _ownership(run, delegation.sender, named, depth_max - 1)
    generation, successor_rank, version, takeovers, _ = before.precedence
    if sender in named.successors:
        place = named.successors.index(sender)
        owners = (*before.owners, sender)
        precedence = (generation + 1, -place, manifest.version, 0, 0)
        return Ownership(owners, manifest.delegation, precedence, (*before.named, named.successors))
    standbys = named.standby_ids()
    if sender in standbys:
        each = (taken_over(delegation, sender, trainer) for trainer in named.trainer_ids())
        if manifest in each:
            precedence = (
                generation,
                successor_rank,
                version,
                takeovers + 1,
                -standbys.index(sender),
            )
            return Ownership(before.owners, before.owner_delegation, precedence, before.named)
        raise NotAuthorised("a standby may only change places with a trainer")
    raise NotAuthorised(f"its delegation names {sender} neither as a standby nor as a successor")


def taken_over(delegation: Envelope, standby: str, trainer: str) -> RunManifest:
    """The version in which a standby and a trainer of `delegation` have changed places."""
    named = delegation.expect(RunManifest)
    keys = {key.peer: key for key in (*named.trainers, *named.standbys)}
    other = {standby: keys[trainer], trainer: keys[standby]}
    return msgspec.structs.replace(
        named,
        version=named.version + 1,
        trainers=[other.get(key.peer, key) for key in named.trainers],
        standbys=[other.get(key.peer, key) for key in named.standbys],
        delegation=delegation.raw,
    )


def inherited(held: Envelope, signer: str, new: RunManifest) -> RunManifest:
    """A version to be signed by `signer` after `held`, with the delegation that this key needs.

    Raises `UserError` if the key may not sign it."""
    before = ownership_of(held)
    if signer == before.owner:
        return msgspec.structs.replace(new, delegation=before.owner_delegation)
    if signer in held.expect(RunManifest).successors:
        return msgspec.structs.replace(new, delegation=held.raw)
    raise UserError(
        f"{signer} is neither the owner of run {held.body.run}, {before.owner}, nor named in its "
        "successors; give the key of one of them with --owner-key"
    )
