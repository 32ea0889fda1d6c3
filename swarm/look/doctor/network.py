"""Checks that ask other peers: clock, line, reachability, versions, and what the run wants."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from swarm.errors import PeerError, UserError
from swarm.look.onlooker import RunStatus
from swarm.node.line import (
    CLOCK_SECONDS,
    MEASURE_SECONDS,
    ClockReading,
    LineReading,
    measure_line,
    median_ahead,
    read_clock,
)
from swarm.node.node import Node
from swarm.run.admission import ROLES, TRUSTED_ROLES
from swarm.run.findings import Finding, attempt, within
from swarm.run.invites import check_token
from swarm.run.run import Run
from swarm.settings import BOOTSTRAP, PeerSettings
from swarm.terminal.untrusted import printable
from swarm.transport import Reachability
from swarm.version import __version__
from swarm.wire.envelope import CLOCK_SKEW_SECONDS_MAX
from swarm.wire.identity import PeerId

CLOCKS_ASKED_MAX = 5
"""Trusted peers whose clocks are compared."""

VERSIONS_ASKED_MAX = 16
"""Trusted peers whose versions are compared."""

LINES_TRIED_MAX = 3
"""Peers that are asked for a measurement, one after another, until one agrees."""

REACH_SECONDS = 10.0
"""Time for finding and dialling the peers that are asked."""

REACHED = {
    Reachability.PUBLIC: "others can dial this machine",
    Reachability.MAPPED: "others can dial this machine at a forwarded port",
    Reachability.PUNCHED: "others reach this machine through relays, then directly",
    Reachability.RELAY_ONLY: "others reach this machine through relays; it needs no configuration",
    Reachability.UNKNOWN: "not known yet whether others can dial this machine; either will do",
}


@dataclass
class Place:
    """A peer, or a visitor with a peer's settings, beside a run."""

    node: Node
    settings: PeerSettings
    """Of the peer that is checked; a visitor's node has others."""
    peer_id: str
    """Of the peer that is checked; empty if it has no key yet."""
    run: Run
    status: RunStatus
    entries: Sequence[PeerId] = field(default_factory=list)
    """Bootstrap peers that answered."""
    wall_time: Callable[[], float] = time.time
    """This machine's own clock, which a peer in a run may correct for itself."""


async def network_findings(place: Place, *, strangers_only: bool = False) -> list[Finding]:
    """The checks that ask other peers, each with a deadline.

    `strangers_only`: measures no line to a peer on this machine or in its own network, where the
    figure means little and costs the same processors.
    """
    found: dict[str, Finding] = {}

    async def check(topic: str, seconds: float, ask: Callable[[], Awaitable[Finding]]) -> None:
        found[topic] = await within(seconds, topic, ask)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(check, "skew", REACH_SECONDS + CLOCK_SECONDS, partial(_skew, place))
        seconds = REACH_SECONDS + LINES_TRIED_MAX * MEASURE_SECONDS
        nursery.start_soon(check, "line", seconds, partial(_line, place, strangers_only))
        nursery.start_soon(check, "versions", REACH_SECONDS, partial(_versions, place))
    first = [found["skew"], found["line"], _reach(place.node), found["versions"]]
    return [*first, attempt("admission", lambda: _admission(place))]


# --- clock and line --------------------------------------------------------------------------


