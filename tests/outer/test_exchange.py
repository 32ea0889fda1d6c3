"""Two RL learners that exchange through their folders: what each adds, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import trio
from torch import Tensor

from peers.engines.demo import make_policy
from peers.learning import merging_folder as exchange
from peers.learning.learner import Learner
from peers.learning.ranks import Ranks
from peers.outer.learning import state
from peers.outer.learning.exchange_service import CHANGE, ExchangingService
from peers.outer.learning.state import StateFile
from swarm.jobs.merging_exchange import (
    AnswerSnapshot,
    ContributeSnapshot,
    LookForSnapshot,
    RefuseSnapshot,
    SnapshotSeen,
    StartExchange,
)
from swarm.jobs.outer import Contributed, FirstState, MergeRound
from swarm.jobs.training import Adopted, Snapshot
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import SETTINGS, random_groups, teach, weights_of

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "policy"
    make_policy(folder, seed=3)
    return folder


class Party:
    """An RL learner and its replica's service, with one exchange folder."""

    def __init__(self, base: Path, folder: Path, compression: Any = "fp32") -> None:
        self.folder, self.base = folder, base
        self.learner = Learner(base, SETTINGS)
        self.number = self.adopted = 0
        self.service = ExchangingService()
        job = StartExchange(
            model=str(base),
            exchange=str(self.exchange),
            inner_steps=1,
            compression=compression,
            number=0,
        )
        trio.run(self.service.start_exchange, job)
        trio.run(self.service.first_state, FirstState(folder=str(folder / "anchor-0")))

    @property
    def exchange(self) -> Path:
        return self.folder / "exchange"

    @property
    def weights(self) -> Weights:
        return weights_of(self.learner)

    def train(self, seed: int) -> None:
        step = self.learner.step
        teach(self.learner, random_groups(seed, policy=step), step)

    def hand_out(self, steps: int = 1) -> SnapshotSeen:
        self.number += 1
        handed = Snapshot(
            exchange=str(self.exchange), number=self.number, adopted=self.adopted, steps=steps
        )
        self.learner.begin_save(None, handed=handed)
        self.learner.finish_save()
        return trio.run(self.service.look_for_snapshot, LookForSnapshot())

    def contribute(self) -> str:
        job = ContributeSnapshot(
            number=self.number, anchor=self._anchor, contribution=self._contribution
        )
        return trio.run(self.service.contribute_snapshot, job)

    def answer(self, after: Path, *, takes_over: bool = False, others: int = 1) -> None:
        job = AnswerSnapshot(
            number=self.number,
            state=str(after),
            anchor="" if takes_over else self._anchor,
            contribution="" if takes_over else self._contribution,
            keep=str(self.folder / f"anchor-{self.number}"),
            round=7,
            trainers=others,
        )
        trio.run(self.service.answer_snapshot, job)

    def adopt(self) -> Adopted:
        found = self.learner.adopt(self.exchange, self.number)
        self.adopted = self.number
        return found

    @property
    def _anchor(self) -> str:
        return str(self.folder / f"anchor-{self.adopted}")

    @property
    def _contribution(self) -> str:
        return str(self.folder / f"contribution-{self.number}")


def merge(parties: list[Party], folder: Path, before: Path | None = None) -> Path:
    """The outer state after a round, by the plain mean."""
    job = MergeRound(
        state=str(before or parties[0].folder / "anchor-0"),
        contributions=[
            Contributed(trainer=each.folder.name, folder=each._contribution, tokens=1)
            for each in parties
        ],
        momentum=0.0,
        learning_rate=1.0,
        folder=str(folder),
    )
    trio.run(parties[0].service.merge, job)
    return folder


def weights_in(folder: Path, like: Weights) -> Weights:
    file = StateFile(folder / state.FILE)
    return {name: file.weight(name).view(value.shape) for name, value in like.items()}


