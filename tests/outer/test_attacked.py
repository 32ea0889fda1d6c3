"""What befalls trainers in the middle of a run: all that stay end with the same state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from peers.outer.artifacts import Artifacts
from peers.outer.chain import Chain, Link
from peers.outer.following import Following
from peers.outer.gathering import Gathering
from peers.outer.learning import contribution as contribution_file
from peers.outer.learning import state
from peers.outer.learning.contribution import Header
from peers.outer.learning.service import FileJobs, Merging
from peers.outer.learning.state import StateFile, shares
from peers.outer.learning.tensor_file import Shapes
from peers.outer.presence import OuterLoop, Presence
from peers.outer.sharing import Sharing
from peers.outer.store import OuterStore
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.faults import AnyFault, ClockStep, Crash, FullDisk, befall
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.scenarios.several_trainers import WORKLOAD, Agreement
from simnet.simulation import Peer, Plan, Simulation
from swarm.events import Event
from swarm.jobs.outer import Contributed, Merged, MergeRound
from swarm.shardcast.manifest import BadManifest
from swarm.wire.envelope import Envelope
from swarm.wire.manifest import Outer, RunManifest
from swarm.wire.messages import CheckpointReference
from swarm.wire.outer import Contribution, MergedShard, OuterStatus, Rated, RoundRecord
from swarm.world.observable import Observable
from tests.outer.records import TRAINERS, contribution, record
from tests.simnet.test_versions import signed

NAMES = ["a", "b", "c"]
STEP_SECONDS = 20.0


class Said:
    """What the trainers of a simulation say."""

    def __init__(self, simulation: Simulation) -> None:
        self.events: list[tuple[str, Event]] = []
        simulation.listeners.append(lambda _, peer, event: self.events.append((peer.name, event)))

    def named(self, name: str, peer: str = "") -> list[dict[str, Any]]:
        return [e.fields for who, e in self.events if e.name == name and peer in ("", who)]


def outlast(
    meanwhile: Callable[[Simulation, RunManifest], Awaitable[object]],
    *,
    rounds: int = 4,
    quorum: int = 2,
    stay: list[str] = NAMES,
    seconds: float = 600.0,
) -> Said:
    """Run three trainers while something happens; all that stay must end with one state."""

    async def main() -> Said:
        simulation = Simulation(1, workload=WORKLOAD)
        Agreement(simulation)
        said = Said(simulation)
        async with simulation.running():
            outer = Outer(rounds=rounds, quorum=quorum, grace_seconds=5.0, deadline_seconds=60.0)
            bootstrap = await start_bootstrap(
                simulation, trainers=NAMES, validators=NAMES[:1], outer=outer
            )
            for name in NAMES:
                hardware = Hardware(step_seconds=STEP_SECONDS)
                await simulation.add(Plan(name, ["replica"], SERVER, hardware)).start()
            done = simulation.expect("outer.run_complete", stay)
            manifest = bootstrap.plan.manifests[0].expect(RunManifest)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(meanwhile, simulation, manifest)
                await simulation.meet(done, seconds)
                nursery.cancel_scope.cancel()
        assert simulation.violations == []
        return said

    return run_virtual(main, seed=1, limit_seconds=2000.0)


FAULTS: dict[str, AnyFault] = {
    "all lose power at once": Crash(at=1.5 * STEP_SECONDS, seconds=5.0, peers=NAMES),
    "a full disk": FullDisk(at=3.2 * STEP_SECONDS, seconds=100.0, peers=["c"]),
    "a clock that jumps ahead": ClockStep(at=30.0, ahead_seconds=50.0, peers=["c"]),
    "a clock that jumps back": ClockStep(at=30.0, ahead_seconds=-50.0, peers=["c"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_all_trainers_end_with_one_state_in_spite_of(fault: str) -> None:
    said = outlast(lambda simulation, _: befall(simulation, [FAULTS[fault]]), rounds=10)
    assert len(said.named("outer.run_complete")) == 3


def test_a_trainer_that_the_owner_removes_counts_until_then() -> None:
    """Its contribution counts in a record that exists, and in none that is made afterwards."""
    identity = ""

    async def remove(simulation: Simulation, manifest: RunManifest) -> None:
        nonlocal identity
        identity = simulation.peers["c"].id
        await trio.sleep(2.5 * STEP_SECONDS)
        stay = [key for key in manifest.trainers if key.peer != identity]
        simulation.disturbed = 1  # a peer may end
        new = msgspec.structs.replace(manifest, version=2, trainers=stay)
        part = simulation.peers["a"].part
        assert part is not None
        part.gossip.publish(signed(simulation, new))
        await trio.sleep_forever()

    said = outlast(remove, stay=["a", "b"], rounds=5)
    merged = {each["round"]: each["trainers"] for each in said.named("outer.merged", "a")}
    assert [round for round, trainers in merged.items() if identity in trainers] == [1, 2]
    assert sorted(merged) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_who_comes_when_the_others_vanish_goes_on_alone_soon() -> None:
    """It knows a heavier chain, whose state nobody can give it any more."""

    async def vanish(simulation: Simulation, _: RunManifest) -> None:
        peers = simulation.peers
        await trio.sleep(10.0)
        await peers["c"].kill()
        await trio.sleep(3.2 * STEP_SECONDS)
        known = simulation.expect("outer.together", ["c"])
        await peers["c"].start(resume=True)
        assert await simulation.meet(known, 60.0)
        for name in "ab":
            await peers[name].kill()
        await trio.sleep_forever()

    said = outlast(vanish, stay=["c"], rounds=6, seconds=420.0)
    assert said.named("outer.behind", "c")


def test_what_a_killed_process_left_is_deleted() -> None:
    """Or each death in the wrong moment would cost the room of an inner state."""
    left: list[str] = []

    async def kill(simulation: Simulation, _: RunManifest) -> None:
        peer = simulation.peers["c"]
        await trio.sleep(1.5 * STEP_SECONDS)
        await peer.kill()
        for name in ("inner-99", "state-00"):
            await peer.disk.write(f"outer/{name}/notes", b"")
        await peer.start(resume=True)
        await trio.sleep(1.0 * STEP_SECONDS)
        left.extend(peer.disk.list("outer"))
        assert peer.part is not None and peer.part.store._pins, "its state may be deleted"
        await trio.sleep_forever()

    outlast(kill)
    assert left and not {"inner-99", "state-00"} & set(left)


def test_a_contribution_of_another_branch_counts_once_its_branch_is_followed() -> None:
    ours, theirs = record([contribution(0)]), record([contribution(1, tokens=50)], signer=1)
    chain = Chain(1)
    chain.add(ours)
    chain.add(theirs)
    late = contribution(1, theirs.digest, 1)

    async def main() -> None:
        simulation = Simulation(1, workload=WORKLOAD)
        said = Said(simulation)
        async with simulation.running():
            await start_bootstrap(simulation, trainers=NAMES, validators=NAMES[:1])
            peer = simulation.add(Plan("a", ["observer"], SERVER))
            await peer.start()
            await trio.sleep(30.0)  # it joins
            part = peer.part
            assert part is not None
            mine = late.signed(TRAINERS[1], part.run.id)
            loop = OuterLoop(part, chain, Presence(part), Artifacts(part), Observable(None))
            gathering = Gathering(loop, Sharing(loop))
            for _ in range(2):
                assert not gathering._is_new(mine.trainer, mine, ours.digest)
            assert len(said.named("outer.contribution_refused")) == 1
            copied = replace(late, trainer=TRAINERS[0].peer_id)  # it names another one's files
            assert not gathering._is_new(copied.trainer, copied, theirs.digest)
            assert gathering._is_new(mine.trainer, mine, theirs.digest)
            sized = replace(mine, total_bytes=0).signed(TRAINERS[1], part.run.id)
            nobody: Any = None
            await gathering._take(sized, nobody, 10)
            assert "it has 0 bytes" in gathering.reason(sized)
            with pytest.raises(BadManifest, match="not named by its trainer and its base"):
                await Artifacts(part).fetch_contribution(mine)
            gathering = Gathering(loop, Sharing(loop))
            made_up = late.signed(TRAINERS[2], part.run.id)
            assert not gathering._is_new(made_up.trainer, made_up, theirs.digest)
            assert "has not signed it" in said.named("outer.contribution_refused")[-1]["reason"]

    run_virtual(main, seed=1, limit_seconds=1000.0)


# --- one bad trainer -------------------------------------------------------------------------


class Bad:
    """Trainer c: whenever another one has merged a round, it signs records by itself."""

    def __init__(
        self, simulation: Simulation, records: int = 1, state: bytes = b"", keys: int = 0
    ) -> None:
        """`keys`: others of its own in whose names each record lists a contribution as well."""
        self._simulation = simulation
        self._identities = [simulation.peers["c"].identity, *TRAINERS[:keys]]
        self._records, self._state = records, state
        self._signed: set[bytes] = set()
        simulation.listeners.append(self._hear)
        self._merged, self._told = trio.open_memory_channel[dict[str, Any]](100)[::-1]

    def _hear(self, _: float, peer: Peer, event: Event) -> None:
        if event.name == "outer.merged" and peer.name != "c":
            self._told.send_nowait(event.fields)

    async def run(self) -> None:
        async for merged in self._merged:
            part = self._simulation.peers["c"].part
            if merged["record"] in self._signed or part is None:
                continue
            self._signed.add(merged["record"])
            parent, round, state = merged["record"], merged["round"], merged["state"]
            for number in range(self._records):
                mine = [
                    Contribution(
                        trainer=key.peer_id,
                        base=parent,
                        base_round=round,
                        artifact=CheckpointReference(
                            lineage=round,
                            step=number,
                            digest=bytes([number, at]) * 16,
                            size_bytes=9,
                        ),
                        total_bytes=1000,
                        tokens=1,
                    ).signed(key, part.run.id)
                    for at, key in enumerate(self._identities, 1)
                ]
                message = RoundRecord(
                    round=round + 1,
                    parent=parent,
                    state=self._state or state,
                    contributions=sorted(mine, key=lambda each: each.trainer),
                    tokens=merged["tokens"] + (number + 1) * len(mine),
                )
                envelope = await part.seal(message, 3600.0)
                part.gossip.publish(envelope)
                parent, round = envelope.digest, round + 1


def test_rounds_that_one_trainer_makes_by_itself_are_not_followed() -> None:
    """Or it would own the merge: it need not wait for anybody's inner steps."""

    async def attack(simulation: Simulation, _: RunManifest) -> None:
        await Bad(simulation, records=3).run()

    said = outlast(attack, stay=["a", "b"], rounds=4)
    for name in "ab":
        merged = {each["round"]: len(each["trainers"]) for each in said.named("outer.merged", name)}
        assert sorted(merged) == [1, 2, 3, 4]
        assert min(merged.values()) >= 2
        assert not said.named("outer.behind", name)
        assert not said.named("outer.round_abandoned", name)


