"""Exact checks: what the inspector finds without a policy."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from peers.environments import (
    Environment,
    Generated,
    Grade,
    NotGradable,
    Renderer,
    Task,
    Tasks,
    Transcript,
    probe_hash,
)
from peers.environments.collection import Environments
from peers.environments.sort_digits import SortDigits
from peers.validator.checks import file
from swarm.rollouts.rollout import Rollout, Span
from swarm.rollouts.rollouts import Rollouts, parts_in
from swarm.rollouts.seeds import environment_of_group
from swarm.rollouts.submission_file import Header
from swarm.wire.manifest import EnvironmentReference
from tests.orders import reference
from tests.rollouts.harness import completion, single_turns
from tests.validator.conftest import STOP_IDS, Stage

Lists = dict[str, Any]


def lists_of(rollouts: Rollouts) -> Lists:
    rows = range(len(rollouts))
    return {
        "group": rollouts.group.tolist(),
        "sample": rollouts.sample.tolist(),
        "environment": rollouts.environment.tolist(),
        "prompts": [rollouts.prompt(row) for row in rows],
        "completions": [completion(rollouts, row) for row in rows],
        "proofs": [rollouts.proof(row) for row in rows],
    }


def changed(
    rollouts: Rollouts, change: Callable[[Lists], Any], stop_ids: Sequence[int] = STOP_IDS
) -> Rollouts:
    lists = lists_of(rollouts)
    change(lists)
    return single_turns(**lists, stop_ids=stop_ids)


def test_an_honest_submission_passes(stage: Stage) -> None:
    header, rollouts = stage.generate()
    found = stage.inspect(header, rollouts)
    assert found.failed == ""
    assert [check.name for check in found.checks if check.passed] == [
        "schema",
        "header",
        "counts",
        "prompts",
        "tokens",
        "spans",
        "ending",
        "proof_format",
        "signed_turns",
        "turns",
    ]
    assert not found.proven_fault
    assert [len(group) for group in found.rewards] == [4] * 4
    assert len(set(found.group_digests)) == 4
    assert found.tokens == len(rollouts.log_probabilities)
    canonical = Rollouts.from_bytes((stage.folder / "canonical").read_bytes())
    assert canonical.to_bytes() == rollouts.to_bytes()
    lengths = rollouts.model_lengths()
    assert lengths.min() < 8  # some stopped, some reached the limit: both endings are honest
    assert lengths.max() == 8


def test_rewards_are_the_environments_own(stage: Stage) -> None:
    header, rollouts = stage.generate(stop_ids=[2])

    def answer(lists: Lists) -> None:
        digits = sorted(lists["prompts"][5][1:7])
        lists["completions"][5] = [*digits, 2]
        lists["completions"][6] = [*digits, 7, 7]  # did not stop in time

    found = stage.inspect(header, changed(rollouts, answer, [2]), stop_ids=[2])
    assert found.failed == ""
    assert found.rewards[1] == [0.0, 1.0, 0.0, 0.0]
    assert sum(map(sum, found.rewards)) == 1.0


def in_spans(
    rollouts: Rollouts, row: int, policies: Sequence[int], lengths: Sequence[int]
) -> Rollouts:
    """`rollouts` with other spans of one row, and as many proofs as they need."""
    rows = [rollouts.row(index) for index in range(len(rollouts))]
    segment = rows[row].rollout.segments[1]
    spans = tuple(Span(*each) for each in zip(policies, lengths, strict=True))
    rows[row] = dataclasses.replace(
        rows[row],
        rollout=Rollout((rows[row].rollout.segments[0], dataclasses.replace(segment, spans=spans))),
        proof=rows[row].proof * len(spans),
    )
    return Rollouts.from_rows(rows)


def long_row(rollouts: Rollouts) -> int:
    return int(rollouts.model_lengths().argmax())


@pytest.mark.parametrize(
    ("swaps_max", "policies", "lengths", "sentence"),
    [
        (0, [1, 2], [3, 5], "1 spans come from another policy than 1"),
        (2, [0, 1], [3, 5], "1 spans come from a policy before 1"),
        (2, [2, 1], [3, 5], "1 spans come from a policy before 1"),
        (2, [2, 3, 2], [3, 3, 2], "1 spans come from a policy before 1"),
        (2, [1, 2, 3, 4], [2, 2, 2, 2], "4 policies sampled the submission; the run allows 2"),
        (64, [*range(1, 9)], [1] * 8, ""),
        (1, [1, 2], [3, 5], ""),
        (1, [2], [8], ""),
    ],
)
def test_spans_run_from_the_named_policy_upwards(
    stage: Stage, swaps_max: int, policies: list[int], lengths: list[int], sentence: str
) -> None:
    header, rollouts = stage.generate(swaps_max=swaps_max)
    forged = in_spans(rollouts, long_row(rollouts), policies, lengths)
    found = stage.inspect(header, forged, swaps_max=swaps_max)
    assert found.failed == ("spans" if sentence else "")
    assert found.proven_fault == bool(sentence) and sentence in found.detail
    if not sentence:
        assert found.policies == sorted({1, *policies})


def test_a_thousand_policies_over_the_rows_are_too_many(stage: Stage) -> None:
    """Each row has one span; the validator would have to load a policy for each."""
    header, rollouts = stage.generate(swaps_max=4)
    policies = np.arange(1, len(rollouts) + 1, dtype=np.int32)
    forged = dataclasses.replace(rollouts, span_policies=policies)
    found = stage.inspect(header, forged, swaps_max=4)
    assert (found.failed, found.proven_fault) == ("spans", True)
    assert "16 policies sampled the submission; the run allows 4 swaps" in found.detail


def test_a_proof_across_a_swap_is_one_proof_too_few(stage: Stage) -> None:
    header, rollouts = stage.generate(swaps_max=1)
    row = long_row(rollouts)
    forged = in_spans(rollouts, row, [1, 2], [3, 5])
    rows = [forged.row(index) for index in range(len(forged))]
    rows[row] = dataclasses.replace(rows[row], proof=rollouts.proof(row))
    found = stage.inspect(header, Rollouts.from_rows(rows), swaps_max=1)
    assert (found.failed, found.proven_fault) == ("proof_format", True)
    assert f"row {row}: 8 tokens of 2 policies need 2 proofs, not 1" in found.detail


LONG = [5] * 8
FAULTS: list[tuple[str, str, int, Callable[[Any], Any]]] = [
    ("tokens", "completions", 0, lambda tokens: [64, *tokens[1:]]),
    ("tokens", "completions", 0, lambda tokens: [-1, *tokens[1:]]),
    ("ending", "completions", 2, lambda _: [5, STOP_IDS[1], *LONG[2:]]),
    ("ending", "completions", 2, lambda _: [5, STOP_IDS[1], STOP_IDS[0]]),
    ("ending", "completions", 2, lambda _: LONG[:3]),
    ("ending", "completions", 2, lambda _: [*LONG, 5]),
    ("ending", "completions", 2, lambda _: [*LONG, STOP_IDS[0]]),
    ("prompts", "prompts", 7, lambda tokens: [*tokens[:2], 4 + (tokens[2] == 4), *tokens[3:]]),
    ("prompts", "prompts", 7, lambda tokens: [*tokens, 4]),
    ("prompts", "environment", 1, lambda _: 1),
    ("proof_format", "proofs", 3, lambda _: b""),
    ("proof_format", "proofs", 3, lambda proof: proof * 2),
    ("proof_format", "proofs", 3, lambda proof: proof[:-1]),
    ("proof_format", "proofs", 3, lambda proof: bytes(2) + proof[2:]),  # a modulus of 0
    ("proof_format", "proofs", 3, lambda proof: proof[:-2] + b"\xff\xff"),  # a coefficient
    ("counts", "sample", 0, lambda _: 1),
    ("counts", "group", 12, lambda _: 2),
]
"""Check, and the change of a column in a row that fails it."""


@pytest.mark.parametrize(("check", "column", "row", "change"), FAULTS)
def test_an_exact_fault_is_named_and_proven(
    stage: Stage, check: str, column: str, row: int, change: Callable[[Any], Any]
) -> None:
    def forge(lists: Lists) -> None:
        lists[column][row] = change(lists[column][row])

    _is_proven(stage, check, forge)


def test_a_missing_row_is_a_proven_fault(stage: Stage) -> None:
    _is_proven(stage, "counts", lambda lists: [column.pop() for column in lists.values()])


def _is_proven(stage: Stage, check: str, change: Callable[[Lists], Any]) -> None:
    header, rollouts = stage.generate()
    found = stage.inspect(header, changed(rollouts, change))
    assert (found.failed, found.proven_fault, found.rewards) == (check, True, [])
    assert found.detail
    last = found.checks[-1]
    assert (last.name, last.passed) == (check, False)
    assert last.figure != last.threshold


@pytest.mark.parametrize(
    "lie",
    [
        {"policy": 2},
        {"step": 4},
        {"lineage": 1},
        {"number": 1},
        {"run": "owner/other"},
        {"temperature": 0.7},
        {"max_new_tokens": 9},
        {"stop_ids": [2]},
        {"environments": [("sort-digits", "2")]},
        {"environments": [("sort-digits", "1")] * 2},
    ],
)
def test_a_header_that_lies_is_a_proven_fault(stage: Stage, lie: dict[str, Any]) -> None:
    header, rollouts = stage.generate()
    found = stage.inspect(msgspec.structs.replace(header, **lie), rollouts)
    assert (found.failed, found.proven_fault) == ("header", True)
    assert next(iter(lie)) in found.detail


def test_another_seeds_submission_has_the_wrong_prompts(stage: Stage) -> None:
    header, rollouts = stage.generate(number=1)
    assert stage.inspect(header, rollouts, number=1).failed == ""
    pretending = msgspec.structs.replace(header, number=0)
    assert stage.inspect(pretending, rollouts, number=0).failed == "prompts"


def test_fewer_groups_announced_are_a_prefix_of_the_seeds(stage: Stage) -> None:
    header, rollouts = stage.generate(groups=2)
    _, whole = stage.generate(groups=4)
    assert rollouts.prompt(7) == whole.prompt(7)
    assert stage.inspect(header, rollouts, groups=2).failed == ""


def test_bytes_that_are_no_parquet_are_a_proven_fault(stage: Stage) -> None:
    found = stage.inspect_bytes(b"PAR1" * 100)
    assert (found.failed, found.proven_fault) == ("schema", True)


def test_equal_groups_have_equal_digests_whoever_made_them(stage: Stage) -> None:
    header, rollouts = stage.generate()
    found = stage.inspect(header, rollouts)
    assert stage.inspect(header, rollouts).group_digests == found.group_digests
    hasher = blake3()
    prompt = rollouts.prompt(0)
    rows = [rollouts.rollout(row).tokens[len(prompt) :] for row in range(4)]
    for part in (prompt, *rows):
        hasher.update(np.array([len(part), *part], "<i4").tobytes())
    assert found.group_digests[0] == hasher.digest()

    def one_token(lists: Lists) -> None:
        tokens = next(row for row in lists["completions"][:4] if len(row) > 1)
        tokens[0] = 5 if tokens[0] != 5 else 6

    other = stage.inspect(header, changed(rollouts, one_token)).group_digests
    assert other[0] != found.group_digests[0]
    assert other[1:] == found.group_digests[1:]


def test_what_this_machine_lacks_is_no_fault_of_the_worker(stage: Stage) -> None:
    header, rollouts = stage.generate()
    found = stage.inspect(header, rollouts, environments=[reference("chess")])
    assert found.failed == "environment" and not found.proven_fault
    assert "environment 'chess' is not installed here" in found.detail
    with pytest.raises(OSError, match="missing"):
        stage.inspect_file(stage.folder / "missing", bytes(32))


class Given(Environments):
    """These environments, as if they were installed."""

    def __init__(self, *environments: Environment) -> None:
        super().__init__()
        self._given = {environment.name: environment for environment in environments}

    def of(self, reference: EnvironmentReference) -> Environment:
        return self._given.get(reference.name) or super().of(reference)


class Failing(SortDigits):
    """Cannot grade; its tasks are as ever."""

    name = "failing"

    def grade(self, task: Task, transcript: Transcript) -> Any:
        raise RuntimeError("no sandbox")


class Unknowable(Failing):
    """Knows the rewards of two groups only."""

    name = "failing"

    def __init__(self) -> None:
        self.graded = 0

    def grade(self, task: Task, transcript: Transcript) -> Any:
        self.graded += 1
        if self.graded > 8:
            raise NotGradable("the judge does not answer")
        return Grade(0.5, {"form": float(self.graded)})


def test_an_unknown_reward_is_not_a_failure_of_the_environment(stage: Stage) -> None:
    header, rollouts = stage.generate()
    of_failing = msgspec.structs.replace(header, environments=[("failing", "1")])
    changes = {"environments": [reference("failing")]}
    stage.inspector._environments = Given(Unknowable())
    found = stage.inspect(of_failing, rollouts, **changes)
    assert [each.group for each in found.ungraded] == [2, 3]
    assert all(each.not_gradable for each in found.ungraded)
    assert "the judge does not answer" in found.ungraded[0].reason
    assert found.rewards == [[0.5] * 4, [0.5] * 4, [0.0] * 4, [0.0] * 4]
    assert parts_in(found.parts, found.rewards, 1) == [{"form": n} for n in (5.0, 6.0, 7.0, 8.0)]
    assert parts_in(found.parts, found.rewards, 2) == [{}] * 4


def test_an_environment_that_fails_for_long_is_not_asked_about_further_groups(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise code that does not return costs its time limit in every group."""
    monkeypatch.setattr(file, "FAILURES_SECONDS_MAX", 0.0)
    asked: list[str] = []

    class Picky(Failing):
        def grade(self, task: Task, transcript: Transcript) -> float:
            asked.append(transcript.text)
            if len(asked) > 4:
                raise RuntimeError("no tool")
            return 1.0

    header, rollouts = stage.generate()
    of_failing = msgspec.structs.replace(header, environments=[("failing", "1")])
    stage.inspector._environments = Given(Picky())
    found = stage.inspect(of_failing, rollouts, environments=[reference("failing")])
    assert [each.group for each in found.ungraded] == [1, 2, 3] and len(asked) == 5
    assert found.rewards == [[1.0] * 4, *[[0.0] * 4] * 3]


