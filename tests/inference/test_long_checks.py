"""A check of many times `verdict_seconds`: the worker stays with the validator of its file."""

from __future__ import annotations

from collections import Counter

import trio

from simnet.simulation import Peer
from swarm.events import Event
from swarm.wire.manifest import Limits, Thresholds
from tests.trainer.runs import RUN, simulated, start_run

RUNNER = RUN
LIMITS = Limits(acknowledgement_seconds=2.0, verdict_seconds=6.0, submissions_unjudged_max=1)
SECONDS = 240.0


async def test_a_check_of_minutes_is_made_once() -> None:
    judged: Counter[bytes] = Counter()
    delivered: dict[bytes, float] = {}
    checks: list[float] = []

    def hear(now: float, _: Peer, event: Event) -> None:
        if event.name == "inference.submission_delivered":
            delivered.setdefault(event.fields["submission"], now)
        elif event.name == "validator.verdict":
            judged[event.fields["submission"]] += 1
            checks.append(now - delivered[event.fields["submission"]])

    async with simulated(model_bytes=500_000) as (simulation, said):
        simulation.listeners.append(hear)
        validators = ("validator-0", "validator-1")
        await start_run(
            simulation, *validators, "trainer", "inference", validators=validators, steps=1000,
            groups_per_submission=1, limits=LIMITS, prefill_tokens_per_second=70.0,
            thresholds=Thresholds(second_share=0.0, measured_tokens=1),
        )  # fmt: skip
        await trio.sleep_until(SECONDS)
    assert max(checks) > 2 * LIMITS.verdict_seconds, "one takes long"
    assert not said.named("inference.verdict_late")
    assert len(judged) > 2 and set(judged.values()) == {1}
