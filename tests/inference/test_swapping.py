"""Swaps of weights while several submissions, or episodes of several turns, are generated."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from peers.environments.calculator import Calculator
from swarm.errors import UserError
from swarm.jobs import Load, SubmissionOrder
from swarm.jobs.inference import Generated, Swap
from swarm.rollouts.rollouts import Rollouts
from tests.inference.swaps import ORDER, Bench, open_bench
from tests.orders import policy as reference
from tests.orders import reference as environment
from tests.orders import submission_order

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with open_bench(tmp_path_factory) as found:
        yield found


def policies_of(rollouts: Rollouts) -> set[int]:
    return set(rollouts.span_policies.tolist())


def numbered(
    *numbers: int, order: SubmissionOrder = ORDER, **changes: Any
) -> list[SubmissionOrder]:
    return [submission_order(order, number=number, **changes) for number in numbers]


def test_submissions_of_one_batch_swap_together(bench: Bench) -> None:
    service = bench.service()
    orders = numbered(0, 1, 2)
    swaps = {6: bench.offer(service, 2), 60: bench.offer(service, 3), 100: bench.offer(service, 4)}
    made = bench.generate(service, orders, swaps)
    found = [policies_of(bench.check(*each)) for each in zip(orders, made, strict=True)]
    assert max(map(len, found)) <= 3 and any(len(each) > 1 for each in found)


def test_a_swap_between_and_within_the_turns_of_an_episode(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(_: Calculator, state: list[str], text: str) -> str | None:
        state.append(text)
        return "7>" if len(state) < 4 else None

    monkeypatch.setattr(Calculator, "start", lambda *_: [])
    monkeypatch.setattr(Calculator, "step", step)
    order = submission_order(
        ORDER, environments=[environment("calculator")], stop_ids=[*range(40, 56)]
    )
    service = bench.service(order)
    swaps = {step: bench.offer(service, policy) for step, policy in ((4, 2), (9, 3))}
    rollouts = bench.check(order, *bench.generate(service, [order], swaps))
    between, within = 0, 0
    for row in range(len(rollouts)):
        turns = [each.spans for each in rollouts.rollout(row).model_segments]
        within += sum(len(spans) > 1 for spans in turns)
        between += sum(before[-1].policy != after[0].policy for before, after in pairwise(turns))
    assert between and within


def test_an_environment_that_fails_in_one_of_two_swapping_submissions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(_: Calculator, state: Any, text: str) -> str:
        raise RuntimeError("no calculator")

    monkeypatch.setattr(Calculator, "step", step)
    good, bad = submission_order(ORDER, number=7), submission_order(ORDER, number=8)
    bad = submission_order(bad, environments=[environment("calculator")], stop_ids=[*range(40, 56)])
    service = bench.service()
    made = bench.generate(service, [bad, good], {3: bench.offer(service, 2)})
    assert isinstance(made[0], UserError) and "no calculator" in str(made[0])
    assert policies_of(bench.check(good, made[1])) == {1, 2}
    trio.run(service.load, bench.load(3))  # nothing of them is left


def test_a_swap_that_fails_gives_up_every_submission_of_the_batch(
    bench: Bench, tmp_path: Path
) -> None:
    """Weights are replaced in place: nobody knows what the engine holds then."""
    service = bench.service()
    broken = Swap(load=Load(policy=reference(2), folder=str(tmp_path)))
    orders = numbered(10, 11)
    made = bench.generate(service, orders, {5: lambda: trio.run(service.swap, broken)})
    assert [type(each) for each in made] == [UserError, UserError]
    trio.run(service.load, bench.load(1))
    bench.check(orders[1], *bench.generate(service, orders[1:], {}))


def test_an_offer_is_answered_with_the_policy_that_is_being_read(bench: Bench) -> None:
    """Its folder must stay on the disk, whatever is offered meanwhile."""
    service = bench.service()
    engine: Any = service._engine
    load, read = engine.load_weights, []

    def load_weights(folder: Path, policy: int) -> None:
        answer = trio.run(service.swap, Swap(load=bench.load(3)))
        read.append((policy, answer.reading))
        load(folder, policy)

    engine.load_weights = load_weights
    (made,) = bench.generate(service, [ORDER], {3: bench.offer(service, 2)})
    bench.check(ORDER, made)
    assert isinstance(made, Generated) and made.policies == [1, 2, 3]
    assert read[:2] == [(2, reference(2)), (3, reference(3))]