def test_a_record_that_lists_keys_that_nobody_has_named_is_not_followed() -> None:
    """As many contributions as the quorum, all by one trainer."""

    async def attack(simulation: Simulation, _: RunManifest) -> None:
        await Bad(simulation, keys=3).run()

    said = outlast(attack, stay=["a", "b"], rounds=4)
    for name in "ab":
        assert [each["round"] for each in said.named("outer.merged", name)] == [1, 2, 3, 4]
        assert not said.named("outer.behind", name)


@pytest.mark.parametrize("admission", ["named", "scored"])
def test_what_a_record_may_list_and_rate(admission: Any) -> None:
    async def main() -> None:
        simulation = Simulation(1, workload=WORKLOAD)
        async with simulation.running():
            terms = Outer(rounds=2, strangers_max=1, admission=admission)
            await start_bootstrap(simulation, trainers=NAMES, validators=["a"], outer=terms)
            peer = simulation.add(Plan("a", ["observer"], SERVER))
            await peer.start()
            await trio.sleep(30.0)  # it joins
            part = peer.part
            assert part is not None
            loop = OuterLoop(part, Chain(1), Presence(part), Artifacts(part), Observable(None))
            store = OuterStore(part.node.disk.database("outer.sqlite"))
            following = Following(loop, store, Sharing(loop))
            named = part.run.manifest.trainer_ids()

            def is_unfair(trainers: list[str], rated: list[Rated]) -> bool:
                listed = [replace(contribution(0), trainer=each) for each in sorted(trainers)]
                message = replace(record(listed).expect(RoundRecord), rated=rated)
                envelope = dataclasses.replace(record(listed), message=message)
                return following._is_unfair(Link.of(envelope))

            stranger, other = TRAINERS[0].peer_id, TRAINERS[1].peer_id
            full = [Rated(each, 3000, 3000, 1500, 1500) for each in sorted((stranger, other))]
            one = [each for each in full if each.trainer == stranger]
            assert not is_unfair(named, [])
            assert is_unfair([*named, stranger], []), "it is not named"
            assert is_unfair([*named, stranger], one) is (admission == "named")
            assert is_unfair([*named, stranger, other], full), "more than outer.strangers_max"
            assert is_unfair(named, [Rated(named[1], -3000, 0, -750, 0)]), "a trainer is not scored"

    run_virtual(main, seed=1, limit_seconds=1000.0)


