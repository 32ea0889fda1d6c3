"""The inner learner and its service: data, steps, rounds, and what is refused."""

from __future__ import annotations

import json
import math
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st

from peers.engines.demo import make_policy
from peers.engines.loading import load
from peers.engines.model import read_weights
from peers.learning import plan
from peers.learning.mixture import Mixture, Permutation
from peers.learning.ranks import Ranks
from peers.outer.learning import contribution, state
from peers.outer.learning.contribution import Contribution
from peers.outer.learning.replica import Replica
from peers.outer.learning.service import ReplicaService
from swarm.errors import UserError
from swarm.jobs.outer import (
    CheckState,
    Contributed,
    ExportState,
    FirstState,
    Inner,
    InspectContribution,
    MeasureState,
    MergeRound,
    RoundTrained,
    StartReplica,
    TrainRound,
)
from swarm.jobs.training import Figures, Sharding
from swarm.wire.manifest import Optimiser
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_metrics import read_back

TEXT = "\n".join(f"the {n % 10} small birds sing {n * 3 % 10} songs." for n in range(60))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "policy"
    make_policy(folder, seed=3)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "birds.txt").write_text(TEXT)
    return tmp_path / "birds.txt"


def job_of(base: Path, *data: Path, **changes: Any) -> StartReplica:
    inner: dict[str, Any] = {
        "data": [str(each) for each in data],
        "sequence_tokens": 33,
        "batch_sequences": 4,
        "optimiser": Optimiser(learning_rate=3e-3, warmup_steps=1, gradient_norm_max=1.0),
    }
    inner |= {name: changes.pop(name) for name in list(changes) if name in Inner.__struct_fields__}
    fields: dict[str, Any] = {
        "trainer": "a",
        "seed": 1,
        "inner_steps": 3,
        "rounds": 4,
        "compression": "int8",
    }
    return StartReplica(model=str(base), inner=Inner(**inner), **(fields | changes))


class Trainer:
    """A service and its folders."""

    def __init__(self, folder: Path, job: StartReplica) -> None:
        self.folder, self.job = folder, job
        self.service = ReplicaService()
        self.started = trio.run(self.service.start, job)
        self.first = trio.run(self.service.first_state, FirstState(folder=self.path("state-0")))

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def train(self, round_: int, **more: Any) -> RoundTrained:
        before = self.path(f"inner-{round_ - 1}") if round_ > 1 else ""
        job = TrainRound(
            round=round_,
            state=self.path(f"state-{round_ - 1}"),
            inner_before=before,
            inner_after=self.path(f"inner-{round_}"),
            contribution=self.path(f"contribution-{round_}"),
            **more,
        )
        return trio.run(self.service.train, job)

    def merge(self, round_: int, given: list[Contributed]) -> Any:
        job = MergeRound(
            state=self.path(f"state-{round_ - 1}"),
            contributions=given,
            momentum=0.9,
            learning_rate=0.7,
            folder=self.path(f"state-{round_}"),
        )
        return trio.run(self.service.merge, job)

    def own(self, round_: int, tokens: int) -> Contributed:
        folder = self.path(f"contribution-{round_}")
        return Contributed(trainer=self.job.trainer, folder=folder, tokens=tokens)

    def loss(self, round_: int) -> float:
        found = trio.run(self.service.measure, MeasureState(state=self.path(f"state-{round_}")))
        assert found is not None
        return found


# --- the order of sequences ------------------------------------------------------------------


@given(st.integers(1, 300), st.binary(max_size=4))
def test_a_permutation_has_every_index_once(count: int, key: bytes) -> None:
    assert sorted(Permutation(count, key)) == list(range(count))


def test_a_trainer_needs_a_sequence() -> None:
    with pytest.raises(UserError, match="2 sequences to train on, for 3 trainers"):
        Mixture([9, 2], 0, [1, 1], 0, 3)


# --- rounds ----------------------------------------------------------------------------------


def test_two_trainers_agree_to_the_bit_and_learn(base: Path, text: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"trainers": ("a", "b"), "validation_sequences": 2, "z_loss": 1e-4}
    pair = [Trainer(tmp_path / name, job_of(base, text, trainer=name, **settings)) for name in "ab"]
    assert pair[0].first == pair[1].first
    for round_ in (1, 2):
        given_ = []
        for each in pair:
            trained = each.train(round_)
            assert trained.tokens == 3 * 4 * 32
            given_.append(each.own(round_, trained.tokens))
            size = (Path(given_[-1].folder) / contribution.FILE).stat().st_size
            assert each.started.parameters * 0.5 < size <= each.started.contribution_bytes_max
        merged = [each.merge(round_, given_) for each in (pair[0], pair[1])]
        assert merged[0] == merged[1] and not merged[0].left_out
        given_.reverse()
    checked = trio.run(pair[0].service.check_state, CheckState(folder=pair[1].path("state-2")))
    assert (checked.digest, checked.problem) == (merged[0].digest, "")
    assert pair[0].loss(2) == pytest.approx(pair[1].loss(2))
    assert pair[0].loss(2) < pair[0].loss(0) - 0.3
    folder = tmp_path / "policy"
    trio.run(
        pair[0].service.export_state, ExportState(state=pair[0].path("state-2"), folder=str(folder))
    )
    load(folder)
    outer = state.StateFile(Path(pair[0].path("state-2")) / state.FILE)
    for name, value in read_weights(folder).items():
        assert torch.equal(value.reshape(-1), outer.weight(name))


