"""Checks that ask other peers: reachability, versions, and what the run wants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from swarm.errors import UserError
from swarm.node.named import NamedRoles
from swarm.node.node import Node
from swarm.run.admission import ROLES, TRUSTED_ROLES
from swarm.run.findings import Finding, attempt, within
from swarm.run.invites import check_token
from swarm.run.run import Run
from swarm.settings import BOOTSTRAP, PeerSettings
from swarm.terminal.untrusted import printable
from swarm.transport import Reachability
from swarm.version import __version__
from swarm.wire.identity import PeerId

VERSIONS_ASKED_MAX = 16
"""Trusted peers whose versions are compared."""

VERSIONS_SECONDS = 10.0
"""Time for finding the records of these peers."""

REACHED = {
    Reachability.PUBLIC: "others can dial this machine",
    Reachability.MAPPED: "others can dial this machine at a forwarded port",
    Reachability.PUNCHED: "others reach this machine through relays, then directly",
    Reachability.RELAY_ONLY: "others reach this machine through relays; it needs no configuration",
    Reachability.UNKNOWN: "not known yet whether others can dial this machine; either will do",
}


@dataclass
class Place:
    """A visitor with a peer's settings, beside a run."""

    node: Node
    settings: PeerSettings
    """Of the peer that is checked; the visitor's node has others."""
    peer_id: str
    """Of the peer that is checked; empty if it has no key yet."""
    run: Run


async def network_findings(place: Place) -> list[Finding]:
    """The checks that ask other peers, each with a deadline."""
    versions = await within(VERSIONS_SECONDS, "versions", partial(_versions, place))
    return [_reach(place.node), versions, attempt("admission", lambda: _admission(place))]


def _reach(node: Node) -> Finding:
    reached = node.transport.reachability()
    shown = node.transport.reachability_reason()
    return Finding("reach", f"{REACHED[reached]} ({shown})", {"reachability": reached.value})


async def _versions(place: Place) -> Finding:
    """Compare this program's version with those that the trusted peers announce."""
    node = place.node
    agents: dict[str, int] = {}
    for peer in place.run.manifest.trusted_ids()[:VERSIONS_ASKED_MAX]:
        record = node.record(peer) or await node.find_record(PeerId(peer))
        if record is not None and record.agent:
            agent = printable(record.agent, 40)
            agents[agent] = agents.get(agent, 0) + 1
    own = f"swarm/{__version__}"
    others = ", ".join(f"{agent} ({count})" for agent, count in sorted(agents.items()))
    text = f"this is {own}; the trusted peers run {others or 'a version that they do not tell'}"
    differs = bool(agents) and own not in agents
    if differs:
        text += "; if work is refused, install the version of the trusted peers"
    return Finding("versions", text, {"own": own, "trusted": agents}, advice=differs)


def _admission(place: Place) -> str:
    run, settings, peer = place.run, place.settings, place.peer_id
    admissions = run.manifest.admissions
    eviction = run.evicted(peer) if peer else None
    if eviction is not None:
        raise UserError(
            f"this peer was evicted ({printable(eviction.reason)}); only the run's owner can end "
            f"it; see: swarm why {peer}"
        )
    _check_roles(place)
    if TRUSTED_ROLES & set(settings.role):
        if "trainer" in settings.role and run.manifest.is_standby(peer):
            return f"the manifest names this peer, {peer}, as a standby of the trainer"
        return f"the manifest names this peer, {peer}, as {' and '.join(settings.role)}"
    if set(settings.role) == {BOOTSTRAP}:
        return "a bootstrap peer needs none"
    if admissions.policy == "open":
        return f"anyone may join (at most {admissions.unproven_max} unproven workers)"
    if admissions.policy == "invite":
        if check_token(settings.invite, run) is not None:
            return "the invite is for this run; its first use decides whether it is still good"
        if not peer:
            raise UserError(
                "the run admits only peers with an invite; ask its owner for one and start with "
                "--invite TOKEN"
            )
        return "only with an invite; without --invite, only a peer that has used one before"
    if peer in admissions.allowed:
        return "this peer is on the run's allow-list"
    raise UserError(
        f"the run has an allow-list, and {peer or 'a new peer'} is not on it; send its owner the "
        "id that `swarm id` prints"
    )


def _check_roles(place: Place) -> None:
    """Raise `UserError` for a role that the run does not take from this peer."""
    named = NamedRoles(place.run, PeerId(place.peer_id or "(without a key yet)"))
    for role in place.settings.role:
        if role in TRUSTED_ROLES:
            named.take(role)
        elif role not in (*ROLES, *place.run.manifest.admissions.further_roles):
            raise UserError(
                f"the run admits no peer with the role {role}; its owner must add it to the "
                "manifest's admissions.further_roles"
            )
