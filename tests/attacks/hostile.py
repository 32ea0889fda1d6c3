"""An honest run beside hostile identities, to compare with the same run without them.

Honest peers have the same names, keys, lines and starting moments either way, and no faults befall
them: what hostile peers are is drawn from a source of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import trio

from simnet.adversaries import KINDS, disguise
from simnet.clock import source
from simnet.compute.setting import Hardware
from simnet.scenarios import Scenario, mixed
from simnet.scenarios.parts import SERVER, draw_line, start_bootstrap, start_over_time
from simnet.simulate import simulate
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.ledger.entries import decode
from swarm.ledger.log import Log
from swarm.ledger.state import Authority, LedgerState, Record, ledger_state
from swarm.wire.manifest import Admissions, Thresholds

SECONDS = 90.0
"""Virtual time of a run."""
START_SECONDS = 10.0
"""Time over which its peers start."""
HARDWARE = Hardware(tokens_per_second=1000.0, step_seconds=3.0)
"""Of every peer: workers need about 2 s per step, so that the trainer is not always the slowest."""
WORKERS = 4
RETURN_SECONDS = 1.0
"""Time between two looks for hostile peers that have been evicted."""
RETURNS_MAX = 60
"""New identities of a simulation."""
VALIDATORS = ("validator-0", "validator-1")
VERDICTS = ("validator.verdict", "validator.turned_down")
Listener = Callable[[Peer, Event], None]


@dataclass
class Outcome:
    """What became of a run."""

    policies: int = 0
    """Policies published within `SECONDS`."""
    hostile: set[str] = field(default_factory=set)
    """Ids of the hostile peers, with those that returned under new keys."""
    said: Counter[str] = field(default_factory=Counter)
    """Events of honest peers that name a hostile peer, by name."""
    failed: Counter[str] = field(default_factory=Counter)
    """Checks that hostile submissions failed; "" counts accepted ones."""
    evicted: dict[str, float] = field(default_factory=dict)
    """Virtual time of each hostile peer's eviction, as the first peer heard of it."""
    honest_failed: Counter[str] = field(default_factory=Counter)
    """Checks that honest workers' submissions failed."""
    honest_accepted: int = 0
    """Accepted submissions of honest workers."""
    generated_tokens: int = 0
    """Tokens that hostile workers generated."""
    credited: Counter[str] = field(default_factory=Counter)
    """Tokens credited, by peer: held or final, but not void."""
    judged_by: dict[str, Counter[str]] = field(default_factory=dict)
    """Outcomes of the verdicts of each validator, by validator."""
    violations: list[str] = field(default_factory=list)
    honest_seconds: list[float] = field(default_factory=list)
    """Virtual times at which honest submissions were accepted."""

    @property
    def hostile_credit(self) -> int:
        """Tokens credited to hostile workers."""
        return sum(tokens for name, tokens in self.credited.items() if name.startswith("hostile"))


@dataclass(frozen=True)
class Setting:
    """A run to simulate; equal settings give equal runs."""

    kind: str | None = None
    """The kind of the hostile peers; None: there are none."""
    count: int = 1
    """Number of hostile peers. A kind that claims to be a validator takes the last validator's
    seat, once."""
    seed: int = 1
    seconds: float = SECONDS
    accomplices: str | None = None
    """The kind of `count` hostile workers beside a hostile validator."""
    admissions: Admissions | None = None
    observes: bool = False
    """Whether nobody has measured the run's thresholds."""


def names(setting: Setting) -> Iterator[tuple[str, bool]]:
    """(name, whether it is hostile) of all peers but the bootstrap peer."""
    inside = setting.kind is not None and KINDS[setting.kind].claims == "validator"
    for name in ("trainer", *VALIDATORS, "relay-0", *(f"worker-{n}" for n in range(WORKERS))):
        yield name, inside and name == VALIDATORS[-1]
    if setting.kind is not None and (not inside or setting.accomplices):
        yield from ((f"hostile-{number}", True) for number in range(setting.count))