def test_a_resumed_trainer_computes_the_same_bits(base: Path, text: Path, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, job_of(base, text, compression="int8"))
    trainer.merge(1, [trainer.own(1, trainer.train(1).tokens)])
    trainer.train(2)
    made = Path(trainer.path("contribution-2")) / contribution.FILE
    uninterrupted = made.read_bytes()
    again = Trainer(tmp_path, trainer.job)
    again.train(2)
    assert made.read_bytes() == uninterrupted
    trainer.train(2)  # repeated by the process that has gone on
    assert made.read_bytes() == uninterrupted


def test_what_a_killed_process_left_unfinished_is_deleted(
    base: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "state-1.aside").mkdir()
    (tmp_path / "state-1").mkdir()
    trio.run(ReplicaService().start, job_of(base, text, folder=str(tmp_path)))
    assert (tmp_path / "state-1").exists() and not (tmp_path / "state-1.aside").exists()


@pytest.mark.slow
def test_one_trainer_that_keeps_its_weights_trains_as_if_alone(
    base: Path, text: Path, tmp_path: Path
) -> None:
    """Outer learning rate 1 without momentum: rounds change nothing but the rounding."""
    one = Trainer(tmp_path / "one", job_of(base, text, inner_steps=4, compression="fp32"))
    two = Trainer(tmp_path / "two", job_of(base, text, inner_steps=2, compression="fp32", rounds=8))
    found = []
    for trainer, rounds in ((one, 1), (two, 2)):
        for round_ in range(1, rounds + 1):
            given_ = [trainer.own(round_, trainer.train(round_).tokens)]
            job = MergeRound(
                state=trainer.path(f"state-{round_ - 1}"),
                contributions=given_,
                momentum=0.0,
                learning_rate=1.0,
                folder=trainer.path(f"state-{round_}"),
            )
            trio.run(trainer.service.merge, job)
        found.append(state.StateFile(Path(trainer.path(f"state-{rounds}")) / state.FILE))
    # The draw of blocks is the same: 60 lines hold more blocks than four steps want.
    for name in found[0].shapes:
        torch.testing.assert_close(found[0].weight(name), found[1].weight(name), atol=2e-5, rtol=0)


def test_what_is_refused_is_left_out(base: Path, text: Path, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, job_of(base, text))
    own = trainer.own(1, trainer.train(1).tokens)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / contribution.FILE).write_bytes(b"no")
    inspected = trio.run(trainer.service.inspect, InspectContribution(contribution=str(bad)))
    assert inspected.problem == "the file is no contribution of this version"
    alone = trainer.merge(1, [own])
    merged = trainer.merge(1, [Contributed(trainer="0", folder=str(bad), tokens=9), own])
    assert merged.digest == alone.digest
    assert [(each.trainer, each.problem) for each in merged.left_out] == [("0", inspected.problem)]
    assert trainer.merge(1, [Contributed(trainer="0", folder=str(bad), tokens=9)]).digest == (
        trainer.first.digest
    )
    checked = trio.run(trainer.service.check_state, CheckState(folder=str(bad)))
    assert "cannot be read" in checked.problem


def train_on(ranks: Ranks, job: StartReplica, folder: Path, rounds: tuple[int, ...]) -> None:
    """Train these rounds on the state of round 0, as a service does on one rank."""
    replica = Replica(job, ranks)
    outer = state.StateFile(folder / "state-0" / state.FILE)
    for round_ in rounds:
        before = folder / f"inner-{round_ - 1}" if round_ > 1 else None
        replica.begin(outer, before)
        list(replica.steps(round_))
        made = folder / f"contribution-{round_}"
        replica.write(outer, before, folder / f"inner-{round_}", made)


@pytest.mark.slow
def test_two_ranks_make_the_contribution_of_one(base: Path, text: Path, tmp_path: Path) -> None:
    """And the state that two ranks leave is resumed by one."""
    job = job_of(base, text, compression="fp32", batch_sequences=3, z_loss=1e-3)
    found = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        trainer = Trainer(folder, job)
        if world == 1:
            train_on(Ranks(), job, folder, (1, 2))
        else:
            run_ranks(2, folder, train_on, job, folder, (1,))
            train_on(Ranks(), job, folder, (2,))
        for round_ in (1, 2):
            path = folder / f"contribution-{round_}" / contribution.FILE
            with Contribution(path, trainer.service._replica.shapes) as file:
                shapes = file.header.tensors
                found.append([file.piece(name, slice(0, prod(shape))) for name, shape in shapes])
    for one, two in zip([*found[0], *found[1]], [*found[2], *found[3]], strict=True):
        torch.testing.assert_close(one, two, atol=2e-4, rtol=0)


# --- data ------------------------------------------------------------------------------------