def test_a_record_that_states_another_outer_state_than_most_have_is_not_followed() -> None:
    """Or the others would believe that their own bits are wrong, and fetch the signer's state."""

    async def attack(simulation: Simulation, _: RunManifest) -> None:
        await Bad(simulation, state=b"\x07" * 32).run()

    said = outlast(attack, stay=["a", "b"], rounds=3, quorum=1)
    refused = [each["reason"] for each in said.named("outer.record_refused", "a")]
    # The signer may have said what it has before the others compared.
    counted = ("3 trainers have this one, 0 the other", "2 trainers have this one, 1 the other")
    assert any(reason.endswith(counted) for reason in refused)
    for name in "ab":  # who has merged first does not know yet what the others have, and waits
        assert not any(each["last"] for each in said.named("outer.behind", name))
        assert not said.named("outer.recovered", name)


def test_a_trainer_that_claims_too_many_tokens_contributes_nothing() -> None:
    async def start(simulation: Simulation, _: RunManifest) -> None:
        peer = simulation.peers["c"]
        await peer.kill()
        peer.plan.fabricates = "claims"
        await peer.start(resume=True)
        await trio.sleep_forever()

    said = outlast(start, stay=["a", "b"], rounds=3)
    refused = {each["reason"] for each in said.named("outer.contribution_refused", "a")}
    assert len(refused) == 1
    assert "it claims 17,592,186,044,416 tokens; the inner steps" in refused.pop()
    assert all(len(each["trainers"]) == 2 for each in said.named("outer.merged", "a"))


