"""The published run INTELLECT-2: 62 GB checkpoints, 4 relays, workers of all kinds, 2 steps behind.

docs/simulation.md lists its sources and limits. With a smaller checkpoint, computing times shrink
by the same factor, but at most by `FASTER_MAX`; lines slow down by the rest, and minutes in the
figures are scaled back."""

from statistics import mean, median
from typing import Any

from simnet.compute.setting import Hardware, Workload
from simnet.lines import REGIONS, Line
from simnet.scenarios.parts import start_bootstrap, start_over_time
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.wire.manifest import Limits

PEERS = 14
PEERS_MIN = 12
FULL_BYTES = 62e9
WORKLOAD = Workload(
    model_bytes=int(FULL_BYTES / 620),
    target_lengths=((0, (1000, 2000, 3000, 4000)), (3, (1111, 2222, 3333, 4444, 5556))),
)
FASTER_MAX = 20.0
LONG_FROM = 3
STEPS = 6
GROUPS, GROUP_SIZE = 256, 16
ASYNCHRONY = 2
"""Steps of asynchrony; also the run manifest's default."""

SHORT_TOKENS = 2500

BATCH_SECONDS = 15 * 60.0
FIRST_SECONDS = 10 * 60.0
STEP_SECONDS = 22 * 60.0
VERIFY_SECONDS = 60.0

TRAINER_LINE_BYTES = 125e6
RELAY_LINE_BYTES = 250e6
WORKER_LINES = ((25e6, 62.5e6), (25e6, 73.75e6), (46.9e6, 93.75e6))
"""(uplink, downlink), bytes per second."""

WORKER_SHARES = (5.0, 4.0, 3.0)

RELAYS, VALIDATORS = 4, 2
ARRIVAL_SECONDS = 20.0


async def run(simulation: Simulation, peers: int) -> dict[str, Any]:
    smaller = FULL_BYTES / simulation.workload.model_bytes
    scale = min(smaller, FASTER_MAX)
    slower = smaller / scale
    workers = peers - RELAYS - VALIDATORS - 2
    shares = [WORKER_SHARES[number % len(WORKER_SHARES)] for number in range(workers)]
    tokens_per_second = GROUPS * GROUP_SIZE * SHORT_TOKENS / BATCH_SECONDS
    fast = tokens_per_second * WORKER_SHARES[0] / sum(shares)
    groups = max(1, round(fast * FIRST_SECONDS / (GROUP_SIZE * SHORT_TOKENS)))
    prefill = groups * GROUP_SIZE * SHORT_TOKENS / VERIFY_SECONDS
    validators = [f"validator-{number}" for number in range(VALIDATORS)]
    await start_bootstrap(
        simulation, trainers=["trainer"], validators=validators, steps=STEPS,
        groups_per_step=GROUPS, group_size=GROUP_SIZE, groups_per_submission=groups,
        max_new_tokens=16_384,
        limits=Limits(verdict_seconds=max(30.0, 10 * VERIFY_SECONDS / scale)),
    )  # fmt: skip
    judge = Hardware(prefill_tokens_per_second=prefill * scale)

    def line(region: str, up: float, down: float) -> Line:
        return Line(region, up / slower, down / slower)

    server = line("us-east", TRAINER_LINE_BYTES, TRAINER_LINE_BYTES)
    plans = [Plan(name, ["validator"], server, judge) for name in validators]
    for number in range(RELAYS):
        region = REGIONS[number % len(REGIONS)]
        plans.append(
            Plan(f"relay-{number}", ["relay"], line(region, RELAY_LINE_BYTES, RELAY_LINE_BYTES))
        )
    for number, share in enumerate(shares):
        rate = tokens_per_second * share / sum(shares)
        access = line(simulation.random.choice(REGIONS), *simulation.random.choice(WORKER_LINES))
        engine = Hardware(tokens_per_second=rate * scale)
        plans.append(Plan(f"worker-{number}", ["inference"], access, engine))
    started = [simulation.add(plan) for plan in plans]
    names = [plan.name for plan in plans if plan.name.startswith("worker")]
    admitted = simulation.expect("membership.admitted", [plan.name for plan in plans[VALIDATORS:]])
    await start_over_time(simulation, started, ARRIVAL_SECONDS)
    await simulation.meet(admitted, 90.0)

    watched = _Steps(simulation, names, groups)
    engine = Hardware(step_seconds=STEP_SECONDS / scale)
    trainer = simulation.add(Plan("trainer", ["trainer"], server, engine))
    over = simulation.expect("trainer.run_complete", ["trainer"])
    await trainer.start()
    expected = (STEPS * 23 + 40) * 60.0 / scale
    await simulation.meet(over, 3 * expected + 600.0)
    return watched.figures(scale, slower)


