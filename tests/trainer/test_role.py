"""The trainer role among simulated peers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
import trio

from peers.learning.state_format import STATES
from peers.trainer import collector
from peers.trainer.accepted import KEPT
from peers.trainer.role import TrainerRole
from simnet.compute.setting import Hardware
from simnet.compute.training import TrainerModel
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.jobs.training import Trained, TrainStep
from swarm.ledger.entries import Consumed, Entry, Judged, decode
from swarm.node.trusted import UNGRADED_MAX
from swarm.sentences import sentence
from swarm.shardcast.manifest import digest_of, parse
from swarm.wire.manifest import Adapter, Objective, Thresholds
from swarm.wire.messages import Evaluation, Evidence, Verdict
from tests.orders import verdict
from tests.trainer.runs import RUN, finish, restart, simulated, start_run

RUNNER = RUN


async def test_when_no_work_comes_from_workers_that_are_there_it_asks_them_for_more() -> None:
    """What they made may be lost for good, and their quota with it."""
    async with simulated() as (simulation, said):
        await start_run(simulation, "validator", "trainer")
        slow = Hardware(tokens_per_second=2.0)
        await simulation.add(Plan("inference-slow", ["inference"], hardware=slow)).start()
        await trio.sleep(200)
    assert not said.named("validator.verdict")
    opened = said.named("trainer.step_opened")
    assert [fields["revision"] for fields in opened] == [0, 1, 2, 3]
    assert {fields["step"] for fields in opened} == {0}


async def test_without_rollouts_it_says_whom_it_waits_for_and_goes_on() -> None:
    async with simulated() as (simulation, said):
        peers = await start_run(simulation, "validator", "trainer")
        await trio.sleep(200)
        late = simulation.add(Plan("inference-late", ["inference"]))
        await late.start()
        await finish(simulation)
        assert peers["trainer"].alive
    starved = said.named("trainer.starved")
    assert 5 <= len(starved) <= 8
    for fields in starved:
        assert fields["groups_missing"] == 8 and fields["groups_unjudged"] == 0
        assert fields["waiting_for"] == "any inference peer: none is there"
    assert [round(fields["seconds"]) for fields in starved[:2]] == [30, 60]

    trained = said.named("trainer.step_trained")
    assert len(trained) == 3
    assert trained[0]["idle_rollouts_seconds"] > 180
    for fields in trained:  # every second of a step has one cause
        waited = fields["idle_rollouts_seconds"] + fields["idle_checks_seconds"]
        assert fields["idle_seconds"] == waited
        assert fields["step_seconds"] >= waited + fields["seconds"] - 1e-6
        assert fields["seconds"] >= fields["train_seconds"] + fields["idle_weights_seconds"] - 1e-6


@pytest.mark.slow
async def test_it_publishes_a_policy_while_the_next_step_trains() -> None:
    """Once rollouts are there, nothing waits for its writing and publishing."""
    async with simulated(model_bytes=1_000_000_000) as (simulation, said):
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", steps=3, step_seconds=60.0
        )
        disk = peers["trainer"].disk
        await finish(simulation)
        assert disk.list("trainer/states") == ["0-2", "0-3"]
        assert disk.list("accepted") == []
    trained = said.named("trainer.step_trained")
    assert [fields["step"] for fields in trained] == list(range(3))
    for fields in trained:
        assert fields["publish_seconds"] > 1 > fields["idle_weights_seconds"]


async def test_what_arrives_before_the_batch_is_whole_is_scored_while_it_waits() -> None:
    """Once per step, and before the step trains; a batch that is already whole need not wait."""
    calls: list[tuple[str, set[bytes]]] = []
    async with simulated() as (simulation, _):
        tell = simulation.tell

        def hear(peer: Peer, life: trio.CancelScope, what: str, **facts: Any) -> None:
            if what == "scored":
                calls.append((what, set(facts["submissions"])))
            elif what == "trained":
                calls.append((what, {each.digest for each, _ in facts["rollouts"]}))
            tell(peer, life, what, **facts)

        simulation.tell = hear  # type: ignore[method-assign]
        await start_run(simulation, "validator", "trainer", "inference-one", "inference-two")
        await finish(simulation)
    scored: set[bytes] = set()
    steps_ahead = 0
    for what, submissions in calls:
        if what == "scored":
            assert submissions and not submissions & scored
            scored |= submissions
        else:
            assert scored <= submissions
            steps_ahead += bool(scored)
            scored.clear()
    assert steps_ahead
    assert [what for what, _ in calls].count("trained") == 3


def publishes(simulation: Simulation, step: int) -> Any:
    """The expectation that the trainer publishes policy `step`."""
    return simulation.expect(
        "trainer.checkpoint_published", ["trainer"], lambda event: event.fields["step"] == step
    )


@pytest.mark.parametrize(("save_steps", "kept", "states"), [(5, 5, 2), (3, 2, 4), (1, 5, 10)])
async def test_ten_steps_write_few_states_and_a_crash_repeats_the_rest(
    save_steps: int, kept: int, states: int
) -> None:
    """However few policies other peers keep; a state is the largest file that a trainer writes."""
    written: dict[str, int] = {}
    async with simulated() as (simulation, said):

        def look(_: float, peer: Peer, event: Event) -> None:
            if event.name == "trainer.checkpoint_published":
                for name in peer.disk.list(STATES):
                    written[name] = peer.disk.size_bytes(f"{STATES}/{name}/state")

        simulation.listeners.append(look)
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", steps=10, step_seconds=5.0,
            save_steps=save_steps, checkpoints_kept=kept,
        )  # fmt: skip
        trainer = peers["trainer"]
        assert await simulation.meet(publishes(simulation, 8), 1800)
        await trainer.kill()
        for name in ("validator", "inference-one"):  # nobody can give a policy back
            await peers[name].kill()
            await peers[name].disk.remove("checkpoints")
            await peers[name].start()
        await trainer.start(resume=True)
        await finish(simulation)
    names = said.names()
    one = max(written.values())
    assert sum(written.values()) <= (states + 1) * one  # and the one that it began with
    assert "trainer.rolled_back" not in names
    published = said.named("trainer.checkpoint_published")
    manifests = {(each["step"], each["manifest"]) for each in published}
    assert len(manifests) == 11  # each policy came out the same again


@pytest.mark.parametrize("save_steps", [1, 3])
@pytest.mark.parametrize("after", [0.0, 0.3, 2.0, 6.0])
async def test_killed_while_it_writes_it_repeats_what_was_lost(
    save_steps: int, after: float
) -> None:
    """Every policy that was announced comes out the same again, and no batch is taken twice."""
    async with simulated() as (simulation, said):
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", steps=8, step_seconds=5.0,
            save_steps=save_steps, checkpoints_kept=9,
        )  # fmt: skip
        trainer = peers["trainer"]
        for step in (2, 4):
            assert await simulation.meet(publishes(simulation, step), 1800)
            await trio.sleep(after)
            await restart(trainer)
        await finish(simulation)
        entries = consumed(trainer)
    names = said.names()
    assert "trainer.rolled_back" not in names
    published = said.named("trainer.checkpoint_published")
    assert {(e["lineage"], e["step"]) for e in published} == {(0, step) for step in range(9)}
    assert len({entry.submission for entry in entries}) == len(entries)
    assert (save_steps == 1) or "trainer.step_repeated" in names


async def test_a_run_that_synthesises_keeps_what_it_consumed_also_over_crashes() -> None:
    async with simulated() as (simulation, _):
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", steps=6, step_seconds=5.0,
            save_steps=3, checkpoints_kept=9, objective=Objective(name="synthesis"),
        )  # fmt: skip
        trainer = peers["trainer"]
        for step in (1, 4):
            assert await simulation.meet(publishes(simulation, step), 1800)
            await restart(trainer)
        await finish(simulation)
        used = {each.submission for each in consumed(trainer) if "carried" not in each.outcomes}
        await trainer.kill()
        database = trainer.disk.database("trainer.sqlite")
        assert {digest for (digest,) in database.read("SELECT digest FROM kept")} == used
        assert set(trainer.disk.list(KEPT)) == {f"{each.hex()}.rollouts" for each in used}


async def test_what_cannot_be_repeated_opens_a_new_lineage() -> None:
    """A policy is published, the state before it is older, and a file of its batch is gone."""
    async with simulated() as (simulation, said):
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", steps=6, step_seconds=5.0,
            save_steps=4, checkpoints_kept=9,
        )  # fmt: skip
        trainer = peers["trainer"]
        assert await simulation.meet(publishes(simulation, 2), 1800)
        await trainer.kill()
        for name in trainer.disk.list("accepted"):
            await trainer.disk.remove(f"accepted/{name}")
        await trainer.start(resume=True)
        await finish(simulation)
        entries = consumed(trainer)
        assert len({entry.submission for entry in entries}) == len(entries)
    back = said.named("trainer.rolled_back")
    assert [(fields["step"], fields["lineage"]) for fields in back] == [(0, 1)]
    assert "is not on this disk" in back[0]["reason"]


COLLAPSING: dict[str, Any] = {"reward_start": 0.9, "reward_gain": -0.06}
"""The reward of each policy is lower than that of the one before, until it is 0."""


async def test_a_run_that_collapses_is_rolled_back_once_and_goes_on() -> None:
    async with simulated(**COLLAPSING) as (simulation, said):
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", steps=40, step_seconds=5.0,
            save_steps=5, groups_per_step=32,
        )  # fmt: skip
        await finish(simulation)
        entries = consumed(peers["trainer"])
        assert len({entry.submission for entry in entries}) == len(entries)
    alarms = [each for each in said.named("trainer.alarm") if each["sign"] == "reward"]
    (back,) = said.named("trainer.rolled_back")
    assert back["lineage"] == 1 and back["step"] <= alarms[0]["step"] - 4
    assert "collapsed" in back["reason"] and "a further collapse is only" in back["reason"]
    assert len(alarms) == 2 and alarms[1]["step"] > back["step"], "the second one is reported"
    assert "trainer.paused" not in said.names()


@pytest.mark.parametrize(
    ("save_steps", "settings"), [(1, {}), (5, {"alarm_action": "report"})], ids=["no state", "off"]
)
async def test_without_a_state_or_the_setting_a_collapse_is_an_alarm(
    save_steps: int, settings: dict[str, Any]
) -> None:
    """States of each step: the two that are kept are younger than the collapse."""
    async with simulated(**COLLAPSING) as (simulation, said):
        await start_run(
            simulation, "validator", "trainer", "inference-one", steps=20, step_seconds=5.0,
            save_steps=save_steps, groups_per_step=32, trainer=settings,
        )  # fmt: skip
        await finish(simulation)
    assert [each["sign"] for each in said.named("trainer.alarm")] == ["reward"]
    assert not {"trainer.rolled_back", "trainer.paused"} & {*said.names()}


async def test_a_deleted_base_of_adapters_is_published_again() -> None:
    """Newcomers may find it nowhere else."""
    async with simulated() as (simulation, said):
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", steps=6, step_seconds=5.0,
            adapter=Adapter(rank=4),
        )  # fmt: skip
        trainer = peers["trainer"]
        assert await simulation.meet(publishes(simulation, 2), 1800)
        await trainer.kill()
        await trainer.disk.remove("checkpoints/0-0")
        await trainer.start(resume=True)
        await finish(simulation)
        newest = await trainer.disk.read("checkpoints/0-6/.manifest")
        base = await trainer.disk.read("checkpoints/0-0/.manifest")
        named = parse(newest).base
        assert named is not None and named.digest == digest_of(base)
    names = said.names()
    assert "trainer.rolled_back" not in names and "shardcast.checkpoint_failed" not in names


@pytest.mark.parametrize(
    ("save_steps", "others", "model_bytes", "lost"),
    [
        (1, True, 3_000_000, ""),
        (4, False, 3_000_000, ""),
        (1, False, 3_000_000, "in use, is on no disk that this trainer can reach"),
        (1, False, 8_000_000, "the deltas that lead to it, would not be those that"),
    ],
)
async def test_a_trainer_whose_policies_were_deleted_goes_on(
    save_steps: int, others: bool, model_bytes: int, lost: str
) -> None:
    """Peers that hold them give them back, or they are trained again. Else a lineage begins."""
    async with simulated(model_bytes=model_bytes, delta_share=0.02) as (simulation, said):
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", steps=6, step_seconds=5.0,
            save_steps=save_steps, checkpoints_kept=9,
        )  # fmt: skip
        trainer = peers["trainer"]
        assert await simulation.meet(publishes(simulation, 3), 1800)
        await trainer.kill()
        await trainer.disk.remove("checkpoints")
        for name in () if others else ("validator", "inference-one"):
            await peers[name].kill()
            await peers[name].disk.remove("checkpoints")
            await peers[name].start()
        await trainer.start(resume=True)
        await finish(simulation)
        entries = consumed(trainer)
        assert len({entry.submission for entry in entries}) == len(entries)
    back = said.named("trainer.rolled_back")
    assert [fields["lineage"] for fields in back] == ([1] if lost else [])
    assert not back or lost in back[0]["reason"]
    manifests: dict[tuple[int, int], set[str]] = {}
    for fields in said.named("trainer.checkpoint_published"):
        key = (fields["lineage"], fields["step"])
        manifests.setdefault(key, set()).add(fields["manifest"])
    assert {len(each) for each in manifests.values()} == {1}


async def test_its_manifests_name_its_mirrors() -> None:
    mirrors = ["https://mirror.example/policies", "http://192.0.2.7:8080"]
    async with simulated() as (simulation, _):
        loaded = simulation.expect("inference.policy_loaded", ["inference-one"])
        peers = await start_run(
            simulation, "validator", "trainer", "inference-one", mirrors=mirrors
        )
        # It fetched from the trainer although nobody answers at the mirrors.
        assert await simulation.meet(loaded, 600)
        part = peers["inference-one"].part
        assert part is not None
        held = part.store.all()
    assert held and all(each.manifest.mirrors == mirrors for each in held)


def consumed(peer: Peer) -> list[Consumed]:
    """What the trainer's own log says of submissions."""
    return [entry for entry in logged(peer) if isinstance(entry, Consumed)]


