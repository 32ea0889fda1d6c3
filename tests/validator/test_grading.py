"""Grading: nothing of a file is run before its proofs were sampled, and then for so long only."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from peers.environments import Task, Transcript
from peers.sandbox import SandboxError
from peers.validator.draws import rows_sampled
from swarm.jobs.validation import Grade, Graded, Inspect, Inspected
from swarm.rollouts.submission_file import write
from tests.orders import reference
from tests.validator.conftest import Stage
from tests.validator.test_inspector import Failing, Given


def inspected(stage: Stage, **changes: Any) -> tuple[bytes, Inspected]:
    """The digest of an honest file, and what the first look at it found."""
    kept = {name: value for name, value in changes.items() if name != "environments"}
    header, rollouts = stage.generate(**kept)
    if "environments" in changes:
        names = [(each.name, each.version) for each in changes["environments"]]
        header = msgspec.structs.replace(header, environments=names)
    path = stage.folder / "pushed"
    write(path, rollouts, header)
    digest = blake3(path.read_bytes()).digest()
    job = Inspect(
        order=stage.order(**changes),
        path=str(path),
        digest=digest,
        canonical_path=str(stage.folder / "canonical"),
        tokenizer_folder=str(stage.policy),
        bytes_max=1 << 20,
    )
    return digest, stage.ask(stage.inspector.inspect, job)


def graded(stage: Stage, digest: bytes, seconds: float, hung: str = "") -> Graded:
    job = Grade(digest=digest, grading_seconds=seconds, hung=hung)
    return stage.ask(stage.inspector.grade, job)


def test_a_file_is_graded_only_when_that_is_asked(stage: Stage) -> None:
    graded_texts = []

    class Counting(Failing):
        def grade(self, task: Task, transcript: Transcript) -> float:
            graded_texts.append(transcript.text)
            return 1.0

    usual, stage.inspector._environments = stage.inspector._environments, Given(Counting())
    try:
        digest, found = inspected(stage, environments=[reference("failing")])
        assert not graded_texts
        assert found.failed == "" and found.canonical_digest and found.tokens
        whole = graded(stage, digest, 100.0)
    finally:
        stage.inspector._environments = usual
    assert len(graded_texts) == 16 and whole.graded == [[1.0] * 4] * 4


def test_a_sandbox_that_fails_ends_the_grading_and_gives_up_no_group(stage: Stage) -> None:
    class Boxless(Failing):
        def grade(self, task: Task, transcript: Transcript) -> float:
            raise SandboxError("no memory")

    usual, stage.inspector._environments = stage.inspector._environments, Given(Boxless())
    try:
        digest, _ = inspected(stage, environments=[reference("failing")])
        with pytest.raises(SandboxError, match=r"no sandbox works on this machine .no memory"):
            graded(stage, digest, 100.0)
    finally:
        stage.inspector._environments = usual


def test_what_is_left_when_the_budget_is_used_up_is_ungraded(stage: Stage) -> None:
    digest, _ = inspected(stage, groups=3)
    found = graded(stage, digest, 0.0)
    assert [each.group for each in found.ungraded] == [0, 1, 2] and found.graded == [[]] * 3
    assert "limits.grading_seconds = 0" in found.ungraded[0].reason
    assert not found.failed, "its own program, or the task's tests: nobody can say yet"


def test_only_the_last_file_inspected_is_graded(stage: Stage) -> None:
    digest, _ = inspected(stage)
    with pytest.raises(ValueError, match="was not inspected last"):
        graded(stage, bytes(32), 1.0)
    graded(stage, digest, 1.0)
    with pytest.raises(ValueError, match="was not inspected last"):
        graded(stage, digest, 1.0)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 200), st.integers(1, 8))
def test_the_rows_sampled_are_the_validators_own_draw(
    submission: bytes, rows: int, count: int
) -> None:
    drawn = rows_sampled(b"secret", submission, rows, count)
    assert len(set(drawn)) == len(drawn) == min(rows, count)
    assert drawn == sorted(drawn) and set(drawn) <= set(range(rows))
    assert drawn == rows_sampled(b"secret", submission, rows, count)


def test_another_secret_draws_other_rows() -> None:
    draws = {tuple(rows_sampled(b"%d" % n, bytes(32), 64, 4)) for n in range(50)}
    assert len(draws) > 45