class _Steps:
    """Times of each step's events, in virtual seconds."""

    def __init__(self, simulation: Simulation, workers: list[str], groups: int) -> None:
        self._workers = dict.fromkeys(workers)
        self._groups = groups
        self._accepted: dict[int, int] = {}
        self._full: dict[int, float] = {}
        """When enough groups of a step were accepted for a batch."""
        self._published: dict[int, float] = {}
        self._complete: dict[int, dict[str, float]] = {}
        self._opened: dict[int, float] = {}
        self._delivered: dict[int, float] = {}
        self._trained: dict[int, tuple[float, float, float]] = {}
        """(end, seconds, idle seconds)."""
        simulation.listeners.append(self._hear)

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        fields = event.fields
        if event.name == "trainer.checkpoint_published":
            self._published.setdefault(fields["step"], now)
        elif event.name == "shardcast.checkpoint_complete" and peer.name in self._workers:
            if fields["delta"]:
                return  # the delta itself, not yet the policy made from it
            self._complete.setdefault(fields["step"], {}).setdefault(peer.name, now)
        elif event.name == "trainer.step_opened":
            self._opened.setdefault(fields["step"], now)
        elif event.name == "inference.submission_delivered":
            self._delivered.setdefault(fields["step"], now)
        elif event.name == "validator.verdict" and fields["outcome"] == "accepted":
            step = fields["step"]
            self._accepted[step] = self._accepted.get(step, 0) + self._groups
            if self._accepted[step] >= GROUPS:
                self._full.setdefault(step, now)
        elif event.name == "trainer.step_trained":
            self._trained[fields["step"]] = (now, fields["seconds"], fields["idle_seconds"])

    def figures(self, scale: float, slower: float) -> dict[str, Any]:
        """Minutes at full size, beside the published minutes."""

        def minutes(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds * scale / 60, 1)

        short, long = range(LONG_FROM), range(LONG_FROM, STEPS)
        rows = [
            ("broadcast_minutes", 14.0, minutes(self._broadcast(short)),
             14.0, minutes(self._broadcast(long))),
            ("broadcast_to_the_last_minutes", None, minutes(self._broadcast(short, last=True)),
             None, minutes(self._broadcast(long, last=True))),
            ("first_submission_minutes", 10.0, minutes(self._first(0)), None, None),
            ("full_batch_minutes", 22.0, minutes(self._first_batch()),
             29.0, minutes(self._later_batch(long))),
            ("trainer_step_minutes", 22.0, minutes(self._step(short)),
             21.0, minutes(self._step(long))),
            ("trainer_idle_share", None, self._idle(short[1:]), None, self._idle(long[1:])),
        ]  # fmt: skip
        names = ("figure", "published_short", "simulated_short", "published_long", "simulated_long")
        return {
            "beside_the_published_run": [dict(zip(names, row, strict=True)) for row in rows],
            "scale": f"1 : {scale:g} in time, 1 : {scale * slower:g} in bytes",
            "steps_trained": len(self._trained),
        }

    def _broadcast(self, steps: range, *, last: bool = False) -> float | None:
        """Time from a policy's announcement until the median worker has it, or the last worker."""
        which = max if last else median
        took = [
            which(self._complete[step].values()) - self._published[step]
            for step in steps
            if step in self._published and self._complete.get(step)
        ]
        return mean(took) if took else None

    def _first(self, step: int) -> float | None:
        """Time from the median worker's receipt of the policy to the first delivered submission."""
        if step not in self._delivered or not self._complete.get(step):
            return None
        return self._delivered[step] - median(self._complete[step].values())

    def _first_batch(self) -> float | None:
        """Time from the median worker's receipt of policy 0 to a full batch."""
        if 0 not in self._full or not self._complete.get(0):
            return None
        return self._full[0] - median(self._complete[0].values())

    def _later_batch(self, steps: range) -> float | None:
        """Time to a full batch from when a step is open and the median worker has its policy."""
        took = []
        for step in steps:
            arrived = self._complete.get(max(0, step - ASYNCHRONY))
            if step in self._full and step in self._opened and arrived:
                took.append(self._full[step] - max(self._opened[step], median(arrived.values())))
        return mean(took) if took else None

    def _step(self, steps: range) -> float | None:
        took = [self._trained[step][1] for step in steps if step in self._trained]
        return mean(took) if took else None

    def _idle(self, steps: range) -> float | None:
        trained = [self._trained[step] for step in steps if step in self._trained]
        idle = sum(seconds for _, _, seconds in trained)
        whole = idle + sum(seconds for _, seconds, _ in trained)
        return round(idle / whole, 3) if whole else None