def logged(peer: Peer) -> list[Entry]:
    """The peer's own log."""
    rows = peer.disk.database("ledger.sqlite").read(
        "SELECT entry FROM entries WHERE owner = ? ORDER BY position", (str(peer.id),)
    )
    return [decode(raw) for (raw,) in rows]


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_file_that_cannot_be_read_is_left_out_and_made_up_for(restarts: bool) -> None:
    """Also when it lies in the pool of a trainer that starts again."""
    async with simulated() as (simulation, said):
        peers = await start_run(simulation, "validator", "trainer", "inference-one")
        trainer = peers["trainer"]
        await trio.sleep(45)  # a step trains, and the pool holds the next one's
        if restarts:
            await trainer.kill()
        for name in trainer.disk.list("accepted"):
            trainer.disk.put(f"accepted/{name}", 0, b"spoilt")
        if restarts:
            await trainer.start(resume=True)
        await finish(simulation)
        entries = consumed(trainer)
    unreadable = said.named("trainer.unreadable")
    lost = {entry.submission for entry in entries if set(entry.outcomes) == {"unreadable"}}
    assert lost and {fields["submission"] for fields in unreadable} == lost
    assert all("its hash differs" in fields["reason"] for fields in unreadable)
    trained = said.named("trainer.step_trained")
    assert [fields["groups"] >= 8 for fields in trained] == [True] * 3
    assert len({entry.submission for entry in entries}) == len(entries)
    assert not said.named("trainer.starved")