class Hanging(Failing):
    def grade(self, task: Task, transcript: Transcript) -> float:
        raise AssertionError("a grader that hung is not asked again")


class Taskless(Failing):
    name = "taskless"

    def tasks(self) -> Tasks:
        raise RuntimeError("no data")


def test_an_environment_that_fails_leaves_the_other_checks_to_tell_whose_fault_it_is(
    stage: Stage,
) -> None:
    header, rollouts = stage.generate()
    stage.inspector._environments = Given(Failing(), Taskless())
    of_failing = msgspec.structs.replace(header, environments=[("failing", "1")])
    found = stage.inspect(of_failing, rollouts, environments=[reference("failing")])
    assert found.failed == "" and found.rewards == [] and found.task_means == []
    assert len(found.ungraded) == 4
    assert "cannot grade the completion" in found.ungraded[0].reason
    assert "RuntimeError: no sandbox" in found.ungraded[0].reason
    assert stage.judge().failed == "", "its tokens are the seed's all the same"
    stage.inspector._environments = Given(Hanging(), Taskless())
    found = stage.inspect(of_failing, rollouts, hung="it hung", environments=[reference("failing")])
    assert {each.reason for each in found.ungraded} == {"it hung"}
    assert (found.failed, found.rewards) == ("", [])
    assert found.tokens == len(rollouts.log_probabilities), "the worker is credited"
    assert stage.judge().failed == ""

    def invent(lists: Lists) -> None:
        for tokens in (some for some in lists["completions"] if len(some) > 1):
            tokens[0] = 5 if tokens[0] != 5 else 6

    lying = changed(rollouts, invent)
    invented = stage.inspect(of_failing, lying, environments=[reference("failing")])
    assert invented.ungraded and stage.judge().failed != ""

    found = stage.inspect(header, rollouts, environments=[reference("taskless")])
    assert (found.failed, found.proven_fault) == ("environment", False)
    assert "cannot draw a task (RuntimeError: no data)" in found.detail


