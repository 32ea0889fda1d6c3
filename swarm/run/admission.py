"""Admissions: signed leases that let a peer take part in a run."""

from collections.abc import Awaitable, Callable, Sequence

from swarm.errors import SwarmError
from swarm.run.run import Run
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Admission, Message

ADMISSION_LEASE_SECONDS = 60.0
"""Lifetime of an admission. Heartbeats renew it: nobody is cut off by gossip alone."""

ROLES = ("bootstrap", "inference", "observer", "relay")
"""Roles that every run admits. `TRUSTED_ROLES` need no admission: the manifest names their peers.
An owner can allow further roles. Others are refused, so that strangers cannot invent role names."""

TRUSTED_ROLES = frozenset({"trainer", "validator", "environment", "replica"})
"""Roles of the peers that the manifest names."""


def is_worker(roles: Sequence[str]) -> bool:
    """Whether a peer with these roles generates rollouts."""
    return "inference" in roles


class NotAdmitted(SwarmError):
    """A trusted peer refuses to admit this peer; the message is its reason."""


Sealer = Callable[[Message, float], Awaitable[Envelope]]
"""Signs a message as this peer, with a lifetime in seconds (`swarm.node.run_node.RunNode.seal`)."""


def check_admission(envelope: Envelope, run: Run, peer: str, wall_time: float) -> str | None:
    """Return why an admission does not admit `peer` at `wall_time`, or None if it does."""
    message = envelope.message
    if not isinstance(message, Admission):
        return "not an admission"
    if envelope.body.run != run.id:
        return "it is for another run"
    if envelope.sender not in run.manifest.trusted_ids():
        return "it is not signed by a trusted peer of this run"
    if message.peer != peer:
        return "it admits another peer"
    if envelope.body.expires_ms / 1000 + run.clock_off(envelope.sender) <= wall_time:
        return "it has expired"
    if run.evicted(peer) is not None:
        return "the peer is evicted"
    return None


def admits(run: Run, peer: PeerId | None, credential: bytes, wall_time: float) -> bool:
    """Whether a peer may use the bulk plane: it is trusted, or its credential is a valid lease."""
    if peer is None:
        return False
    if peer in run.manifest.trusted_ids():
        return True
    try:
        envelope = open_envelope(credential)
    except Dropped:
        return False
    return check_admission(envelope, run, peer, wall_time) is None