async def test_what_an_earlier_version_left_in_the_pool_is_said_once_and_made_up_for() -> None:
    async with simulated() as (simulation, said):
        peers = await start_run(simulation, "validator", "trainer", "inference-one")
        trainer = peers["trainer"]
        await trio.sleep(45)  # a step trains, and the pool holds the next one's
        await trainer.kill()
        first, *others = trainer.disk.list("accepted")
        for name in others:
            old = name.replace(".rollouts", ".parquet")
            await trainer.disk.rename(f"accepted/{name}", f"accepted/{old}")
        await trainer.disk.database("trainer.sqlite").transact(
            lambda connection: connection.execute(
                "UPDATE accepted SET verdict = x'c0' WHERE digest = ?",
                (bytes.fromhex(first.removesuffix(".rollouts")),),
            )
        )
        await trainer.start(resume=True)
        await finish(simulation)
        entries = consumed(trainer)
        assert len({entry.submission for entry in entries}) == len(entries)
    missing = said.named("trainer.rollouts_missing")
    assert len(missing) == 1 and missing[0]["submissions"] > 1
    assert len(said.named("trainer.step_trained")) >= 3


async def test_accepted_work_that_is_lost_is_asked_for_again_at_once() -> None:
    """A lone worker's quota is just what is missing, and part of it is spent for nothing."""
    lost: list[bytes] = []
    async with simulated() as (simulation, said):
        await start_run(simulation, "validator", "trainer", steps=1)

        def lose(_: float, peer: Peer, event: Event) -> None:
            if event.name == "validator.verdict" and not lost:
                lost.append(event.fields["submission"])
                assert peer.part is not None
                peer.part.blobs.unregister(lost[0])

        simulation.listeners.append(lose)
        slow = Hardware(tokens_per_second=250.0)
        await simulation.add(Plan("inference-slow", ["inference"], hardware=slow)).start()
        await finish(simulation)
    assert len(said.named("trainer.fetch_failed")) >= 5
    assert not said.named("trainer.starved")