def test_each_learner_has_the_mean_and_what_it_learned_meanwhile(
    base: Path, tmp_path: Path
) -> None:
    parties = [Party(base, tmp_path / name) for name in ("a", "b")]
    snapshots, now = [], []
    for seed, party in enumerate(parties):
        party.train(seed)
        seen = party.hand_out(steps=5)
        assert (seen.number, seen.adopted, seen.steps, seen.problem) == (1, 0, 5, "")
        assert party.contribute() == ""
        snapshots.append(party.weights)
        party.train(10 + seed)  # before the answer comes
        now.append(party.weights)
    after = merge(parties, tmp_path / "after")
    mean = weights_in(after, snapshots[0])
    for party, snapshot, before in zip(parties, snapshots, now, strict=True):
        party.answer(after)
        found = party.adopt()
        assert (found.problem, found.round, found.trainers) == ("", 7, 1)
        assert found.norm > 0
        expected = {name: before[name] - snapshot[name] + mean[name] for name in mean}
        torch.testing.assert_close(party.weights, expected, rtol=0, atol=1e-6)
        held = party.learner.past.held[party.learner.step]  # rollouts will be of these weights
        torch.testing.assert_close(dict(held), expected, rtol=0, atol=1e-6)


def test_what_compression_leaves_out_stays_in_the_policy(base: Path, tmp_path: Path) -> None:
    parties = [Party(base, tmp_path / name, "int8") for name in ("a", "b")]
    for seed, party in enumerate(parties):
        party.train(seed)
        party.hand_out()
        party.contribute()
    before = [party.weights for party in parties]
    after = merge(parties, tmp_path / "after")
    for party in parties:
        party.answer(after)
        party.adopt()
    # a' − b' = (a − sent_a) − (b − sent_b): their weights differ by the two residuals alone.
    for name, mine in parties[0].weights.items():
        moved = float((before[0][name] - before[1][name]).abs().max())
        assert float((mine - parties[1].weights[name]).abs().max()) < 0.1 * moved + 1e-9
    # The next contribution holds the residual: nothing is lost.
    first = weights_in(after, before[0])
    residual = {name: first[name] - value for name, value in parties[0].weights.items()}
    assert any(float(value.abs().max()) > 0 for value in residual.values())


def test_an_answer_without_others_changes_nothing(base: Path, tmp_path: Path) -> None:
    party = Party(base, tmp_path, "int8")
    party.train(1)
    party.hand_out()
    party.contribute()
    before = party.weights
    party.answer(merge([party], tmp_path / "after"), others=0)
    found = party.adopt()
    assert (found.problem, found.trainers, found.norm) == ("", 0, 0.0)
    assert all(torch.equal(before[name], value) for name, value in party.weights.items())


def test_a_learner_that_lost_an_answer_takes_over_the_outer_state(
    base: Path, tmp_path: Path
) -> None:
    other, party = Party(base, tmp_path / "b"), Party(base, tmp_path / "a")
    other.train(1)
    other.hand_out()
    other.contribute()
    after = merge([other], tmp_path / "after")
    party.train(2)
    party.hand_out()
    party.answer(after, takes_over=True)
    party.adopt()
    torch.testing.assert_close(party.weights, weights_in(after, party.weights), rtol=0, atol=1e-6)


def test_an_answer_that_was_cut_short_is_written_again(base: Path, tmp_path: Path) -> None:
    """Killed after it kept the anchor, or while it wrote the answer."""
    parties = [Party(base, tmp_path / name) for name in ("a", "b")]
    for seed, party in enumerate(parties):
        party.train(seed)
        party.hand_out()
        party.contribute()
    after = merge(parties, tmp_path / "after")
    party = parties[0]
    party.answer(after)
    folder = exchange.folder_of(party.exchange, exchange.ANSWER, 1)
    whole = (folder / CHANGE).read_bytes()
    folder.rename(folder.with_name("answer-1.aside"))
    assert not trio.run(party.service.look_for_snapshot, LookForSnapshot()).answered
    assert exchange.look(party.exchange).answers == []
    party.answer(after)
    assert (folder / CHANGE).read_bytes() == whole
    assert exchange.look(party.exchange).answers == [1]


def break_change(party: Party, change: Any) -> None:
    path = exchange.folder_of(party.exchange, exchange.ANSWER, party.number) / CHANGE
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    path.unlink()
    safetensors.torch.save_file(tensors, path)


def _nan(tensors: Weights) -> None:
    tensors["model.norm.weight"][0] = torch.nan