def test_the_inspector_needs_no_torch() -> None:
    code = "import sys, peers.validator.inspector; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_field_of_a_header_is_checked(stage: Stage) -> None:
    checked = set(stage.order().header_fields())
    assert checked | {"format", "engine"} == {
        field.name for field in msgspec.structs.fields(Header)
    }


def test_length_penalties_come_off_the_rewards_and_the_tasks_own_are_told_apart(
    stage: Stage,
) -> None:
    """The worker is asked for a length by its seed; every completion token counts."""
    options = {"lengths": [3, 7], "alpha": 0.125, "prompt": "{length}{prompt}"}
    environments = [reference(options=options)]
    header, rollouts = stage.generate(environments=environments)
    targets = np.array([rollouts.prompt(row)[1] - 4 for row in range(len(rollouts))])
    assert set(targets.tolist()) <= {3, 7}
    found = stage.inspect(header, rollouts, environments=environments)
    assert found.failed == ""
    lengths = rollouts.model_lengths()
    off = np.abs(lengths - targets).reshape(4, 4)
    assert off.any()
    assert found.rewards == (-0.125 * off).tolist()  # random weights sort nothing
    assert found.task_means == found.task_spreads == [0.0] * 4
    plain = stage.inspect(*stage.generate())
    assert plain.task_means == plain.task_spreads == []
    assert plain.environments == [], "the run has only one"