async def say(peer: Peer, *verdicts: Verdict) -> None:
    """Have a validator publish verdicts on nothing."""
    assert peer.part is not None
    for each in verdicts:
        await peer.part.announce(each, 600.0)


@pytest.mark.parametrize(
    "wasted",
    [
        verdict(0, lineage=7),
        verdict(0, outcome="refused", failed="schema", rewards=[]),
        verdict(0, outcome="quarantined", failed="internal", rewards=[]),
    ],
    ids=["stale", "refused", "quarantined"],
)
async def test_work_that_serves_no_batch_is_asked_for_again_at_once(wasted: Verdict) -> None:
    """Its worker's quota is spent, although the order wants as many groups as before."""
    async with simulated() as (simulation, said):
        peers = await start_run(simulation, "validator", "trainer")
        await trio.sleep(20)
        assert simulation.trace.counts["trainer.step_opened"] == 1
        await say(peers["validator"], wasted)
        await trio.sleep(2)
    opened = said.named("trainer.step_opened")
    assert [(each["revision"], each["groups_wanted"]) for each in opened] == [(0, 8), (1, 8)]
    assert not said.named("trainer.starved")


async def test_a_resumed_trainer_does_not_pause_for_what_was_ungraded_in_its_life_before() -> None:
    ungraded = [
        verdict(n, outcome="quarantined", failed="environment", detail="env fails", rewards=[])
        for n in range(UNGRADED_MAX)
    ]
    async with simulated() as (simulation, said):
        peers = await start_run(simulation, "validator", "trainer")
        trainer = peers["trainer"]
        await trio.sleep(20)
        await say(peers["validator"], *ungraded)
        await trio.sleep(2)
        assert simulation.trace.counts["trainer.paused"] == 1
        await restart(trainer)
        await trio.sleep(20)
        role = trainer.roles[0]
        assert isinstance(role, TrainerRole)
        assert len(role._accepted.forecast._judged) == len(ungraded), "it hears of them again"
    names = said.names()
    assert names.count("trainer.paused") == 1


