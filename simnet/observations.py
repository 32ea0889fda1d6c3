"""Observations of a simulation, for report and plot: collected from events, in bounded memory."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from simnet.scenarios.parts import summary
from simnet.simulation import Peer, Simulation
from swarm.events import Event
from swarm.wire.identity import PeerId

PROGRESS_PARTS = 64
"""Points of one peer's progress through one checkpoint."""

BROADCASTS_KEPT = 8
"""Number of checkpoints, from the first, whose broadcasts are kept."""

ROLE_ORDER = ("trainer", "validator", "relay", "inference", "bootstrap", "observer")

BUSY = {"generating", "training", "judging", "relaying"}
"""First words of a peer's status that mean work."""

CAUSES = {
    "waiting": "waiting for work",
    "ready": "waiting for work",
    "fetching": "fetching a policy",
    "loading": "loading a policy",
    "delivering": "delivering",
    "starting": "starting",
    "preparing": "starting",
    "run": "run over",
}
"""Cause of an idle peer's time, by the first word of its status."""


@dataclass
class Broadcast:
    total_bytes: int
    published: float
    received: dict[str, int] = field(default_factory=dict)
    progress: dict[str, array[float]] = field(default_factory=dict)
    """Times at which each peer had 1/64, 2/64, ... of the checkpoint."""
    complete: dict[str, float] = field(default_factory=dict)


class Observations:
    """Collects observations of a simulation, from construction on."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.broadcasts: dict[tuple[int, int], Broadcast] = {}
        self.pieces_sent_bytes: Counter[str] = Counter()
        self.pieces_received_bytes: Counter[str] = Counter()
        self.lookup_hops: Counter[int] = Counter()
        self.lookups_timed_out = 0
        self.spent_seconds: dict[str, dict[str, float]] = {}
        """Seconds of each peer at work ("busy"), and idle seconds by cause."""
        self._doing: dict[str, tuple[float, str]] = {}
        self._names: dict[PeerId, str] = {}
        self._handlers: dict[str, Callable[[float, Peer, Mapping[str, Any]], None]] = {
            "shardcast.piece_received": self._piece,
            "shardcast.checkpoint_complete": self._complete,
            "trainer.checkpoint_published": self._published,
            "dht.lookup_finished": self._lookup,
            "peer.status": self._status,
        }
        simulation.listeners.append(self._hear)

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        handler = self._handlers.get(event.name)
        if handler is not None:
            handler(now, peer, event.fields)

    def name_of(self, peer: PeerId) -> str:
        if peer not in self._names:
            self._names = {each.id: each.name for each in self.simulation.peers.values()}
        return self._names.get(peer, peer)

    def role_of(self, name: str) -> str:
        peer = self.simulation.peers.get(name)
        return peer.plan.roles[0] if peer is not None and peer.plan.roles else "other"

    # --- events ---

    def _published(self, now: float, peer: Peer, fields: Mapping[str, Any]) -> None:
        key = (fields["lineage"], fields["step"])
        if key not in self.broadcasts and len(self.broadcasts) < BROADCASTS_KEPT:
            self.broadcasts[key] = Broadcast(fields["bytes"], now)

    def _piece(self, now: float, peer: Peer, fields: Mapping[str, Any]) -> None:
        size, source = fields["bytes"], self.name_of(fields["source"])
        self.pieces_sent_bytes[source] += size
        self.pieces_received_bytes[peer.name] += size
        broadcast = self.broadcasts.get((fields["lineage"], fields["step"]))
        if broadcast is None:
            return
        got = broadcast.received[peer.name] = broadcast.received.get(peer.name, 0) + size
        times = broadcast.progress.get(peer.name)
        if times is None:
            times = broadcast.progress[peer.name] = array("d")
        reached = min(PROGRESS_PARTS, got * PROGRESS_PARTS // max(1, broadcast.total_bytes))
        while len(times) < reached:
            times.append(now)

    def _complete(self, now: float, peer: Peer, fields: Mapping[str, Any]) -> None:
        broadcast = self.broadcasts.get((fields["lineage"], fields["step"]))
        if broadcast is not None and not fields["delta"] and peer.name not in broadcast.complete:
            broadcast.complete[peer.name] = now

    def _lookup(self, now: float, peer: Peer, fields: Mapping[str, Any]) -> None:
        if fields["timed_out"]:
            self.lookups_timed_out += 1
        elif fields["hops"]:
            self.lookup_hops[fields["hops"]] += 1

    def _status(self, now: float, peer: Peer, fields: Mapping[str, Any]) -> None:
        since, doing = self._doing.get(peer.name, (now, ""))
        if doing:
            spent = self.spent_seconds.setdefault(peer.name, {})
            cause = "busy" if doing in BUSY else CAUSES.get(doing, doing)
            spent[cause] = spent.get(cause, 0.0) + now - since
        self._doing[peer.name] = (now, fields["doing"].partition(" ")[0])

    # --- summaries ---

    def main_broadcast(self) -> tuple[tuple[int, int], Broadcast] | None:
        """The broadcast that most peers completed or began; the first of several."""
        if not self.broadcasts:
            return None
        return max(
            self.broadcasts.items(), key=lambda item: (len(item[1].complete), len(item[1].received))
        )

    def shares(self, names: list[str]) -> dict[str, float]:
        """Shares of some peers' total time, busy and idle by cause; they add up to 1."""
        spent: dict[str, float] = {}
        for name in names:
            for cause, seconds in self.spent_seconds.get(name, {}).items():
                spent[cause] = spent.get(cause, 0.0) + seconds
        whole = sum(spent.values())
        if whole <= 0:
            return {}
        return {cause: seconds / whole for cause, seconds in sorted(spent.items())}

    def names_by_role(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.simulation.peers:
            found.setdefault(self.role_of(name), []).append(name)
        known = [role for role in ROLE_ORDER if role in found]
        return {role: found[role] for role in [*known, *sorted(set(found) - set(known))]}

    def summary(self) -> dict[str, Any]:
        """Summarise messages, traffic, lookups and shares of time by role, as plain data."""
        peers, by_sender = self.simulation.peers, self.simulation.network.messages_by_sender
        roles: dict[str, Any] = {}
        for role, names in self.names_by_role().items():
            sent = sorted(by_sender[peers[name].id] for name in names)
            roles[role] = {
                "peers": len(names),
                "messages_sent_median": sent[len(sent) // 2],
                "messages_sent_max": sent[-1],
                "pieces_sent_bytes": sum(self.pieces_sent_bytes[name] for name in names),
                "pieces_received_bytes": sum(self.pieces_received_bytes[name] for name in names),
                "time_shares": {
                    cause: round(share, 4) for cause, share in self.shares(names).items()
                },
            }
        return {
            "control_messages": self.simulation.network.messages,
            "dht_lookups": self.lookup_hops.total() + self.lookups_timed_out,
            "dht_hops_median": _median(self.lookup_hops),
            "dht_hops_max": max(self.lookup_hops, default=None),
            "roles": roles,
            "broadcasts": [
                {
                    "lineage": lineage,
                    "step": step,
                    "bytes": broadcast.total_bytes,
                    "published_seconds": round(broadcast.published, 3),
                    "receivers": len(broadcast.received),
                    "complete": len(broadcast.complete),
                    "seconds": summary(
                        at - broadcast.published for at in broadcast.complete.values()
                    ),
                }
                for (lineage, step), broadcast in self.broadcasts.items()
            ],
        }


def _median(counts: Counter[int]) -> int | None:
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if 2 * seen >= counts.total():
            return value
    return None
