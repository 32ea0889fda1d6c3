"""A check of many times `verdict_seconds`: the worker stays with the validator of its file."""

from __future__ import annotations

from collections import Counter

import trio

from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.wire.manifest import Limits, Thresholds

LIMITS = Limits(acknowledgement_seconds=2.0, verdict_seconds=6.0, submissions_unjudged_max=1)
SECONDS = 240.0


def test_a_check_of_minutes_is_made_once() -> None:
    simulation = Simulation(1, workload=Workload(model_bytes=500_000, completion_tokens_mean=64))
    late: list[Event] = []
    judged: Counter[bytes] = Counter()
    delivered: dict[bytes, float] = {}
    checks: list[float] = []

    def hear(now: float, _: Peer, event: Event) -> None:
        if event.name == "inference.verdict_late":
            late.append(event)
        elif event.name == "inference.submission_delivered":
            delivered.setdefault(event.fields["submission"], now)
        elif event.name == "validator.verdict":
            judged[event.fields["submission"]] += 1
            checks.append(now - delivered[event.fields["submission"]])

    async def main() -> None:
        simulation.listeners.append(hear)
        async with simulation.running():
            await start_bootstrap(
                simulation, trainers=["trainer"], validators=["v0", "v1"], groups_per_step=8,
                groups_per_submission=1, max_new_tokens=128, limits=LIMITS,
                thresholds=Thresholds(second_share=0.0, measured_tokens=1),
            )  # fmt: skip
            slow = Hardware(prefill_tokens_per_second=70.0)
            for plan in (
                Plan("v0", ["validator"], hardware=slow),
                Plan("v1", ["validator"], hardware=slow),
                Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=60.0)),
                Plan("w", ["inference"]),
            ):
                await simulation.add(plan).start()
            await trio.sleep_until(SECONDS)

    run_virtual(main, seed=1, limit_seconds=SECONDS + 1)
    assert simulation.violations == []
    assert max(checks) > 2 * LIMITS.verdict_seconds, "one takes long"
    assert not late
    assert len(judged) > 2 and set(judged.values()) == {1}