async def test_what_it_has_no_room_to_hear_while_it_loads_it_reads_in_the_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "VERDICTS_HELD_MAX", 1)
    async with simulated() as (simulation, said):
        peers = await start_run(simulation, "validator", "trainer", "inference-one", steps=1)
        trainer = peers["trainer"]
        loaded = simulation.expect("inference.policy_loaded", ["inference-one"])
        assert await simulation.meet(loaded, 600)
        await trainer.kill()
        await trio.sleep(30)
        assert simulation.trace.counts["validator.verdict"] == 2, "a batch"
        await peers["inference-one"].kill()  # nobody could make up for it
        await trainer.start(resume=True)
        await finish(simulation)
    assert len(said.named("trainer.verdicts_missed")) == 1
    assert not said.named("trainer.starved")


async def test_what_it_has_trained_on_is_remembered_until_it_is_logged() -> None:
    """A verdict heard again meanwhile, too old by then, must not log it as stale before that."""
    async with simulated() as (simulation, _):
        trainer = (await start_run(simulation, "validator", "trainer", steps=20))["trainer"]
        assert await simulation.meet(simulation.expect("trainer.step_opened", ["trainer"]), 600)
        role = trainer.roles[0]
        assert isinstance(role, TrainerRole)
        accepted, trained_on = role._accepted, verdict(0)
        accepted.expect(trained_on)
        accepted._add(trained_on)
        accepted.take(4)
        accepted.trained(0)
        accepted.progress.advance(19)  # far beyond its policy
        await accepted.discard([])
        assert not role._collector._is_new(trained_on)
        entry = Consumed(step=0, submission=trained_on.submission, outcomes=["consumed"] * 4)
        await accepted.log.consumed([entry])
        await accepted.discard([])
        assert not accepted.knows(trained_on.submission)
        assert not role._collector._is_new(trained_on)