def attacked(
    setting: Setting,
    listen: Listener = lambda peer, event: None,
    afterwards: Callable[[Simulation], Awaitable[None]] | None = None,
) -> Outcome:
    """Simulate a run, with the invariants of docs/simulation.md, and return what became of it."""
    outcome = Outcome()

    async def run(simulation: Simulation, _peers: int) -> dict[str, Any]:
        simulation.faults = []
        hostile = outcome.hostile
        hostile.update(simulation.identity(name).peer_id for name, bad in names(setting) if bad)
        simulation.listeners.append(
            lambda now, peer, event: _hear(outcome, hostile, now, peer, event)
        )
        simulation.listeners.append(lambda _now, peer, event: listen(peer, event))
        await _start(simulation, setting)
        if setting.kind is not None and KINDS[setting.kind].returns:
            simulation.nursery.start_soon(_return, simulation, hostile)
        await trio.sleep_until(setting.seconds)
        outcome.policies = simulation.trace.counts["trainer.checkpoint_published"]
        if afterwards is not None:
            await afterwards(simulation)
        _read_credits(simulation, outcome)
        return {}

    scenario = Scenario("hostile", "", WORKERS, WORKERS, run, mixed.WORKLOAD)
    outcome.violations = simulate(scenario, seed=setting.seed)["violations"]
    return outcome


@cache
def alone(seed: int, seconds: float = SECONDS) -> Outcome:
    """The same run without hostile peers."""
    return attacked(Setting(seed=seed, seconds=seconds))


async def _start(simulation: Simulation, setting: Setting) -> None:
    await start_bootstrap(
        simulation,
        trainers=["trainer"],
        validators=list(VALIDATORS),
        groups_per_step=16,
        max_new_tokens=256,
        admissions=setting.admissions,
        thresholds=Thresholds() if setting.observes else None,
    )
    others = source(setting.seed, "hostile")
    plans = []
    for name, bad in names(setting):
        role = name.partition("-")[0]
        worker = role in ("worker", "hostile")
        line = draw_line(others if role == "hostile" else simulation.random) if worker else SERVER
        plan = Plan(name, ["inference" if worker else role], line, HARDWARE)
        kind = setting.accomplices if role == "hostile" and setting.accomplices else setting.kind
        plans.append(disguise(plan, kind) if bad and kind else plan)
    honest = [simulation.add(plan) for plan in plans if not plan.name.startswith("hostile")]
    hostile = [simulation.add(plan) for plan in plans if plan.name.startswith("hostile")]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(start_over_time, simulation, honest, START_SECONDS)
        nursery.start_soon(start_over_time, simulation, hostile, START_SECONDS, others)


async def _return(simulation: Simulation, hostile: set[str]) -> None:
    """Let every hostile peer that was evicted return with a new key, `RETURNS_MAX` times in all."""
    gone: set[str] = set()
    while len(gone) < RETURNS_MAX:
        await trio.sleep(RETURN_SECONDS)
        for name, peer in list(simulation.peers.items()):
            if peer.plan.acts is not None and peer.ended is not None and name not in gone:
                gone.add(name)
                successor = simulation.add(peer.successor())
                hostile.add(successor.id)
                await successor.start()


def _hear(outcome: Outcome, hostile: set[str], now: float, peer: Peer, event: Event) -> None:
    fields = event.fields
    if peer.plan.acts is not None:
        if event.name == "inference.submission_made":
            outcome.generated_tokens += fields["tokens"]
        return
    if fields.get("remote") in hostile or fields.get("source") in hostile:
        outcome.said[event.name] += 1
        if event.name == "membership.peer_evicted":
            outcome.evicted.setdefault(fields["remote"], now)
    if event.name in VERDICTS:
        failed = outcome.failed if fields["worker"] in hostile else outcome.honest_failed
        if fields["failed"] or fields["worker"] in hostile:
            failed[fields["failed"]] += 1
        else:
            outcome.honest_accepted += 1
            outcome.honest_seconds.append(now)


def state_of(
    simulation: Simulation,
    trusted: Sequence[str] = ("trainer", *VALIDATORS),
    reader: str = "trainer",
) -> LedgerState:
    """The ledger's state, from the union of the logs on these peers' disks; `reader` runs."""
    peers = [simulation.peers[name] for name in trusted]
    records = [
        Record(log.owner, index, decode(raw))
        for log in (Log(peer.disk.database("ledger.sqlite"), peer.id) for peer in peers)
        for index, raw in enumerate(log.entries(log.start(), log.size()), log.start())
    ]
    part = simulation.peers[reader].part
    assert part is not None
    return ledger_state(records, Authority.of(part.run.owners, part.run.manifest))


def _read_credits(simulation: Simulation, outcome: Outcome) -> None:
    by_id = {peer.id: name for name, peer in simulation.peers.items()}
    state = state_of(simulation)
    for worker, total in state.totals.items():
        outcome.credited[by_id.get(worker, worker)] = total.held + total.final  # type: ignore[call-overload]
    for submission, final in state.verdicts.items():
        judge = by_id.get(state.judges[submission], "")  # type: ignore[call-overload]
        outcome.judged_by.setdefault(judge, Counter())[final.outcome] += 1
