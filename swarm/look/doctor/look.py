"""`swarm doctor`: all checks of a machine for a peer with given settings, without starting one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from swarm.errors import SwarmError, leaf_errors
from swarm.look.doctor.machine import home_and_ports, packages, program
from swarm.look.doctor.network import Place, network_findings
from swarm.look.onlooker import learn_expulsions, status_of
from swarm.node.local import LOOPBACK, visit
from swarm.roles import load_role, machine_findings
from swarm.run.findings import Finding, Work
from swarm.settings import BOOTSTRAP, PeerSettings
from swarm.transport.libp2p.addresses import default_listen
from swarm.wire.identity import load_or_create


async def look(settings: PeerSettings, model: Path | None = None) -> list[Finding]:
    """Check this machine for a peer with these settings and, by `settings.bootstrap`, its run.

    `model`: absolute path of a policy that the roles load as well.
    """
    found = [program(), *map(packages, settings.role), *home_and_ports(settings)]
    lacks = any(each.problem for each in found if each.topic == "packages")
    roles = [load_role(name) for name in settings.role if name != BOOTSTRAP and not lacks]
    found += machine_findings(roles)
    work: Work | None = None
    if settings.bootstrap:
        ports = [each for each in found if each.topic == "port"]
        free = bool(ports) and not any(each.problem or "peer" in each.figures for each in ports)
        outside, work = await _outside(
            settings, (settings.listen or default_listen()) if free else LOOPBACK
        )
        found += outside
    for role in roles:
        if doctor := getattr(role, "doctor", None):
            found += await doctor(settings, work, model)
    return found


async def _outside(
    settings: PeerSettings, listen: Sequence[str]
) -> tuple[list[Finding], Work | None]:
    """What the network and the run say to a visitor that listens where the peer would."""
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
        topic = "trusted" if found else "network"
        found.append(Finding(topic, str(leaves[0]), {}, problem=True))
    return found, work


def peer_id_of(settings: PeerSettings) -> str:
    """The id of the peer with this home; empty if it has no key that can be read."""
    key = settings.home_path / "identity.key"
    try:
        return load_or_create(key).peer_id if key.exists() else ""
    except (SwarmError, OSError):
        return ""  # the line about the key says why