def test_a_groups_task_and_grade_are_those_of_the_environment_that_its_seed_gives(
    stage: Stage,
) -> None:
    stage.engine._environments = stage.inspector._environments = Given(Letters())
    environments = [reference(), reference("letters", weight=2.0)]
    header, rollouts = stage.generate(environments=environments, groups=12)
    found = stage.inspect(header, rollouts, environments=environments, groups=12)
    assert found.failed == ""
    assert found.environments == [
        environment_of_group(stage.seed(), group, [1.0, 2.0]) for group in range(12)
    ]
    assert 0 < sum(found.environments) < 12
    for index, rewards in zip(found.environments, found.rewards, strict=True):
        assert all(reward == 0.5 for reward in rewards) == (index == 1)
    heavier = [reference(weight=1e6), reference("letters")]
    assert stage.inspect(header, rollouts, environments=heavier, groups=12).failed == "prompts"


class Letters(SortDigits):
    """Another environment of the same run."""

    name = "letters"

    def tasks(self) -> Tasks:
        return Generated(lambda _: Task(prompt=">>", answer="0"))

    def grade(self, task: Task, transcript: Transcript) -> float:
        return 0.5


def test_a_machine_that_renders_otherwise_does_not_judge(stage: Stage) -> None:
    """It would find proven faults in honest work."""
    header, rollouts = stage.generate()
    environment = reference("sort-digits")
    alike = probe_hash(SortDigits(), Renderer(stage.policy))
    for here, failed in ((alike, ""), (b"x" * 32, "environment")):
        named = msgspec.structs.replace(environment, probe_hash=here)
        found = stage.inspect(header, rollouts, environments=[named])
        assert (found.failed, found.proven_fault) == (failed, False)
        assert not failed or (found.quarantined and "differently" in found.detail)
