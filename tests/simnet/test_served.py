"""Served environments on production roles: turns over the network, takeover, and a forger."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from peers.inference.pending import PendingSubmission
from peers.inference.role import InferenceRole
from peers.inference.turns import ServedTurns, _Episode
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware, Workload
from simnet.simulation import SIMULATED, Plan, Simulation
from swarm.errors import PeerError
from swarm.events import Event
from swarm.jobs import SubmissionOrder
from swarm.rollouts.seeds import nonce_of, rendezvous
from swarm.wire.identity import PeerId
from swarm.wire.messages import Admission, StepOrder
from swarm.wire.turns import unpack
from tests.simnet.runs import going

RUNNER = partial(run_virtual, seed=7)

STEPS = 2
EVICTED = "membership.peer_evicted"
SERVED = replace(SIMULATED, where="served")


def train(
    *,
    turns: int,
    dying: Sequence[str] = (),
    after: str = "inference.submission_made",
    forges: bool = False,
) -> list[tuple[str, Event]]:
    """A run of a served environment with two environment peers; gives all events.

    `dying` are killed after a worker's first event `after`.
    """
    heard: list[tuple[str, Event]] = []

    async def main() -> None:
        simulation = Simulation(
            7,
            workload=Workload(
                model_bytes=3_000_000,
                completion_tokens_mean=64,
                turns=turns,
                prompt_tokens=8,
                observation_tokens=4,
            ),
        )
        simulation.listeners.append(lambda _, peer, event: heard.append((peer.name, event)))
        over = simulation.expect("trainer.run_complete", ["trainer"])
        first = simulation.expect(after, ["w0"])
        async with going(
            simulation,
            Plan("v0", ["validator"]),
            Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=5.0)),
            Plan("e0", ["environment"]),
            Plan("e1", ["environment"]),
            Plan("w0", ["inference"]),
            Plan("w1", ["inference"], acts=InferenceRole, fabricates="turns")
            if forges
            else Plan("w1", ["inference"]),
            steps=STEPS,
            environments=[SERVED],
        ) as peers:
            if dying:
                assert await simulation.meet(first, 600.0)
                for name in dying:
                    await peers[name].kill()
                if len(dying) == 2:
                    await trio.sleep(125.0)
            for name in dying[1:]:
                await peers[name].start_again()
            assert await simulation.meet(over, 3000.0)

    run_virtual(main, seed=7)
    return heard


def verdicts(heard: list[tuple[str, Event]]) -> list[dict[str, Any]]:
    return [event.fields for _, event in heard if event.name == "validator.verdict"]


@pytest.mark.slow
def test_a_dead_environment_peer_is_taken_over() -> None:
    heard = train(turns=2, dying=["e1"])
    found = verdicts(heard)
    assert found and {each["outcome"] for each in found} == {"accepted"}
    numbers = [(e["worker"], e["step"], e["number"]) for e in found]
    assert len(set(numbers)) == len(numbers), "no submission is judged twice"


@pytest.mark.slow
def test_without_environment_peers_all_wait_and_no_work_is_lost() -> None:
    heard = train(turns=1, dying=["e0", "e1"], after="inference.submission_delivered")
    waits = [event.fields for _, event in heard if event.name.endswith(".starved")]
    assert any("no environment peer grades step" in each.get("reason", "") for each in waits)
    assert any("wait for an environment peer" in each.get("reason", "") for each in waits)
    late = [each for each in verdicts(heard) if each["outcome"] != "accepted"]
    assert late and {(e["outcome"], e["failed"]) for e in late} == {("quarantined", "environment")}
    assert all("no environment peer graded it within 120 s" in each["detail"] for each in late)


def test_turns_of_another_place_are_a_proven_fault() -> None:
    heard = train(turns=1, forges=True)
    reasons = [e.fields.get("reason", "") for _, e in heard if e.name == EVICTED]
    assert any("was signed as turn" in reason for reason in reasons)


def events_with(hardware: Hardware, peer: str, name: str, count: int) -> list[dict[str, Any]]:
    """The fields of a peer's first `count` events of this name; two environment peers have this
    hardware."""
    found: list[dict[str, Any]] = []

    async def main() -> None:
        simulation = Simulation(7, workload=Workload(model_bytes=3_000_000, turns=1))
        async with going(
            simulation,
            Plan("v0", ["validator"]),
            Plan("trainer", ["trainer"]),
            Plan("w0", ["inference"]),
            Plan("e0", ["environment"], hardware=hardware),
            Plan("e1", ["environment"], hardware=hardware),
            steps=2,
            environments=[SERVED],
        ):

            def is_last(event: Event) -> bool:
                found.append(event.fields)
                return len(found) == count

            assert await simulation.meet(simulation.expect(name, [peer], is_last), 1200.0)

    run_virtual(main, seed=7)
    return found


def test_a_submission_whose_prompts_hang_is_given_up_and_the_next_begun() -> None:
    found = events_with(
        Hardware(environment_seconds=1000.0), "w0", "inference.submission_given_up", count=3
    )
    assert sorted(each["number"] for each in found) == [0, 1, 2]
    assert all("cannot render the prompt" in each["reason"] for each in found)
    assert "took longer than 30 s" in found[0]["reason"]


def test_a_tool_slower_than_a_request_s_deadline_is_called_once_per_turn() -> None:
    """A worker asks again after 45 s, and its request would end after 60 s. Were a call of 100 s
    lost with its request, none would ever be answered. A submission needs three in a row, and all
    32 children at once."""
    made: list[float] = []

    async def main() -> None:
        workload = Workload(model_bytes=3_000_000, turns=1, is_random=True)
        simulation = Simulation(7, workload=workload)
        slow = Hardware(environment_seconds=100.0)
        async with going(
            simulation,
            Plan("v0", ["validator"]),
            Plan("trainer", ["trainer"]),
            Plan("w0", ["inference"]),
            Plan(
                "e0",
                ["environment"],
                hardware=slow,
                tables={"environment": {"seconds_max": 200, "children": 32}},
            ),
            steps=2,
            environments=[SERVED],
        ):
            verdict = simulation.expect(
                "validator.verdict", ["v0"], lambda event: event.fields["outcome"] == "accepted"
            )
            began = trio.current_time()
            assert await simulation.meet(verdict, 3600.0)
            made.append(trio.current_time() - began)

    run_virtual(main, seed=7)
    assert 300.0 < made[0] < 400.0


async def test_a_submission_is_made_again_after_its_own_environment_failed_over_a_turn() -> None:
    """The peer and its engine go on, with what else is generated."""
    asked: list[int] = []

    def fails(order: SubmissionOrder) -> str:
        asked.append(order.number)
        return "a failure" * (order.number == 0 and asked.count(0) <= 2)

    simulation = Simulation(7, workload=Workload(model_bytes=3_000_000))
    async with going(
        simulation,
        Plan("v0", ["validator"]),
        Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=5.0)),
        Plan("w0", ["inference"], fabricates=fails),
        steps=2,
    ):
        assert await simulation.meet(simulation.expect("trainer.run_complete", ["trainer"]), 900.0)
    counts = simulation.trace.counts
    assert counts["inference.turn_failed"] == 2
    assert counts["inference.submission_given_up"] == 0
    assert counts["inference.ready"] == 1, "no engine was started again"


async def test_a_machine_without_a_sandbox_is_asked_again_and_no_task_is_to_blame() -> None:
    simulation = Simulation(7, workload=Workload(model_bytes=3_000_000, turns=1))
    calls: list[int] = []
    heard: list[tuple[str, Event]] = []
    simulation.listeners.append(lambda _, peer, event: heard.append((peer.name, event)))

    def fails(order: SubmissionOrder) -> str:
        calls.append(order.number)
        return "no sandbox" * (len(calls) <= 20)

    async with going(
        simulation,
        Plan("v0", ["validator"]),
        Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=5.0)),
        Plan("w0", ["inference"]),
        Plan("e0", ["environment"], fabricates=fails),
        steps=2,
        environments=[SERVED],
    ):
        assert await simulation.meet(simulation.expect("trainer.run_complete", ["trainer"]), 900.0)
    assert simulation.trace.counts["environment.sandbox_failed"] > 0
    assert {(e["outcome"], e["detail"]) for e in verdicts(heard)} == {("accepted", "")}


async def test_numbers_without_prompts_do_not_hold_up_those_after_them() -> None:
    """Validators are shown what the environment peers signed instead."""
    simulation = Simulation(7, workload=Workload(model_bytes=3_000_000, turns=1))

    def fails(order: SubmissionOrder) -> str:
        return "a failure" * (order.number < 2)

    async with going(
        simulation,
        Plan("v0", ["validator"]),
        Plan("trainer", ["trainer"], hardware=Hardware(step_seconds=5.0)),
        Plan("w0", ["inference"]),
        Plan("e0", ["environment"], fabricates=fails),
        Plan("e1", ["environment"], fabricates=fails),
        steps=2,
        environments=[SERVED],
    ):
        assert await simulation.meet(simulation.expect("trainer.run_complete", ["trainer"]), 900.0)
    assert simulation.trace.counts["inference.submission_given_up"] >= 4


def test_an_episode_whose_grade_hangs_is_not_gradable() -> None:
    (verdict,) = events_with(Hardware(grade_seconds=1000.0), "v0", "validator.verdict", count=1)
    assert (verdict["outcome"], verdict["failed"]) == ("quarantined", "not_gradable")
    assert "took longer than 30 s" in verdict["detail"]


async def test_a_restarted_environment_peer_serves_a_step_that_it_has_not_heard_of() -> None:
    """The newest order reaches it; that of an older step stands beside the request. An episode that
    is over gets no turn, and one that is not always the same: no worker can choose."""

    workload = Workload(model_bytes=3_000_000, turns=1, is_random=True)
    simulation = Simulation(7, workload=workload)
    async with going(
        simulation,
        Plan("v0", ["validator"]),
        Plan("trainer", ["trainer"]),
        Plan("e0", ["environment"]),
        Plan("e1", ["environment"]),
        Plan("w0", ["inference"]),
        steps=4,
        environments=[SERVED],
    ):
        assert await simulation.meet(simulation.expect("trainer.step_trained", ["trainer"]), 600.0)
        worker = simulation.peers["w0"].part
        assert worker is not None and worker.lease is not None
        old, admission = worker.order.value, worker.lease.admission
        assert old is not None and admission is not None
        trained = simulation.expect(
            "trainer.step_trained", ["trainer"], lambda event: event.fields["step"] >= 1
        )
        assert await simulation.meet(trained, 600.0)
        order, manifest = old.expect(StepOrder), worker.run.manifest
        entry = admission.expect(Admission).entry
        asked = SubmissionOrder(
            run=worker.run.id,
            policy=order.checkpoint,
            step=order.step,
            nonce=nonce_of(order.nonce, entry),
            worker=worker.node.peer_id,
            number=0,
            groups=manifest.sampling.groups_per_submission,
            environments=manifest.environments,
            sampling=manifest.sampling,
        )
        pending = PendingSubmission(order=order, envelope=old, asked=asked, entry=entry, since=0.0)
        names = {str(simulation.identity(name).peer_id): name for name in ("e0", "e1")}
        in_charge, other = rendezvous(list(names), asked.seed())
        first = simulation.peers[names[in_charge]]
        served = ServedTurns(worker)

        async def ask(peer: str, written: int = 255) -> list[int]:
            segments = [prompt.tokens, [1] * written]
            episode = _Episode(pending, prompt.group, 0, segments)
            return unpack((await served._request(PeerId(peer), episode))[1].tokens)

        await first.kill()
        await first.start_again()
        await trio.sleep(20.0)
        with trio.fail_after(60.0):
            prompt = (await served.prompts(pending))[0]
            both: list[list[int]] = []

            async def note() -> None:
                both.append(await ask(in_charge))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(note)
                await trio.sleep(0.01)
                nursery.start_soon(note)
            given = both[0]
            assert both == [given, given], "both children play it at once"
            with pytest.raises(PeerError, match="over: it is as long as the run allows"):
                await ask(in_charge, 256)
            assert await ask(in_charge) == given
            with pytest.raises(PeerError, match=f"{in_charge} is there, and answers"):
                await ask(other)
            begun = _Episode(pending, prompt.group, 1, [prompt.tokens, [1] * 10])
            signed, turn = await served._request(PeerId(in_charge), begun)
            segments = [*begun.segments, unpack(turn.tokens), [2] * 5]
            longer = _Episode(pending, prompt.group, 1, segments, signed)
            assert longer.giver == in_charge
            _, last = await served._ask_with(PeerId(in_charge), longer, segments[:-1])
            assert (last.index, last.over) == (2, True), "it needs only the newest segment"
            with pytest.raises(PeerError, match="omitted tokens are not known here"):
                await served._ask_with(PeerId(in_charge), longer, segments[:-1])
            assert (await served._request(PeerId(in_charge), longer))[1] == last
        await first.kill()
        await trio.sleep(40.0)
        assert await ask(other) != given, "a dead peer is taken over"
        await first.start_again()
        await trio.sleep(20.0)
        assert await ask(in_charge) == given, "it knows what it has signed"
