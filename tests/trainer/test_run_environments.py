"""Levels follow the measured accuracy; groups older than their environment allows are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from peers.engines.demo import save_tokenizer
from peers.environments import Renderer
from peers.environments.collection import Environments
from peers.environments.interface import as_text
from peers.environments.prompt_room import PromptRoom
from peers.trainer.environments import Curricula, environment_figures
from peers.trainer.pool import Accepted, label_old
from simnet.scenarios.parts import start_bootstrap
from simnet.simulation import SIMULATED, Plan, Simulation
from swarm.errors import UserError
from swarm.events import Event, Events
from swarm.rollouts.rollouts import parts_of
from swarm.run.bounds import check_manifest_numbers
from swarm.run.curriculum import environments_of
from swarm.wire.identity import Identity
from swarm.wire.manifest import Curriculum, EnvironmentReference, RunManifest, Sampling, TrustedKey
from swarm.wire.messages import CheckpointReference, StepOrder, Verdict
from swarm.world.machine import Machine
from tests.orders import submission_order
from tests.trainer.test_role import simulate

RULE = Curriculum(option="digits", values=[1, 2, 3], raise_at=0.7, lower_at=0.3, groups=4)
CALCULATOR = EnvironmentReference(name="calculator", version="1", curriculum=RULE)
SORTING = EnvironmentReference(
    name="sort-digits", version="1",
    curriculum=Curriculum(weights=[3.0, 1.0], raise_at=0.9, groups=2),
)  # fmt: skip


def manifest_of(*environments: EnvironmentReference) -> RunManifest:
    own = [TrustedKey(peer=Identity(bytes(32)).peer_id)]
    return RunManifest(
        name="run", version=1, model="base", tokenizer_hash=bytes(32),
        environments=list(environments), sampling=Sampling(stop_ids=[2]), trainers=own,
        validators=own,
    )  # fmt: skip


def accepted(step: int, *rewards: list[float], environment: int = 0, **fields: Any) -> Accepted:
    verdict = Verdict(
        submission=bytes(32), size_bytes=1, worker="w", lineage=0, step=step, policy=step,
        number=0, outcome="accepted", rewards=list(rewards),
        environments=[environment] * len(rewards), **fields,
    )  # fmt: skip
    return Accepted(bytes(32), verdict, "", ["kept"] * len(rewards))


def order(step: int, levels: list[int]) -> StepOrder:
    reference = CheckpointReference(lineage=0, step=0, digest=bytes(32), size_bytes=1)
    return StepOrder(
        step=step, revision=0, checkpoint=reference, nonce=bytes(32), groups_wanted=1,
        submissions_max=1, levels=levels,
    )  # fmt: skip


def test_levels_rise_and_fall_with_the_accuracy_of_their_own_groups() -> None:
    events = Events(Machine(), "trainer")
    said: list[Event] = []
    events.add_sink(said.append)
    manifest, curricula = manifest_of(CALCULATOR, SORTING), Curricula(events)
    assert curricula.levels_for(0) == []
    curricula.observe([accepted(0, [1.0, 1.0], [1.0, 0.5])], manifest)
    assert curricula.levels_for(1) == []  # too few groups
    curricula.observe([accepted(0, [1.0, 0.0], [1.0, 1.0])], manifest)
    assert curricula.levels_for(2) == [1, 0]
    curricula.observe([accepted(1, *[[1.0]] * 8)], manifest)  # drawn at level 0
    assert curricula.levels_for(3) == [1, 0]
    curricula.observe([accepted(3, *[[1.0]] * 2, environment=1)], manifest)
    curricula.observe([accepted(3, *[[1.0, 0.0]] * 4)], manifest)  # neither good nor bad
    assert curricula.levels_for(4) == [1, 1]
    curricula.observe([accepted(4, *[[1.0]] * 4), accepted(4, *[[0.0]] * 4)], manifest)
    assert curricula.levels_for(5) == [1, 1]  # 8 groups of one batch count together
    curricula.observe([accepted(5, *[[0.1]] * 4)], manifest)
    assert curricula.levels_for(6) == [0, 1]
    assert [(event.fields["environment"], event.fields["level"]) for event in said] == [
        ("calculator", 1),
        ("sort-digits", 1),
        ("calculator", 0),
    ]
    again = Curricula(events)
    again.restore([order(6, [0, 1]), order(5, [1, 1])])
    assert again.levels_for(7) == [0, 1]
    assert again.levels_of(manifest) == {"calculator": 0, "sort-digits": 1}


def test_a_level_sets_weight_and_option(tmp_path: Path) -> None:
    manifest = manifest_of(CALCULATOR, SORTING)
    at_first, at_last = (environments_of(manifest, order(0, levels)) for levels in ([], [2, 1]))
    assert [each.weight for each in at_first] == [1.0, 3.0]
    assert [each.weight for each in at_last] == [1.0, 1.0]
    assert at_first[0].options == {"digits": 1} and at_last[0].options == {"digits": 3}
    loaded, longest = Environments(), {}
    save_tokenizer(tmp_path)
    room = PromptRoom(Renderer(tmp_path))
    for level in (0, 2):
        references = environments_of(manifest, order(0, [level, 1]))
        drawn = loaded.tasks(submission_order(environments=references, groups=40), room)
        longest[level] = max(
            len(as_text(each.task.prompt)) for each in drawn if each and each.index == 0
        )
    assert longest[0] == 4 < longest[2]  # 1 digit each, `*` and `>`


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Curriculum(option="digits"), "name an option and its value at each level"),
        (Curriculum(values=[1, 2]), "name an option and its value at each level"),
        (Curriculum(option="digits", values=[1]), "at least 2"),
        (Curriculum(option="digits", values=[1, 2], weights=[1.0, 2.0, 3.0]), "one per level"),
        (Curriculum(weights=[1.0, 2.0], lower_at=0.8), "the first below the second"),
        (Curriculum(weights=[1.0, 2.0], raise_at=1.5), "must lie between 0 and 1"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule: Curriculum, words: str) -> None:
    manifest = manifest_of(msgspec.structs.replace(SORTING, curriculum=rule))
    with pytest.raises(UserError, match=rf"environments\[0\].curriculum.*{words}"):
        check_manifest_numbers(manifest, "run.toml")


def test_each_environment_may_bound_the_age_of_its_groups() -> None:
    environments = [msgspec.structs.replace(SORTING, max_staleness=1), CALCULATOR]
    young, other = (accepted(3, [1.0, 0.0], environment=index).verdict for index in (0, 1))
    for step, label in ((3, "kept"), (4, "kept"), (5, "too_old")):
        assert label_old(["kept"], young, environments, step) == [label]
        assert label_old(["too_hard"], young, environments, step) == ["too_hard"]
        assert label_old(["kept"], other, environments, step) == ["kept"]


def test_figures_of_each_environment() -> None:
    batch = [
        accepted(0, [1.0, 0.0], [0.0, 0.0]),
        accepted(
            0, [0.9, 0.7], environment=1, task_means=[0.5], task_spreads=[1.0]
        ),  # with a length penalty: one of two is right
    ]
    batch[0].labels[1] = "no_spread"
    found = environment_figures(batch, [[10, 20], [8]], [CALCULATOR, SORTING])
    assert found["calculator"] == {
        "reward": 0.25, "pass_at_1": 0.25, "pass_at_g": 0.5, "keep_rate": 0.5, "groups": 2.0,
        "completion_length": 7.5, "quarantine_rate": 0.0,
    }  # fmt: skip
    assert found["sort-digits"]["pass_at_1"] == 0.5 and found["sort-digits"]["pass_at_g"] == 1.0
    assert found["sort-digits"]["reward"] == pytest.approx(0.8)


def test_a_group_without_a_grade_has_figures_but_no_reward() -> None:
    parts = parts_of([{"form": 1.0}, {"form": 0.5}, {}, {}])
    batch = [accepted(0, [1.0, 0.0], [0.0, 0.0], quarantined=[1], parts=parts)]
    batch[0].labels[1] = "quarantined"
    assert environment_figures(batch, [[4, 20]], [CALCULATOR])["calculator"] == {
        "groups": 2.0, "keep_rate": 0.5, "quarantine_rate": 0.5, "completion_length": 6.0,
        "reward": 0.5, "pass_at_1": 0.5, "pass_at_g": 1.0, "part_form": 0.75,
    }  # fmt: skip
    batch[0].labels[0] = "quarantined"
    assert "reward" not in environment_figures(batch, [], [CALCULATOR])["calculator"]


@pytest.mark.slow
def test_all_peers_of_a_run_follow_its_levels() -> None:
    rule = Curriculum(weights=[1.0, 4.0, 0.5], raise_at=0.2, groups=8)

    async def main(simulation: Simulation) -> None:
        environments = [
            msgspec.structs.replace(SIMULATED, curriculum=rule),
            msgspec.structs.replace(SIMULATED, name="other"),
        ]
        await start_bootstrap(
            simulation, trainers=["trainer"], validators=["validator"], steps=8,
            groups_per_step=16, max_new_tokens=256, environments=environments,
        )  # fmt: skip
        for name in ("validator", "trainer", "inference"):
            await simulation.add(Plan(name, [name])).start()
        over = simulation.expect("trainer.run_complete", ["trainer"])
        assert await simulation.meet(over, 3600)

    said = [event for _, event in simulate(main)]
    changed = [event.fields for event in said if event.name == "trainer.level_changed"]
    assert [each["level"] for each in changed] == [1, 2]
    trained = [event.fields for event in said if event.name == "trainer.step_trained"]
    levels = [each["environments"]["simulated"]["level"] for each in trained]
    assert levels == sorted(levels) and levels[-1] == 2
    verdicts = [event.fields for event in said if event.name == "validator.verdict"]
    assert {each["outcome"] for each in verdicts} == {"accepted"}