# --- shards ----------------------------------------------------------------------------------


def merged(
    meanwhile: Callable[[Simulation, RunManifest], Awaitable[object]],
    *,
    stay: list[str] = NAMES,
    rounds: int = 4,
    seconds: float = 600.0,
    bad: str = "",
    seed: int = 1,
) -> Said:
    """`outlast` with four shards, of which each trainer makes all others' again. Trainer c
    fabricates `bad`. States may differ until the right shard counts; the last must not."""

    async def main() -> Said:
        simulation = Simulation(seed, workload=WORKLOAD)
        said = Said(simulation)
        async with simulation.running():
            outer = Outer(
                rounds=rounds, grace_seconds=5.0, deadline_seconds=60.0, shards=4, audit_share=1.0
            )
            bootstrap = await start_bootstrap(
                simulation, trainers=NAMES, validators=NAMES[:1], outer=outer
            )
            for name in NAMES:
                plan = Plan(name, ["replica"], SERVER, Hardware(step_seconds=STEP_SECONDS))
                plan.fabricates = bad if name == "c" else ""
                await simulation.add(plan).start()
            done = simulation.expect("outer.run_complete", stay)
            manifest = bootstrap.plan.manifests[0].expect(RunManifest)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(meanwhile, simulation, manifest)
                assert await simulation.meet(done, seconds)
                nursery.cancel_scope.cancel()
        ends = {each["state"] for name in stay for each in said.named("outer.run_complete", name)}
        assert len(ends) == 1
        return said

    return run_virtual(main, seed=seed, limit_seconds=2000.0)


async def nothing(_: Simulation, __: RunManifest) -> None:
    await trio.sleep_forever()