async def test_what_arrives_stale_while_others_are_dropped_is_dropped_too() -> None:
    """Or the next batch, taken at once, holds it."""
    async with simulated() as (simulation, _):
        opened = simulation.expect("trainer.step_opened", ["trainer"])
        trainer = (await start_run(simulation, "validator", "trainer"))["trainer"]
        assert await simulation.meet(opened, 600)
        role = trainer.roles[0]
        assert isinstance(role, TrainerRole)
        accepted, late = role._accepted, [verdict(1, lineage=7)]

        def arrive(_: float, __: Peer, event: Event) -> None:
            if event.name == "trainer.stale_dropped" and late:
                accepted._add(late.pop())

        simulation.listeners.append(arrive)
        accepted._add(verdict(0, lineage=7))
        await accepted.drop_stale()
        assert not late and accepted.pool.oldest_first() == []
        entries = consumed(trainer)
    assert sorted(entry.submission[0] for entry in entries) == [0, 1]


async def test_an_accepted_submission_is_dropped_when_another_validator_refuses_it() -> None:
    """And the refusal binds, since it rests on a recomputation."""
    judges: list[str] = []

    def hear(_: float, __: Peer, event: Event) -> None:
        if event.name == "inference.receipt":
            judges.append(event.fields["by"])

    async with simulated() as (simulation, _):
        validators = ["validator", "validator-2"]
        peers = await start_run(simulation, *validators, "trainer", steps=1, validators=validators)
        trainer = peers["trainer"]
        simulation.listeners.append(hear)
        first = simulation.expect("inference.receipt", ["inference-slow"])
        slow = Hardware(tokens_per_second=250.0)
        await simulation.add(Plan("inference-slow", ["inference"], hardware=slow)).start()
        assert await simulation.meet(first, 600)
        await trio.sleep(2)
        role = trainer.roles[0]
        assert isinstance(role, TrainerRole)
        (accepted,) = role._accepted.pool.oldest_first()
        kept = accepted.verdict
        other = next(name for name in validators if peers[name].id != judges[0])
        refusal = msgspec.structs.replace(
            kept, outcome="refused", failed="proofs", rewards=[], rollouts_digest=b"",
            rollouts_bytes=0, evidence=Evidence(tokens=100),
        )  # fmt: skip
        await say(peers[other], refusal)
        await trio.sleep(2)
        assert not role._accepted.pool.matching(lambda v: v.submission == kept.submission)
        await finish(simulation)
        entries = consumed(trainer)
    outcomes = {entry.submission: entry.outcomes for entry in entries}
    assert set(outcomes[kept.submission]) == {"stale"}


WORKERS = [f"inference-{number}" for number in range(3)]


