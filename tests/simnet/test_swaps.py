"""Workers that swap weights while they generate, on production roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import trio

from simnet.clock import run_virtual
from simnet.compute.rollouts import SimulatedRollouts
from simnet.compute.setting import Hardware
from simnet.invariants import collections_in
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from tests.simnet.runs import SMALL, going
from tests.trainer.runs import RUN
from tests.validator.test_numbers import Hand, submitting

RUNNER = RUN

STEPS = 6


def run(
    swaps_max: int, tokens_per_second: float = 150.0, away: tuple[float, float] | None = None
) -> tuple[list[SimulatedRollouts], Counter[str], list[int]]:
    """What was trained on, verdicts by outcome, and the policies that a worker loaded whose
    submissions take longer than a step. The validator is `away` from one second to another."""
    simulation = Simulation(2, workload=SMALL)
    trained: list[SimulatedRollouts] = []
    outcomes: Counter[str] = Counter()
    loaded: list[int] = []

    def hear(_now: float, peer: Peer, event: Event) -> None:
        if event.name == "inference.policy_loaded" and peer.name == "slow":
            loaded.append(dict(event.fields)["policy"])
        if event.name == "validator.verdict":
            outcomes[dict(event.fields)["outcome"]] += 1

    def witness(_peer: Peer, what: str, facts: Mapping[str, Any]) -> None:
        if what == "trained":
            trained.extend(found for _, found in facts["rollouts"])

    simulation.witnesses.append(witness)

    async def main() -> None:
        simulation.listeners.append(hear)
        over = simulation.expect("trainer.run_complete", ["trainer"])
        async with going(
            simulation,
            Plan("v0", ["validator"]),
            Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=3.0)),
            Plan("slow", ["inference"], hardware=Hardware(tokens_per_second=tokens_per_second)),
            Plan("fast", ["inference"]),
            steps=STEPS,
            swaps_max=swaps_max,
        ):
            if away is not None:
                await trio.sleep_until(away[0])
                await simulation.peers["v0"].crash()
                await trio.sleep_until(away[1])
                await simulation.peers["v0"].start()
            assert await simulation.meet(over, 1000.0)
            for peer in simulation.peers.values():
                held = dict(collections_in(peer.part))
                # Whether kept on the disk or not, announcements do not pile up.
                assert held.get("Announced._unstored", 0) <= 1, peer.name
            part, made = simulation.peers["fast"].part, simulation.peers["fast"].disk
            ((oldest,),) = made.database("peer.sqlite").read("SELECT min(step) FROM made")
            assert part is not None and oldest >= STEPS - 1 - part.run.max_staleness > 0

    run_virtual(main, seed=2, limit_seconds=1001)
    return trained, outcomes, loaded


def test_submissions_of_several_policies_are_judged_and_trained_on() -> None:
    trained, outcomes, _ = run(swaps_max=2)
    assert set(outcomes) == {"accepted"}
    several = [each.policies for each in trained if len(each.policies) > 1]
    assert several and max(map(len, several)) <= 3
    assert all(min(each.policies, default=each.policy) >= each.policy for each in trained)


def test_a_policy_that_came_by_a_swap_is_not_replaced_by_an_earlier_one() -> None:
    """The worker waits to load the policy of a new order while a submission is generated, which
    swaps to a later one."""
    _, _, loaded = run(swaps_max=2, tokens_per_second=300.0)
    assert loaded == sorted(loaded)


def test_a_validator_that_was_away_judges_policies_announced_meanwhile() -> None:
    """Their announcements come with the submissions that name them."""
    _, outcomes, _ = run(swaps_max=2, tokens_per_second=300.0, away=(14.0, 20.0))
    assert set(outcomes) == {"accepted"}


class Prophet(Hand):
    """Names a policy that nobody has announced."""

    def make(self, number: int, variant: int = 0) -> bytes:
        made = msgspec.msgpack.decode(super().make(number, variant), type=SimulatedRollouts)
        made.policies = [self.order.policy, 2**31 - 1]
        return msgspec.msgpack.encode(made)


async def test_a_policy_that_nobody_announced_holds_no_lane() -> None:
    async with submitting(swaps_max=1) as (simulation, peers, _, said):
        prophet = Prophet(simulation.peers["worker"], simulation.workload)
        await prophet.deliver(peers["validator"], 0)
        await trio.sleep(1)
    (verdict,) = [dict(event.fields) for event in said if event.name == "validator.verdict"]
    assert verdict["failed"] == "spans" and "no trainer has announced" in verdict["detail"]
    assert not said.named("trust.evicted")
