"""`swarm doctor`: all checks of a machine for a peer with given settings, without starting one."""

import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarm.errors import SwarmError, UserError, leaf_errors
from swarm.look.health import Unwell
from swarm.look.health import examine as examine_health
from swarm.look.onlooker import learn_expulsions, status_of
from swarm.node.local import LOOPBACK, visit
from swarm.node.named import NamedRoles
from swarm.node.node import Node
from swarm.roles import load_role, machine_findings
from swarm.run.admission import ROLES, TRUSTED_ROLES
from swarm.run.findings import Finding, Work, attempt, within
from swarm.run.invites import check_token
from swarm.run.run import Run
from swarm.settings import BOOTSTRAP, PeerSettings
from swarm.terminal.extras import EXTRA_OF_ROLE, require_extra
from swarm.terminal.untrusted import printable
from swarm.transport import Reachability
from swarm.transport.libp2p import addresses
from swarm.version import __version__
from swarm.wire.identity import KEY_FILE, PeerId, check_home_identity, load_or_create
from swarm.world.home import check_format, existing


async def look(settings: PeerSettings, model: str | None = None) -> list[Finding]:
    """Check this machine for a peer with these settings and, by `settings.bootstrap`, its run.

    `model`: a policy that the roles load as well, as its user names it."""
    found = [program(), *map(packages, settings.role), *home_and_ports(settings)]
    lacks = any(each.problem for each in found if each.topic == "packages")
    roles = [load_role(name) for name in settings.role if name != BOOTSTRAP and not lacks]
    found += machine_findings(roles)
    work: Work | None = None
    if settings.bootstrap:
        ports = [each for each in found if each.topic == "port"]
        free = bool(ports) and not any(each.problem or "peer" in each.figures for each in ports)
        outside, work = await _outside(
            settings, (settings.listen or addresses.default_listen()) if free else LOOPBACK
        )
        found += outside
    for role in roles:
        if doctor := getattr(role, "doctor", None):
            found += await doctor(settings, work, model)
    return found


async def _outside(
    settings: PeerSettings, listen: Sequence[str]
) -> tuple[list[Finding], Work | None]:
    found: list[Finding] = []
    work: Work | None = None
    began = time.perf_counter()
    try:
        async with visit(settings.bootstrap, settings.run, looks_on=True, listen=listen) as (
            node,
            run,
        ):
            seconds = time.perf_counter() - began
            text = f"found the run {run.id} in {seconds:.1f} s"
            found.append(Finding("network", text, {"run": run.id, "seconds": round(seconds, 1)}))
            work = Work(run)
            status = await status_of(node, run)
            count = len(status.present)
            text = f"its trusted peers answer, and know {count} peers"
            found.append(Finding("trusted", text, {"peers": count}))
            work = Work(run, status.checkpoint, status.order)
            peer = peer_id_of(settings)
            if peer:
                await learn_expulsions(node, run, peer, [])
            place = Place(node, settings, peer, run)
            found += await network_findings(place)
    except (SwarmError, BaseExceptionGroup) as error:
        leaves = leaf_errors(error)
        if not all(isinstance(leaf, SwarmError) for leaf in leaves):
            raise
        found.append(Finding("trusted" if found else "network", str(leaves[0]), {}, problem=True))
    return found, work


def peer_id_of(settings: PeerSettings) -> str:
    """The id of the peer with this home; empty if it has no key that can be read."""
    key = settings.home_path / "identity.key"
    try:
        return load_or_create(key).peer_id if key.exists() else ""
    except (SwarmError, OSError):
        return ""  # the line about the key says why


def program() -> Finding:
    """Swarm's version, and the Python that runs it."""
    version = platform.python_version()
    text = f"swarm {__version__} with Python {version} in {sys.prefix}"
    return Finding("program", text, {"swarm": __version__, "python": version})


def packages(role: str) -> Finding:
    """Whether there is such a role, and its packages are installed."""

    def check() -> str:
        if role in EXTRA_OF_ROLE:
            require_extra(EXTRA_OF_ROLE[role], f"--role {role}")
        if role != BOOTSTRAP:
            load_role(role)
        return f"all that role {role} needs"

    return attempt("packages", check)


# --- the home ------------------------------------------------------------------------------------


def home_and_ports(settings: PeerSettings) -> Iterator[Finding]:
    """The home, its key, and the ports of a peer that does not run yet."""
    home = settings.home_path
    broken = check_home(home)
    yield from broken
    if broken:
        return
    yield attempt("key", lambda: _key(home))
    try:
        health, _ = examine_health(home, ready=False)
    except Unwell:
        for listen in settings.listen or addresses.default_listen():
            yield attempt("port", partial(_port, listen, settings.bulk_port))
    else:
        text = f"a peer runs with {home} now: {', '.join(health.roles)}"
        yield Finding("port", text, {"peer": health.peer})


def _key(home: Path) -> str:
    check_home_identity(home)
    path = home / KEY_FILE
    if not path.exists():
        return f"none yet; the first start makes {path}"
    return f"{load_or_create(path).peer_id}, readable by this user alone"


def _port(listen: str, bulk_port: int) -> str:
    address, _ = addresses.parse_multiaddr(listen)
    host, port = addresses.host_and_port(address)
    for each in (port, bulk_port):
        addresses.check_port_free(host, each)
    free = [str(each) if each else "any" for each in (port, bulk_port)]
    return f"{host}: {free[0]} for the network and {free[1]} for pieces, free"


# --- folders -------------------------------------------------------------------------------------


def check_home(home: Path) -> list[Finding]:
    """What keeps a peer from using this folder as its home."""
    nearest = existing(home)
    if not nearest.is_dir():
        reason = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"this user may not write to {nearest}"
    else:
        try:
            check_format(home)
        except UserError as error:
            return [Finding("home", str(error), {}, problem=True)]
        return []
    text = f"{home} cannot be the home, because {reason}; choose another --home"
    return [Finding("home", text, {"reason": reason}, problem=True)]


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