async def test_a_run_whose_environment_fails_says_so_pauses_and_goes_on_once_repaired() -> None:
    async with simulated() as (simulation, said):
        paused = simulation.expect("trainer.paused", ["trainer"])
        peers = await start_run(simulation, "trainer", "validator", *WORKERS, broken=["validator"])
        trainer, validator = peers["trainer"], peers["validator"]
        assert await simulation.meet(paused, 300)
        await trio.sleep(600)  # what was on its way finds nobody, or is judged once more
        judged = simulation.trace.counts["validator.verdict"]
        await trio.sleep(300)
        assert simulation.trace.counts["validator.verdict"] == judged, "it quarantines no longer"
        assert trainer.part is not None
        assert trainer.part.status.doing.startswith("paused: no validator can grade: env")
        order = trainer.part.step_order()
        assert order is not None and order.groups_wanted == 0

        validator.plan.hardware = Hardware()
        for peer in (validator, trainer):
            await restart(peer)
        await finish(simulation)
    assert 5 <= judged <= 20
    names = said.names()
    assert "validator.cannot_grade" in names
    verdicts = said.named("validator.verdict")
    for fields in verdicts[:judged]:
        assert (fields["outcome"], fields["failed"]) == ("quarantined", "environment")
    assert not [name for name in names if name == "membership.peer_evicted"]


async def test_a_group_that_nobody_can_grade_is_credited_and_the_others_train() -> None:
    """The simulation's invariants fail if a quarantined group is trained on.

    A worker whose record spares it most recomputations gains nothing with text that nobody can
    grade: such a submission is always recomputed.
    """
    async with simulated(ungradable_share=0.3, reward_start=0.5) as (simulation, said):
        peers = await start_run(
            simulation, "trainer", "validator", "inference", groups_per_submission=4,
            thresholds=Thresholds(recompute_safety=1.1, audit_share=0.0, measured_tokens=1),
        )  # fmt: skip
        await finish(simulation)
        logs = consumed(peers["trainer"])
        judged = [each for each in logged(peers["validator"]) if isinstance(each, Judged)]
    verdicts = said.named("validator.verdict")
    partly = [each for each in verdicts if each["outcome"] == "accepted" and each["quarantined"]]
    assert partly and "groups are quarantined, the first because" in partly[0]["detail"]
    receipts = said.named("inference.receipt")
    assert {each["groups"] for each in receipts if each["outcome"] == "accepted"} == {4}
    trained = said.named("trainer.step_trained")
    figures = [each["environments"]["simulated"] for each in trained]
    assert any(each["quarantine_rate"] for each in figures)
    for each in figures:
        assert each["groups"] * (1 - each["quarantine_rate"]) >= 8, "others fill their gaps"
    assert sum(each.outcomes.count("consumed") for each in logs) >= 8
    unknown = {each["submission"] for each in verdicts if each["detail"]}
    assert unknown <= {each.submission for each in judged if each.recomputed}
    assert [each for each in judged if not each.recomputed]


@pytest.mark.slow
async def test_a_validator_that_cannot_grade_leaves_the_work_to_others() -> None:
    async with simulated() as (simulation, said):
        validators = ["validator-broken", "validator-sound"]
        peers = await start_run(
            simulation, "trainer", *validators, *WORKERS, validators=validators,
            broken=validators[:1], groups_per_step=64,
        )  # fmt: skip
        await finish(simulation)
    assert not said.named("trainer.paused")
    broken = {event.peer for event in said if event.name == "validator.cannot_grade"}
    assert broken == {peers["validator-broken"].id}