def _reshape(tensors: Weights) -> None:
    tensors["model.norm.weight"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("broken", "why"),
    [(_nan, "model.norm.weight has a value that is not finite"), (_reshape, "of another model")],
)
def test_a_change_that_does_not_fit_leaves_the_weights_as_they_are(
    base: Path, tmp_path: Path, broken: Any, why: str
) -> None:
    parties = [Party(base, tmp_path / name) for name in ("a", "b")]
    for seed, party in enumerate(parties):
        party.train(seed)
        party.hand_out()
        party.contribute()
    party = parties[0]
    party.answer(merge(parties, tmp_path / "after"))
    break_change(party, broken)
    before = party.weights
    assert why in party.adopt().problem
    assert all(torch.equal(before[name], value) for name, value in party.weights.items())


def test_snapshots_that_cannot_be_merged_are_refused_in_a_sentence(
    base: Path, tmp_path: Path
) -> None:
    party = Party(base, tmp_path / "a")
    party.train(1)
    with torch.no_grad():
        party.learner.model.model.norm.weight[0] = torch.nan
    party.hand_out()
    assert "moved a weight of model.norm.weight by nan" in party.contribute()
    trio.run(party.service.refuse_snapshot, RefuseSnapshot(number=1, problem="it holds NaN"))
    assert party.adopt().problem == "it holds NaN"

    facts = exchange.folder_of(party.exchange, exchange.SNAPSHOT, 1) / exchange.FACTS
    found = json.loads(facts.read_bytes())
    facts.write_text(json.dumps({**found, "version": 2}))
    seen = trio.run(party.service.look_for_snapshot, LookForSnapshot())
    assert "run trainer and replica with the same version" in seen.problem

    make_policy(tmp_path / "other", seed=4)
    shutil.copytree(base, tmp_path / "words")
    tokenizer = tmp_path / "words" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    for folder, why in (("other", "began with another policy"), ("words", "tokenizer is another")):
        stranger = Party(base, tmp_path / f"party-{folder}")
        stranger.learner = Learner(tmp_path / folder, SETTINGS)
        assert why in stranger.hand_out().problem


def test_what_is_settled_is_deleted_and_its_numbers_are_not_used_again(
    base: Path, tmp_path: Path
) -> None:
    assert exchange.look(tmp_path).inner_steps == 0
    party = Party(base, tmp_path)
    party.hand_out()
    party.hand_out()
    exchange.tidy(party.exchange, 1)
    assert exchange.numbers(party.exchange, exchange.SNAPSHOT) == [2]
    assert exchange.look(party.exchange).highest == 2
    exchange.write_facts(
        exchange.Greeting(inner_steps=4, number=9), party.exchange / "replica.json"
    )
    found = exchange.look(party.exchange)
    assert (found.inner_steps, found.highest) == (4, 9)


@pytest.mark.slow
def test_two_ranks_hand_out_and_adopt_like_one(base: Path, tmp_path: Path) -> None:
    parties = [Party(base, tmp_path / name) for name in ("a", "b")]
    for seed, party in enumerate(parties):
        party.train(seed)
        party.hand_out()
        party.contribute()
    one = parties[0]
    one.answer(merge(parties, tmp_path / "after"))

    def ranks(ranks: Ranks) -> tuple[str, bool]:
        learner = Learner(base, SETTINGS, ranks=ranks)
        teach(learner, random_groups(0, policy=0), 0)
        handed = Snapshot(exchange=str(tmp_path / "two"), number=1, adopted=0, steps=1)
        learner.begin_save(None, handed=handed)
        learner.finish_save()
        problem = learner.adopt(one.exchange, 1).problem
        learner.export(tmp_path / "policy")
        return problem, learner.adopt(one.exchange, 2).problem != ""

    assert run_ranks(2, tmp_path, ranks) == [("", True), ("", True)]
    one.adopt()
    one.learner.export(tmp_path / "expected")
    for ours, theirs in (
        (tmp_path / "policy", tmp_path / "expected"),
        (tmp_path / "two" / "snapshot-1", one.exchange / "snapshot-1"),
    ):
        found: Weights = {}
        expected: Weights = {}
        for folder, into in ((ours, found), (theirs, expected)):
            for path in folder.glob("*.safetensors"):
                into |= safetensors.torch.load_file(path)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
