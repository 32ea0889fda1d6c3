"""Swaps of weights between the tokens of a submission: what the validator makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from blake3 import blake3

from peers.demo.recipes import THRESHOLDS
from peers.engines.service import EngineService
from peers.validator.prefill import PrefillService
from swarm.jobs import SubmissionOrder
from swarm.jobs.inference import Generated
from swarm.jobs.validation import Judge, Judged, PrefillSetup
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import read
from tests.inference.files import LIMITS
from tests.inference.swaps import ORDER, Bench, open_bench
from tests.orders import policy as reference
from tests.orders import submission_order

Swaps = dict[int, int]
"""The policy offered during each of some steps of the engine, counted from 1; 0: before them."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with open_bench(tmp_path_factory) as found:
        yield found


def generate(
    bench: Bench,
    swaps: Swaps,
    order: SubmissionOrder = ORDER,
    service: EngineService | None = None,
    tamper: Callable[[Any], None] = lambda engine: None,
) -> tuple[Generated, Rollouts]:
    service = service or bench.service()
    tamper(service._engine)
    acts = {step: bench.offer(service, policy) for step, policy in swaps.items()}
    acts.get(0, lambda: None)()
    (made,) = bench.generate(service, [order], acts)
    if isinstance(made, Exception):
        raise made
    return made, read(bench.path(order), LIMITS).rollouts


def judge(
    bench: Bench, rollouts: Rollouts, kept: int = 3, given: tuple[int, ...] = (1, 2, 3)
) -> Judged:
    service = PrefillService(PrefillSetup(policies_kept=kept))
    raw = rollouts.to_bytes()
    (bench.at / "canonical").write_bytes(raw)
    job = Judge(
        order=ORDER,
        path=str(bench.at / "canonical"),
        digest=blake3(raw).digest(),
        thresholds=THRESHOLDS,
        rewards=[],
        later=[bench.load(policy) for policy in given],
    )
    return trio.run(service.judge, job)


@pytest.fixture(scope="module")
def swapped(bench: Bench) -> Rollouts:
    """Policy 2 after 6 tokens, policy 3 after 34."""
    made, rollouts = generate(bench, {6: 2, 34: 3})
    assert made.policy == reference(3)
    return rollouts


def spans(rollouts: Rollouts, row: int) -> list[tuple[int, int]]:
    return [(span.policy, span.tokens) for span in rollouts.rollout(row).spans]