@pytest.mark.slow
async def test_policies_are_evaluated_while_the_run_goes_on() -> None:
    """Each takes about 40 s, a step 60 s; the child of the second one is killed."""
    async with simulated(seed=6) as (simulation, said):
        peers = await start_run(
            simulation, "validator", "trainer", steps=8,
            validator={"evaluate_steps": 2, "evaluate_tasks": 1200},
        )  # fmt: skip
        second = simulation.expect(
            "trainer.checkpoint_published", ["trainer"], lambda event: event.fields["step"] == 2
        )
        await simulation.add(Plan("inference", ["inference"])).start()
        assert await simulation.meet(second, 1800)
        await trio.sleep(10)
        compute: Any = peers["validator"].node and peers["validator"].node.compute
        compute.children["evaluation"].die()
        await finish(simulation)
        for peer in peers.values():
            assert peer.part is not None and peer.part.evaluation.value is not None
            heard = peer.part.evaluation.value.expect(Evaluation)
            assert (heard.reference.step, heard.tasks) == (6, 1200)
    evaluated = said.named("evaluation.done")
    failed = said.named("evaluation.failed")
    assert [each["policy"] for each in evaluated][:3] == [0, 4, 6]
    assert [each["policy"] for each in failed] == [2]
    assert "evaluation was killed" in failed[0]["reason"]
    assert evaluated[1]["environments"]["simulated"]["reward"] == evaluated[1]["reward"]
    assert evaluated[1]["reward"] == pytest.approx(0.28, abs=0.001)
    trained = said.named("trainer.step_trained")
    taken = [each["evaluation_policy"] for each in trained if "evaluation" in each]
    assert taken == [0, 4, 6]
    assert max(each["step_seconds"] for each in trained[2:]) < 70  # no step waited for it


@pytest.mark.slow
async def test_an_evaluation_keeps_its_policy_until_it_ends_and_no_longer() -> None:
    """It takes far longer than a policy is kept: 800 s, at a step a minute."""
    tables = {"evaluate_steps": 100, "evaluate_tasks": 24000}
    removed: dict[int, float] = {}
    async with simulated() as (simulation, said):

        def hear(now: float, peer: Peer, event: Event) -> None:
            if (peer.name, event.name) == ("validator", "shardcast.checkpoint_removed"):
                removed[event.fields["step"]] = now

        simulation.listeners.append(hear)
        peers = await start_run(
            simulation, "validator", "trainer", steps=18, validator=tables, trainer=None
        )
        evaluated = simulation.expect("evaluation.done", ["validator"])
        await simulation.add(Plan("inference", ["inference"])).start()
        assert await simulation.meet(evaluated, 1800)
        assert 0 not in removed and len(removed) >= 2
        await finish(simulation)
        assert 0 in removed
        part = peers["validator"].part
        assert part is not None and (0, 0) not in part.store._pins
    assert not said.named("evaluation.failed")


@pytest.mark.parametrize("memory_check", ["refuse", "report"])
async def test_a_trainer_says_its_plan_first_and_refuses_one_that_does_not_fit(
    memory_check: str,
) -> None:
    fits = memory_check == "report"
    refusal = pytest.raises(AssertionError, match=r"trainer ended: the trainer needs 24\.0 MB")
    with nullcontext() if fits else refusal:
        async with simulated() as (simulation, said):
            await start_run(
                simulation, "trainer", trainer_memory_bytes=20_000_000, memory_check=memory_check
            )
            await trio.sleep(30)
    names = said.names()
    planned = said.named("trainer.planned")[0]
    assert planned["problem"] == "the trainer needs 24.0 MB"
    assert planned["host_parts"] == ["training 24.0 MB"]
    assert ("trainer.step_opened" in names) == fits
    assert "trainer.step_opened" not in names[: names.index("trainer.planned")]


async def test_it_says_why_a_formula_of_another_package_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run goes on; the simulated trainer computes nothing, so it is told what failed."""
    train = TrainerModel.train

    async def failing(self: TrainerModel, job: TrainStep) -> Trained:
        problems = ["the objective 'soft' failed: no luck"] if job.step == 1 else []
        return msgspec.structs.replace(await train(self, job), problems=problems)

    monkeypatch.setattr(TrainerModel, "train", failing)
    async with simulated() as (simulation, said):
        await start_run(simulation, "validator", "trainer", "inference")
        await finish(simulation)
    assert len(said.named("trainer.step_trained")) == 3
    (failed,) = said.named("trainer.formula_failed")
    words = "a part of step 1 was skipped: the objective 'soft' failed: no luck"
    assert sentence("trainer.formula_failed", failed) == words