def test_who_signs_a_wrong_shard_is_left_out_and_the_right_one_counts() -> None:
    said = merged(nothing, stay=["a", "b"], bad="shards", seed=2)
    for name in "ab":
        wrong = {each["trainer"] for each in said.named("outer.shard_wrong", name)}
        assert len(wrong) == 1
        assert said.named("outer.repeated", name), "its wrong shard had been used"
        last = said.named("outer.merged", name)[-1]
        assert last["round"] == 4 and len(last["trainers"]) == 2
        # It believes its own results, and accuses the others.
        assert {e["trainer"] for e in said.named("outer.accusation_false", name)} <= wrong


async def status_of(
    simulation: Simulation, name: str, merged_by: str
) -> tuple[OuterStatus, MergedShard]:
    """A trainer's newest status, and a shard that another one has merged, as soon as both are."""
    await trio.sleep(0.75 * STEP_SECONDS)  # it joins
    peer, heard = simulation.peers[name], dict[str, OuterStatus]()
    assert peer.part is not None

    news = Observable(None)

    def hear(envelope: Envelope) -> None:
        heard[envelope.sender] = envelope.expect(OuterStatus)
        news.touch()

    peer.part.gossip.listen(OuterStatus, hear)
    other = simulation.peers[merged_by].id
    while peer.id not in heard or other not in heard or not heard[other].merged:
        await news.wait_change()
    return heard[peer.id], heard[other].merged[-1]


def test_a_trainer_that_signs_two_results_is_left_out() -> None:
    """Whoever hears the second makes the shard again, and knows which is right."""

    async def sign_two(simulation: Simulation, _: RunManifest) -> None:
        status, mine = await status_of(simulation, "c", "c")
        peer = simulation.peers["c"]
        assert peer.part is not None
        second = msgspec.structs.replace(mine, values=b"\x07" * 32)
        second = second.signed(peer.identity, peer.part.run.id)
        await peer.part.announce(msgspec.structs.replace(status, merged=[second]), 60.0)
        await trio.sleep_forever()

    said = merged(sign_two, stay=["a", "b"], rounds=5)
    for name in "ab":
        assert len(said.named("outer.shard_wrong", name)) == 1


def test_a_false_accuser_is_ignored_from_then_on() -> None:
    async def accuse(simulation: Simulation, _: RunManifest) -> None:
        status, right = await status_of(simulation, "c", "a")
        part = simulation.peers["c"].part
        assert part is not None
        await part.announce(msgspec.structs.replace(status, disputed=[right]), 60.0)
        await trio.sleep_forever()

    said = merged(accuse, rounds=5)
    assert said.named("outer.accusation_false", "b")
    assert not said.named("outer.shard_wrong")


def test_a_run_goes_on_when_those_who_were_to_merge_are_gone() -> None:
    """Two of three lose power: the third merges by itself what it has, and its own."""

    async def vanish(simulation: Simulation, _: RunManifest) -> None:
        await trio.sleep(2.0 * STEP_SECONDS)
        for name in "bc":
            await simulation.peers[name].kill()
        await trio.sleep_forever()

    said = merged(vanish, stay=["a"], rounds=4)
    assert said.named("outer.run_complete", "a")


SHAPES: Shapes = {"a.weight": (3, 700), "b.norm": (5,)}
HONEST = 4


def values_of(seed: int) -> dict[str, Tensor]:
    """A pseudo-gradient: every trainer's has a common part, and noise of its own."""
    common, own = torch.Generator().manual_seed(9), torch.Generator().manual_seed(seed)
    return {
        name: 1e-5 * (torch.randn(shape, generator=common) + torch.randn(shape, generator=own))
        for name, shape in SHAPES.items()
    }


