"""Strangers of a scored run: what counts, what is refused, and what they may not do."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import trio

from peers.outer.artifacts import contribution_key
from peers.outer.rating import rate
from peers.outer.role import ReplicaRole
from peers.outer.sharing import TAKEOVER_SECONDS
from peers.outer.strangers import Strangers
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.scenarios.several_trainers import WORKLOAD, Agreement
from simnet.simulation import Plan, Simulation
from swarm.jobs.outer import OuterService, Scored, ScoreRound
from swarm.node.run_node import RunNode
from swarm.run.run import Run
from swarm.wire.manifest import Outer
from swarm.wire.outer import GENESIS, Contribution, Rated
from swarm.world import ChildDied
from tests.outer.records import contribution, record
from tests.outer.test_attacked import Said

NAMED = ["a", "b"]
ROUNDS = 6


class Outcome(Said):
    """What the peers of a run said, and what they had at its end."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.ids: dict[str, str] = {}
        self.held: dict[str, set[object]] = {}
        """Keys of the artifacts on each trainer's disk."""
        self.roles: dict[str, ReplicaRole] = {}

    def merged(self, name: str = "a") -> dict[int, set[str]]:
        """The names of those whose contributions a trainer has merged, by round."""
        names = {peer: name for name, peer in self.ids.items()}
        said = self.named("outer.merged", name)
        return {each["round"]: {names[peer] for peer in each["trainers"]} for each in said}


def run_with(
    strangers: dict[str, str],
    *,
    named: list[str] = NAMED,
    acts: dict[str, type[ReplicaRole]] | None = None,
    seed: int = 1,
    rounds: int = ROUNDS,
    begins: float = 0.0,
    slower: float = 0.0,
    **outer: Any,
) -> Outcome:
    """Trainers, and strangers with what each fabricates. `acts`: what some really run; of them
    nothing is expected. `begins`: when strangers start; `slower`: by how much. In seconds; rounds
    have 20."""
    acts = acts or {}

    async def main() -> Outcome:
        simulation = Simulation(seed, workload=WORKLOAD)
        agreement, said = Agreement(simulation), Outcome(simulation)
        terms = Outer(
            rounds=rounds, admission="scored", grace_seconds=10.0, deadline_seconds=60.0, **outer
        )
        async with simulation.running():
            bootstrap = await start_bootstrap(
                simulation, trainers=named, validators=named[:1], outer=terms
            )
            for name, fabricates in {**dict.fromkeys(named, ""), **strangers}.items():
                if name in strangers:
                    await trio.sleep(begins)
                seconds = 20.0 + (slower if name in strangers else 0.0)
                plan = Plan(name, ["replica"], SERVER, Hardware(step_seconds=seconds))
                plan.fabricates, plan.acts = fabricates, acts.get(name)
                await simulation.add(plan).start()
            honest = [*named, *(name for name, fabricates in strangers.items() if not fabricates)]
            honest = [each for each in honest if each not in acts]
            done = simulation.expect("outer.run_complete", honest)
            assert await simulation.meet(done, 900.0)
            run, closed = Run(bootstrap.plan.manifests[0]), record([contribution(0)]).message
            for name in strangers:
                assert run.permits(simulation.peers[name].id, closed) == "not_permitted"
            for name, peer in simulation.peers.items():
                said.ids[name] = peer.id
                if name in honest and peer.part is not None:
                    (said.roles[name],) = peer.roles  # type: ignore[assignment]
                    said.held[name] = {each.key for each in peer.part.store.all()}
        assert simulation.violations == []
        assert agreement.compared
        return said

    return run_virtual(main, seed=seed, limit_seconds=2000.0)


def test_a_stranger_counts_by_its_record_and_noise_is_refused() -> None:
    said = run_with({"good": "", "bad": "noise", "broken": "nan"})
    merged, ids = said.merged(), said.ids
    assert sorted(merged) == [1, 2, 3, 4, 5, 6]
    assert all({"a", "b"} <= names for names in merged.values())
    counted = [round for round, names in merged.items() if "good" in names]
    assert counted[-4:] == [3, 4, 5, 6] and 1 not in counted
    assert not {"bad", "broken"} & set().union(*merged.values())
    reasons = {each["trainer"]: each["reason"] for each in said.named("outer.contribution_refused")}
    assert "raises the loss" in reasons[ids["bad"]]
    assert reasons[ids["broken"]] == "it holds NaN"
    told = {each["reason"] for each in said.named("outer.offer_refused", "bad")}
    assert any("raises the loss" in reason for reason in told)
    assert said.named("outer.run_complete", "good")


@pytest.mark.parametrize("seed", [3, 4])
def test_a_stranger_counts_to_the_last_round_with_other_seeds(seed: int) -> None:
    said = run_with({"good": ""}, seed=seed)
    assert "good" in said.merged()[ROUNDS]