def up_to(length: int, given: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans of the first tokens: some completions end before a swap."""
    found = []
    for policy, tokens in given:
        found.append((policy, min(tokens, length)))
        length -= found[-1][1]
    return [span for span in found if span[1]]


def longest(rollouts: Rollouts) -> int:
    """A row that crosses both swaps."""
    row = int(rollouts.model_lengths().argmax())
    assert rollouts.model_lengths()[row] == 40
    return row


def test_each_span_is_its_policys(bench: Bench, swapped: Rollouts) -> None:
    _, whole = generate(bench, {})
    for row, length in enumerate(swapped.model_lengths().tolist()):
        assert spans(swapped, row) == up_to(length, [(1, 6), (2, 28), (3, 6)])
        assert len(swapped.proof(row)) == len(spans(swapped, row)) * 258
        # The tokens before the first swap are the named policy's.
        before = slice(0, len(whole.prompt(row)) + 6)
        assert swapped.row_tokens(row)[before].tolist() == whole.row_tokens(row)[before].tolist()


@pytest.mark.parametrize("kept", [1, 3])
def test_an_honest_swap_passes_whatever_memory_the_validator_has(
    bench: Bench, swapped: Rollouts, kept: int
) -> None:
    found = judge(bench, swapped, kept)
    assert found.failed == "" and found.sampling.mismatches == 0
    assert found.sampling.tokens == len(swapped.log_probabilities)
    assert found.proofs.chunks == len(swapped.span_policies) > len(swapped)
    assert found.proofs.error_mean < 0.01
    assert [policy.step for policy in found.policies] == [1, 2, 3][-kept:]


def relabelled(rollouts: Rollouts, policies: list[int], lengths: list[int]) -> Rollouts:
    """Other spans for the longest row, as many as before."""
    first = rollouts.span_offsets[longest(rollouts)]
    own = slice(first, first + len(policies))
    changed = replace(
        rollouts,
        span_policies=rollouts.span_policies.copy(),
        span_lengths=rollouts.span_lengths.copy(),
    )
    changed.span_policies[own], changed.span_lengths[own] = policies, lengths
    return changed


@pytest.mark.parametrize(
    ("policies", "lengths"),
    [
        ([1, 2, 3], [9, 25, 6]),  # the first swap is said to come three tokens later
        ([1, 2, 3], [6, 25, 9]),  # the second three tokens earlier
        ([1, 2, 4], [6, 28, 6]),  # the last tokens are said to be policy 4's
        ([1, 3, 4], [6, 28, 6]),
    ],
)
def test_spans_that_lie_are_refused(
    bench: Bench, swapped: Rollouts, policies: list[int], lengths: list[int]
) -> None:
    forged = relabelled(swapped, policies, lengths)
    found = judge(bench, forged, given=(1, 2, 3, 4), kept=4)
    assert found.failed == "proofs"


def test_tokens_of_a_kept_cache_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the policy before the swap are not what a prefill computes."""

    def keep_caches(engine: Any) -> None:
        load = engine.load_weights

        def load_weights(folder: Path, policy: int) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(engine._rows, "restart", lambda: None)
                patch.setattr(engine._rows.cache, "clear", lambda: None)
                load(folder, policy)
            for row in engine._rows.live.values():
                row.save_hidden()
                row.policies.append((policy, len(row.tokens)))

        engine.load_weights = load_weights

    _, rollouts = generate(bench, {6: 2}, tamper=keep_caches)
    assert spans(rollouts, longest(rollouts)) == [(1, 6), (2, 34)]
    found = judge(bench, rollouts)
    assert found.failed == "proofs"


def test_a_policy_that_is_not_at_hand_is_no_fault_of_the_worker(
    bench: Bench, swapped: Rollouts
) -> None:
    with pytest.raises(ValueError, match="policy 2 of lineage 0 is not loaded"):
        judge(bench, swapped, given=(1, 3))


@pytest.mark.parametrize(
    ("swaps_max", "swaps", "expected"),
    [
        (0, {6: 2}, [(1, 40)]),
        (1, {6: 2, 20: 3}, [(1, 6), (2, 34)]),
        (2, {6: 3, 20: 2}, [(1, 6), (3, 34)]),  # never back
        (2, {6: 2, 7: 2}, [(1, 6), (2, 34)]),
        (2, {0: 2}, [(2, 40)]),  # before the first token
    ],
)
def test_a_worker_swaps_upwards_and_only_as_often_as_the_run_allows(
    bench: Bench, swaps_max: int, swaps: Swaps, expected: list[tuple[int, int]]
) -> None:
    made, rollouts = generate(bench, swaps, submission_order(ORDER, swaps_max=swaps_max))
    for row, length in enumerate(rollouts.model_lengths().tolist()):
        assert spans(rollouts, row) == up_to(length, expected)
    assert made.policy == reference(expected[-1][0])


def test_a_submission_may_begin_with_a_later_policy(bench: Bench) -> None:
    service = bench.service(policy=2)
    _, rollouts = generate(bench, {}, service=service)
    assert set(rollouts.span_policies.tolist()) == {2}
    with pytest.raises(ValueError, match="policy 1 of lineage 0 is wanted, but policy 2"):
        generate(bench, {}, submission_order(ORDER, swaps_max=0), service=service)
    earlier = submission_order(ORDER, policy=reference(3))
    with pytest.raises(ValueError, match="policy 3 of lineage 0 is wanted, but policy 2"):
        generate(bench, {}, earlier, service=service)
