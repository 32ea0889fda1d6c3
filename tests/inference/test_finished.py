"""A child that fails in the middle of a submission: its finished rollouts are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from peers.engines import demo
from peers.engines.episodes import SpanStates
from peers.engines.finished import FinishedRollouts
from peers.engines.service import EngineService
from swarm.events import Event, Events
from swarm.jobs import Load
from swarm.jobs.inference import Generate, Generated, InferenceService, InferenceSetup
from swarm.rollouts.rollout import Rollout
from swarm.world import client
from swarm.world.compute import LocalCompute
from swarm.world.machine import Machine
from swarm.world.restarts import Restarts
from tests.inference.failing_service import FAILURE, SUBMITTED
from tests.inference.files import tokens_of
from tests.orders import policy as policy_reference
from tests.orders import submission_order

ORDER = submission_order(step=6, policy=policy_reference(4), number=2, groups=3, max_new_tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["die", "hang"])
def test_a_restarted_child_generates_only_the_rest(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, marker = tmp_path / "policy", tmp_path / "failed"
    demo.make_policy(policy, seed=1)
    monkeypatch.setenv(FAILURE, f"{kind}:{marker}")
    if kind == "hang":
        monkeypatch.setattr(Generate, "patience_seconds", 3.0)
    heard: list[Event] = []
    events = Events(Machine(), "me")

    def listen(event: Event) -> None:
        heard.append(event)
        if event.name == "compute.child_died":  # the child hangs once
            monkeypatch.setattr(Generate, "patience_seconds", 600.0)

    events.add_sink(listen)
    load = Load(policy=policy_reference(4), folder=str(policy))
    job = Generate(order=ORDER, path=str(tmp_path / "made"))
    setup = InferenceSetup(environments=ORDER.environments)
    made: list[Generated] = []

    async def live() -> None:
        async with LocalCompute(events=events).child(
            "tests.inference.failing_service:FailingEngineService", setup, name="engine"
        ) as child:
            service = client(InferenceService, child)  # type: ignore[type-abstract]
            await service.load(load)
            made.append(await service.generate(job))

    trio.run(Restarts(events, "engine").run, live)

    (died,) = [event for event in heard if event.name == "compute.child_died"]
    if kind == "die":
        assert died.fields["how"] == "was killed by SIGKILL"
        assert died.fields["last"][-1] == "kernel fault at 0xdead"
    else:
        assert died.fields["how"] == "made no progress on 'generate' within 3 s and was killed"
    submitted = (tmp_path / SUBMITTED).read_text().split()
    rows = ORDER.rows()
    assert submitted.count("False") == rows
    assert 0 < submitted.count("True") < rows, "the finished ones were not generated again"
    assert made[0].groups == 3 and not list(tmp_path.glob("*.finished"))

    undisturbed = EngineService(setup)
    trio.run(undisturbed.load, load)
    trio.run(undisturbed.generate, Generate(order=ORDER, path=str(tmp_path / "whole")))
    assert tokens_of(tmp_path / "made") == tokens_of(tmp_path / "whole")


def kept(folder: Path, rows: int, **changes: Any) -> Path:
    """A file with rows of an order."""
    some = FinishedRollouts(folder / "file", submission_order(ORDER, **changes))
    for row in range(rows):
        states = torch.full((2, 128), float(row)).bfloat16()
        some.add(row, Rollout.single_turn([1], [row, 2]), [SpanStates(0, states[:0], [states])])
    some.write()
    return folder / "file.finished"


def test_a_row_that_was_cut_off_is_generated_again(tmp_path: Path) -> None:
    path = kept(tmp_path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    again = FinishedRollouts(tmp_path / "file", ORDER)
    assert list(again.rollouts) == list(again.proofs) == [0, 1]
    states = torch.full((2, 128), 2.0).bfloat16()
    again.add(2, Rollout.single_turn([1], [2, 2]), [SpanStates(0, states[:0], [states])])
    again.write()
    assert path.read_bytes() == whole


def test_another_orders_rollouts_are_forgotten(tmp_path: Path) -> None:
    path = kept(tmp_path, 2, number=3)
    assert not FinishedRollouts(tmp_path / "file", ORDER).rollouts
    kept(tmp_path, 1)
    assert list(FinishedRollouts(tmp_path / "file", ORDER).rollouts) == [0]
    path.write_bytes(b"")
    assert not FinishedRollouts(tmp_path / "file", ORDER).rollouts


def test_a_short_submission_is_not_written_twice(tmp_path: Path) -> None:
    some = FinishedRollouts(tmp_path / "file", ORDER)
    states = torch.ones(2, 128).bfloat16()
    some.add(0, Rollout.single_turn([1], [3, 2]), [SpanStates(0, states[:0], [states])])
    some.prove()
    assert len(some.proofs[0]) > 0 and not list(tmp_path.iterdir())