class Merge(FileJobs):
    """Merges the contributions of four honest trainers, by the production code, and a bad one's."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._model = Merging(folder, None, SHAPES, torch.float32)
        self._folder = folder
        path = folder / "before" / state.FILE
        path.parent.mkdir()
        state.begin(SHAPES, lambda name: torch.zeros(SHAPES[name]), path)

    def _contributed(self, trainer: str, values: dict[str, Tensor], tokens: int) -> Contributed:
        folder = self._folder / f"contribution-{trainer}"
        folder.mkdir(exist_ok=True)
        contribution_file.write(
            folder / contribution_file.FILE,
            Header("fp32", list(SHAPES.items())),
            lambda name, piece: values[name].reshape(-1)[piece],
            lambda name, piece, rest: None,
        )
        return Contributed(trainer=trainer, folder=str(folder), tokens=tokens)

    def run(
        self, bad: Callable[[Tensor], Tensor] | None = None, tokens: int = 640
    ) -> tuple[Tensor, Merged]:
        """Return the step of the merge, flat. `bad`: what the bad trainer makes of its values."""
        given = [self._contributed(f"{n}", values_of(n), 640) for n in range(HONEST)]
        if bad is not None:
            spoilt = {name: bad(each) for name, each in values_of(HONEST).items()}
            given.append(self._contributed("bad", spoilt, tokens))
        job = MergeRound(
            state=str(self._folder / "before"),
            contributions=given,
            momentum=0.0,
            learning_rate=1.0,
            folder=str(self._folder / "after"),
        )
        merged = trio.run(self.merge, job)
        after = StateFile(self._folder / "after" / state.FILE)
        return -torch.cat([after.weight(name).clone() for name in SHAPES]), merged


def test_a_claim_of_tokens_gains_nothing(tmp_path: Path) -> None:
    merge = Merge(tmp_path)
    _, fair = merge.run(lambda values: values)
    _, claimed = merge.run(lambda values: values, tokens=1 << 44)
    assert claimed.digest == fair.digest


def test_honest_contributions_are_merged_as_if_there_were_no_bounds(tmp_path: Path) -> None:
    step, _ = Merge(tmp_path).run()
    mean = torch.zeros(len(step))
    for number in range(HONEST):
        flat = torch.cat([each.reshape(-1) for each in values_of(number).values()])
        mean += flat * (640 / (640 * HONEST))
    assert torch.equal(step, mean)


@pytest.mark.parametrize(
    ("bad", "share"),
    [
        (lambda values: values * 1e6, 2.0),
        (lambda values: -values, 1.2),
        (lambda values: values * -1e6, 2.0),
        (torch.zeros_like, 0.0),
        (lambda values: values * 1e-30, 0.0),
    ],
)
def test_one_of_five_moves_the_mean_by_at_most_two_fifths_of_a_contribution(
    bad: Callable[[Tensor], Tensor], share: float, tmp_path: Path
) -> None:
    """So it cannot turn the mean around. `share`: norm of its part, in those of an honest one."""
    merge = Merge(tmp_path)
    honest, _ = merge.run()
    step, merged = merge.run(bad, tokens=1 << 44)
    assert merged.left_out == []
    assert merged.shortened == (["bad"] if share == 2.0 else [])
    norms = [
        float(torch.cat([each.reshape(-1) for each in values_of(number).values()]).norm())
        for number in range(HONEST)
    ]
    moved = float((step - honest * HONEST / (HONEST + 1)).norm())
    assert moved <= max(norms) * (share / (HONEST + 1) + 1e-6)
    assert float(step @ honest) > 0.25 * float(honest @ honest)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 101.0])
def test_values_that_cannot_be_merged_are_left_out_with_their_claim(
    value: float, tmp_path: Path
) -> None:
    merge = Merge(tmp_path)
    _, honest = merge.run()
    _, merged = merge.run(lambda values: torch.full_like(values, value), tokens=1 << 44)
    assert merged.digest == honest.digest
    assert [each.trainer for each in merged.left_out] == ["bad"]


@given(
    honest=st.lists(st.floats(1.0, 1.9), min_size=2, max_size=12),
    norm=st.floats(0.0, 1e12),
    claim=st.integers(1, 1 << 44),
)
def test_one_of_any_number_has_the_pull_of_two_honest_ones_at_most(
    honest: list[float], norm: float, claim: int
) -> None:
    *factors, bad = shares([640] * len(honest) + [claim], [*honest, norm])
    number = len(honest) + 1
    assert bad * norm <= 2 * max(honest) / number * (1 + 1e-12)
    if number % 2 or norm >= min(honest):  # the least of an even number may be the lower median
        assert min(factors) >= 1 / number * (1 - 1e-12)