def test_rows_are_read_as_well(base: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"row {n} of text that is long enough"}) for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    rows = Trainer(tmp_path / "rows", job_of(base, tmp_path / "rows.jsonl"))
    assert rows.train(1).tokens == 3 * 4 * 32


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": []}, "data is empty; name at least one file"),
        ({"data": [__file__]}, "test_replica.py, which is no .txt, .md, .parquet"),
        ({"data": ["none.txt"]}, "none.txt does not exist; give a file"),
        ({"sequence_tokens": 66}, "sequence_tokens is 66; the model takes 64 tokens"),
        ({"trainers": ("b",)}, "trainer is a, which is not among the run's 1 trainers"),
        ({"validation_sequences": 999}, "validation_sequences is 999, but the data has"),
        ({"weights": [1.0, 2.0]}, "data names 1 sources and weights has 2 numbers"),
    ],
)
def test_wrong_settings_are_named(
    base: Path, text: Path, changes: dict[str, Any], sentence: str
) -> None:
    job = job_of(base, text, **changes)
    with pytest.raises(UserError, match=sentence):
        trio.run(ReplicaService().start, job)


def test_a_trainer_holds_less_by_its_settings_and_learns_the_same(
    base: Path, text: Path, tmp_path: Path
) -> None:
    how = Sharding(activation_checkpointing=True, pass_tokens=33)
    found = []
    for name, sharding in (("plain", Sharding()), ("less", how)):
        job = job_of(base, text, compression="fp32", memory_check="refuse", sharding=sharding)
        trainer = Trainer(tmp_path / name, job)
        trainer.train(1)
        assert trainer.started.plan is not None
        assert trainer.started.plan.tokens == (33 if sharding.pass_tokens else 4 * 33)
        path = Path(trainer.path("contribution-1")) / contribution.FILE
        shapes = {name: tuple(shape) for name, shape in trainer.started.shapes.items()}
        with Contribution(path, shapes) as opened:
            found.append(opened.values())
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_a_trainer_that_does_not_fit_is_refused_before_it_is_loaded(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "free_memory_bytes", lambda: 1000)
    job = job_of(base, text, memory_check="refuse")
    with pytest.raises(UserError, match=r"needs .* main memory.*replica.optimiser = \"adamw8bit\""):
        trio.run(ReplicaService().start, job)
    trio.run(ReplicaService().start, msgspec.structs.replace(job, memory_check="report"))


def test_curves_have_a_point_for_each_inner_step_and_round(
    base: Path, text: Path, tmp_path: Path
) -> None:
    job = job_of(base, text, tensorboard=str(tmp_path / "board"))
    trainer = Trainer(tmp_path / "one", job)
    known: Figures = {"validation_loss": 2.0, "trainers_present": 14, "utilisation": 0.96}
    trained = trainer.train(1, known=known)
    found = read_back(tmp_path / "board")
    losses = [value for _, value in found["policy/loss"]]
    assert [step for step, _ in found["policy/loss"]] == [1, 2, 3]
    assert sum(losses) / 3 == pytest.approx(trained.figures["loss"])
    assert found["outer/trainers_present"] == [(0, 14.0)]
    assert found["outer/validation_perplexity"][0][1] == pytest.approx(math.exp(2.0))


def test_what_the_device_cannot_do_is_named_as_a_trainer_names_it(base: Path, text: Path) -> None:
    job = job_of(base, text, attention="flash_attention_2")
    with pytest.raises(UserError, match=r"^replica.attention: .*omit it to use the fastest"):
        trio.run(ReplicaService().start, job)


def test_a_setting_that_does_not_divide_the_ranks_is_named(base: Path, text: Path) -> None:
    job = job_of(base, text, sharding=Sharding(sequence_parallel=2))
    with pytest.raises(UserError, match=r"^replica.sequence_parallel is 2, which does not divide"):
        trio.run(ReplicaService().start, job)


def test_wrong_data_are_named(base: Path, tmp_path: Path) -> None:
    for name, raw, sentence in (
        ("few.txt", b"short", "data has 6 tokens in .*few.txt; a sequence takes 33"),
        ("none.txt", b"", "data has 0 tokens in"),
        ("latin.txt", b"\xff\xfe", "it is not UTF-8"),
        ("rows.jsonl", b'{"text": 5}', "row 0 has the text 5; it must be text"),
        ("other.jsonl", b'{"body": "x"}', "pre-training names the column 'text'"),
    ):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(UserError, match=sentence):
            trio.run(ReplicaService().start, job_of(base, tmp_path / name))


def test_weights_that_ran_away_are_no_contribution(base: Path, text: Path, tmp_path: Path) -> None:
    job = job_of(base, text)
    optimiser = msgspec.structs.replace(job.inner.optimiser, learning_rate=1e3)
    wild = msgspec.structs.replace(job.inner, optimiser=optimiser)
    trainer = Trainer(tmp_path, msgspec.structs.replace(job, inner=wild))
    with pytest.raises(UserError, match="lower the learning rate"):
        trainer.train(1)
    assert not Path(trainer.path("contribution-1")).exists()
