"""Several trainers on several continents: deaths, newcomers and a partition, over a few rounds.

A tenth of the trainers begins late. One dies within its inner steps and comes back. A third is cut
off for some rounds, and then gives way to the heavier chain. At the end all hold the same state.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import trio
from msgspec.structs import replace

from simnet.compute.setting import Hardware, Workload
from simnet.faults import AnyFault, Crash, Partition, befall
from simnet.lines import REGIONS, Line
from simnet.scenarios.parts import start_bootstrap, start_over_time, summary
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.wire.manifest import SHARDS_MAX, Outer

PEERS = 14
PEERS_MIN = 2
WORKLOAD = Workload(model_bytes=1_000_000)
"""Size of a contribution: a piece, so that a simulation of 30 trainers takes seconds."""
ROUNDS = 6
STEP_SECONDS = 60.0
"""Duration of the inner steps of the fastest trainer; the slowest takes a fifth more."""
OUTER = Outer(rounds=ROUNDS, grace_seconds=20.0, deadline_seconds=300.0)
LINE_BYTES_PER_SECOND = 1.25e6
"""A line that carries a contribution in a second, as 500 Mb/s does one of 60 MB."""


class Agreement:
    """Checks that equal records lead to equal states, and that nothing is counted twice."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._states: dict[bytes, bytes] = {}
        """State after each record."""
        self._last: set[bytes] = set()
        """States with which trainers completed the run."""
        self.events: Counter[str] = Counter()
        self.synchronisation: list[float] = []
        """Seconds from a trainer's contribution to its next outer state."""
        self.compared = 0
        """States compared with that of a trainer that reached the same record before."""
        self.restarted: list[float] = []
        """Seconds from a trainer's start after its death to the inner steps of its next
        contribution: it has found the others, and holds the state that they hold."""
        self.joined: list[float] = []
        """The same of a trainer's first start, when others had merged a round."""
        self._contributed: dict[str, float] = {}
        self._started: dict[str, float] = {}
        self._known: set[str] = set()
        simulation.listeners.append(self._hear)
        simulation.witnesses.append(self._witness)

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        if event.name == "peer.listening" and self._states:
            self._started[peer.name] = now
        if not event.name.startswith("outer."):
            return
        self.events[event.name] += 1
        if event.name == "outer.contributed":
            self._contributed[peer.name] = now
            if peer.name in self._started:
                begun = now - event.fields["seconds"]
                times = self.restarted if peer.name in self._known else self.joined
                times.append(begun - self._started.pop(peer.name))
            self._known.add(peer.name)
        elif event.name == "outer.run_complete" and not peer.plan.acts:  # not a liar's own state
            self._last.add(event.fields["state"])
            if len(self._last) == 2:
                self._simulation.violate(
                    f"replicas agree: {peer.name} ends with another state than others"
                )
        elif event.name == "outer.merged":
            if peer.name in self._contributed:
                self.synchronisation.append(now - self._contributed.pop(peer.name))
            state = event.fields["state"]
            self.compared += event.fields["record"] in self._states
            if self._states.setdefault(event.fields["record"], state) != state:
                self._simulation.violate(
                    f"replicas agree: {peer.name} has another state after round "
                    f"{event.fields['round']} than those with the same record"
                )

    def _witness(self, peer: Peer, what: str, facts: dict[str, Any]) -> None:
        if what == "outer_merged":
            twice = [name for name, times in Counter(facts["merged"]).items() if times > 1]
            if twice:
                self._simulation.violate(
                    f"a contribution is counted once: {peer.name} merged {twice[0].hex()[:12]} "
                    "twice"
                )


def faults(names: Sequence[str]) -> list[AnyFault]:
    """A death within inner steps, and a partition for two rounds."""
    away = list(names[: max(1, len(names) // 3)])
    return [
        Crash(at=2.5 * STEP_SECONDS, seconds=0.7 * STEP_SECONDS, peers=[names[-1]]),
        Partition(at=4.3 * STEP_SECONDS, seconds=2.2 * STEP_SECONDS, peers=away),
    ]


async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
    names = [f"trainer-{number}" for number in range(peers)]
    agreement = Agreement(simulation)
    outer = replace(OUTER, shards=min(peers, SHARDS_MAX))
    await start_bootstrap(simulation, trainers=names, validators=names[:1], outer=outer)
    members = [
        simulation.add(
            Plan(
                name,
                ["replica"],
                Line(REGIONS[number % len(REGIONS)], LINE_BYTES_PER_SECOND, LINE_BYTES_PER_SECOND),
                Hardware(step_seconds=STEP_SECONDS * (1 + 0.2 * number / peers)),
            )
        )
        for number, name in enumerate(names)
    ]
    late = members[len(members) - max(1, peers // 10) :] if peers > 2 else members[1:]
    done = simulation.expect("outer.run_complete", names)
    await start_over_time(simulation, [peer for peer in members if peer not in late], 20.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(befall, simulation, faults(names[: len(names) - len(late)]))
        nursery.start_soon(_join_late, late)
        await simulation.meet(done, 3 * ROUNDS * STEP_SECONDS)
        nursery.cancel_scope.cancel()
    return {
        "rounds": ROUNDS,
        "synchronisation_seconds": summary(agreement.synchronisation),
        "restarted_seconds": summary(agreement.restarted),
        "joined_seconds": summary(agreement.joined),
        "states_compared": agreement.compared,
        **{name.removeprefix("outer."): count for name, count in sorted(agreement.events.items())},
    }


async def _join_late(late: Sequence[Peer]) -> None:
    await trio.sleep(3.4 * STEP_SECONDS)
    for peer in late:
        await peer.start()