@pytest.mark.parametrize(("begins", "slower"), [(0.0, 0.1), (13.0, 4.0)])
def test_a_stranger_that_joins_within_a_round_counts_from_the_third_whole_one_on(
    begins: float, slower: float
) -> None:
    """Also one that is slower than the trainers, by less than half of the grace."""
    said = run_with({"good": ""}, seed=2, rounds=8, begins=begins, slower=slower)
    counted = [round for round, names in said.merged().items() if "good" in names]
    assert counted and counted == list(range(counted[0], 9)) and counted[0] <= 6


def test_of_refused_strangers_nothing_stays() -> None:
    """Neither on the disk nor in memory: their number has no bound."""
    said = run_with({"good": "", "bad": "noise", "broken": "nan"})
    bases = {0: GENESIS}
    bases |= {each["round"]: each["record"] for each in said.named("outer.merged", "a")}
    keys = {
        name: {contribution_key(said.ids[name], base, round) for round, base in bases.items()}
        for name in ("good", "bad", "broken")
    }
    for name in NAMED:
        assert said.held[name] & keys["good"]
        assert not said.held[name] & (keys["bad"] | keys["broken"])
        held = said.roles[name]._gathering._ready.keys() - {said.ids[each] for each in NAMED}
        assert len(held) <= said.roles[name]._outer.strangers_max
        assert said.ids["bad"] not in held


def test_a_flood_of_keys_costs_a_bounded_number_of_fetches() -> None:
    """One in four of `strangers_max` is for peers without a record, however many they are."""
    flood = {f"key-{each}": "noise" for each in range(6)}
    said = run_with({"good": "", **flood}, strangers_max=4)
    for name in NAMED:
        scored = [each for each in said.named("outer.contribution_refused", name)]
        assert 1 <= len(scored) <= 6, "one newcomer a round"
    assert not set(flood) & set().union(*said.merged().values())


# --- one bad trainer -------------------------------------------------------------------------


class Inverted(Strangers):
    """Signs before all others, and the opposite of what it has measured."""

    def wait_seconds(self) -> float:
        return -2 * TAKEOVER_SECONDS

    def rated(self) -> tuple[list[Rated], list[Contribution]]:
        self._choose()
        scores = {each: (-one.gain, -one.own) for each, one in self._scores.items()}
        rated = rate(list(self._known().values()), scores)
        heavy = {each.trainer for each in rated if min(each.gain_rating, each.own_rating) > 760}
        return rated, [made for each, made in self._tried.items() if each in heavy]


class Liar(ReplicaRole):
    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._strangers = Inverted(self._loop, self._gathering, self._following)


def test_one_lying_scorer_of_three_decides_nothing() -> None:
    """It can neither talk a good stranger down nor a friend up, though it signs first."""
    said = run_with({"good": "", "friend": "noise"}, named=["a", "b", "liar"], acts={"liar": Liar})
    for name in ("a", "b"):
        merged = said.merged(name)
        assert sorted(merged) == [1, 2, 3, 4, 5, 6]
        assert all("friend" not in names for names in merged.values())
        assert all("good" in merged[round] for round in (3, 4, 5, 6))


# --- the child -------------------------------------------------------------------------------


class Watched(Strangers):
    """Its child dies within its first scores; later ones are looked at."""

    deaths = 0
    plain: ClassVar[list[bool]] = []
    """Of each fetch, whether it ignores what a manifest names."""

    async def run(self, child: OuterService, bytes_max: int) -> None:
        assert not self._is_busy, "the scores ended with the child"
        strangers = self

        class Spy:
            def __getattr__(self, name: str) -> Any:
                return getattr(child, name)

            async def score(self, job: ScoreRound) -> list[Scored]:
                assert strangers._following.moving.locked(), "its state's folder may move"
                if not Watched.deaths:
                    Watched.deaths += 1
                    raise ChildDied("replica was killed by SIGKILL", "replica")
                return await child.score(job)

        await super().run(Spy(), bytes_max)  # type: ignore[arg-type]


class Dying(ReplicaRole):
    def __init__(self, peer: RunNode) -> None:
        super().__init__(peer)
        self._strangers = Watched(self._loop, self._gathering, self._following)
        fetch = peer.policies.fetcher.fetch

        async def watched(*checkpoint: Any, **how: Any) -> str:
            Watched.plain.append(how.get("plain", False))
            return await fetch(*checkpoint, **how)

        peer.policies.fetcher.fetch = watched  # type: ignore[method-assign]


def test_a_child_that_dies_while_it_scores_delays_no_later_round() -> None:
    Watched.deaths = 0
    Watched.plain.clear()
    said = run_with({"good": ""}, named=["a", "b", "c"], acts={"c": Dying}, seed=3)
    assert Watched.deaths == 1 and said.named("compute.child_restarted", "c")
    assert "good" in said.merged()[ROUNDS] and said.named("outer.run_complete", "c")
    assert Watched.plain and all(Watched.plain), "a stranger may name mirrors and deltas"