async def _skew(place: Place) -> Finding:
    """Compare this machine's own clock, uncorrected, with the trusted peers'."""
    readings: list[ClockReading] = []
    silent: list[str] = []

    async def ask(peer: PeerId) -> None:
        node = place.node
        try:
            await node.reach(peer)
            readings.append(await read_clock(node.transport, node.world, peer, place.wall_time))
        except PeerError as error:
            silent.append(str(error))

    trusted = [PeerId(peer) for peer in place.run.manifest.trusted_ids()]
    async with trio.open_nursery() as nursery:
        for peer in [each for each in trusted if each != place.node.peer_id][:CLOCKS_ASKED_MAX]:
            nursery.start_soon(ask, peer)
    if not readings:
        why = silent[0] if silent else "the run has no other trusted peer"
        return Finding("skew", f"not compared: {why}", {})
    ahead = median_ahead(readings)
    doubt = max(reading.round_trip_seconds for reading in readings) / 2
    direction = "behind" if ahead > 0 else "ahead of"
    text = (
        f"{abs(ahead):.2f} s {direction} the median of {len(readings)} trusted peers "
        f"(± {doubt:.2f} s)"
    )
    off = abs(ahead) > CLOCK_SKEW_SECONDS_MAX
    if off:
        text += "; the peer corrects it; set it right: sudo timedatectl set-ntp true"
    figures = {"behind_seconds": round(ahead, 3), "asked": len(readings)}
    return Finding("skew", text, figures, advice=off)


async def _line(place: Place, strangers_only: bool) -> Finding:
    """Measure with a relay, a bootstrap peer or, if there is none, a trusted peer."""
    relays = [
        PeerId(each.peer)
        for each in place.status.present.values()
        if "relay" in each.heartbeat.roles and each.standing == "live"
    ]
    trusted = [PeerId(peer) for peer in place.run.manifest.trusted_ids()]
    known = dict.fromkeys([*relays, *place.entries, *trusted])
    reasons: list[str] = []
    tried = 0
    for peer in [each for each in known if each != place.node.peer_id]:
        if tried == LINES_TRIED_MAX:
            break
        tried += 1
        try:
            await place.node.reach(peer)
            if strangers_only and not place.node.transport.network_of(peer):
                reasons.append("the peers beside it are in its own network")
                continue
            reading = await measure_line(place.node.transport, place.node.world, peer)
        except PeerError as error:
            reasons.append(str(error))
        else:
            return _line_finding(place, peer, reading)
    why = reasons[0] if reasons else "the run has no other peer"
    return Finding("line", f"not measured: {printable(why)}", {})


def _line_finding(place: Place, peer: PeerId, reading: LineReading) -> Finding:
    up, down = reading.up_bytes_per_second, reading.down_bytes_per_second
    text = (
        f"up {up * 8e-6:,.3g} Mbit/s, down {down * 8e-6:,.3g} Mbit/s at least, round trip "
        f"{reading.round_trip_seconds * 1e3:.0f} ms (with …{peer[-8:]}, "
        f"{reading.moved_bytes / 1e6:.1f} MB)"
    )
    checkpoint = place.status.checkpoint
    if checkpoint is not None:
        text += f"; a policy of {_size(checkpoint.total_bytes)} takes "
        text += _seconds(checkpoint.total_bytes / down)
    figures = {
        "up_bytes_per_second": round(up),
        "down_bytes_per_second": round(down),
        "round_trip_seconds": round(reading.round_trip_seconds, 4),
        "moved_bytes": reading.moved_bytes,
        "peer": peer,
    }
    return Finding("line", text, figures)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0.1):.1f} s"
    return f"{seconds / 60:,.0f} min"


# --- reachability, versions, wishes ----------------------------------------------------------


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
    manifest, peer = place.run.manifest, place.peer_id
    named = {
        "trainer": ([*manifest.trainer_ids(), *manifest.standby_ids()], "trainers and standbys"),
        "replica": (manifest.trainer_ids(), "trainers"),
        "validator": (manifest.validator_ids(), "validators"),
        "environment": (manifest.environment_ids(), "environment_peers"),
    }
    for role in place.settings.role:
        if role in named:
            ids, key = named[role]
            if peer not in ids:
                raise UserError(
                    f"the run's {key} do not list {peer or 'this peer, which has no key yet'}; "
                    "ask its owner to, or use the --home that has the key"
                )
        elif role not in (*ROLES, *manifest.admissions.further_roles):
            raise UserError(
                f"the run admits no peer with the role {role}; its owner must add it to the "
                "manifest's admissions.further_roles"
            )
