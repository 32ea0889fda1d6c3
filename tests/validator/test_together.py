"""Submissions judged in one pass get the verdicts they would get alone, whatever the others are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.demo.recipes import THRESHOLDS
from peers.validator import prefill as module
from peers.validator.together import Together
from swarm.jobs.validation import (
    Judge,
    Judged,
    JudgedOne,
    JudgedTogether,
    JudgeTogether,
    ProofFigures,
    SamplingFigures,
)
from swarm.rollouts.rollouts import Rollouts
from swarm.wire.messages import Evidence
from swarm.world import ChildDied, ChildError
from tests.orders import policy, submission_order
from tests.validator.conftest import Stage

POISON = 63
"""A first token after which the policy's hidden states are NaN."""


@dataclasses.dataclass
class Handed:
    """Submissions of one policy, honest and hostile, by name."""

    stage: Stage
    jobs: dict[str, Judge]
    alone: dict[str, Judged | str]
    """Their results alone; the error of one that cannot be judged."""

    def together(self, names: list[str]) -> list[JudgedOne]:
        asked = JudgeTogether(jobs=[self.jobs[name] for name in names])
        return trio.run(self.stage.prefill.judge_together, asked).results

    def check(self, name: str, found: JudgedOne) -> None:
        """What was said of a submission in a pass is what is said of it alone."""
        expected = self.alone[name]
        if isinstance(expected, str):
            assert found.judged is None and found.error == expected
        else:
            assert found.judged is not None and found.judged.failed == expected.failed
            assert alike(*map(msgspec.to_builtins, (found.judged, expected)))


def alike(one: Any, other: Any) -> bool:
    """Equal but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return one == pytest.approx(other, rel=1e-3, abs=1e-3)
    return bool(one == other) or (isinstance(one, str) and isinstance(other, str))


def edited(rollouts: Rollouts, token: int) -> Rollouts:
    """The same with another last token in the first row."""
    tokens = rollouts.tokens.copy()
    tokens[rollouts.token_offsets[1] - 1] = token
    return dataclasses.replace(rollouts, tokens=tokens)


@pytest.fixture(scope="module")
def handed(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("handed")
    engine: Any = stage.prefill._engines[policy(1)]
    forward = engine._decoder.forward

    def poisoned(tokens: torch.Tensor, positions: torch.Tensor, *others: Any) -> torch.Tensor:
        sequence = (positions == 0).cumsum(-1)  # rows with one prompt count as one
        struck = torch.isin(sequence, sequence[(tokens == POISON) & (positions == 0)])
        return forward(tokens, positions, *others).masked_fill(struck[..., None], torch.nan)

    def job(name: str, number: int, rollouts: Rollouts, digest: bytes | None = None) -> Judge:
        raw = rollouts.to_bytes()
        (folder / name).write_bytes(raw)
        return Judge(
            order=stage.order(number=number),
            path=str(folder / name),
            digest=digest or blake3(raw).digest(),
            thresholds=THRESHOLDS,
            rewards=[],
        )

    own = [stage.generate(number=number)[1] for number in range(4)]
    blank = dataclasses.replace(own[3], proofs=np.zeros_like(own[3].proofs))
    jobs = {
        "honest": job("honest", 0, own[0]),
        "other": job("other", 1, own[1]),
        "wrong seed": job("wrong seed", 3, own[2]),
        "edited": job("edited", 2, edited(own[2], 7)),
        "unknown token": job("unknown token", 2, edited(own[2], 10**6)),
        "poisonous": job("poisonous", 2, edited_inside(own[2], POISON)),
        "blank proofs": job("blank proofs", 3, blank),
        "other file": job("other file", 0, own[0], digest=bytes(32)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._decoder, "forward", poisoned)
        alone: dict[str, Judged | str] = {}
        for name, each in jobs.items():
            try:
                alone[name] = trio.run(stage.prefill.judge, each)
            except Exception as error:
                alone[name] = str(error)
        yield Handed(stage, jobs, alone)


def edited_inside(rollouts: Rollouts, token: int) -> Rollouts:
    """The same with another first prompt token in each row."""
    tokens = rollouts.tokens.copy()
    tokens[np.asarray(rollouts.token_offsets[:-1])] = token
    return dataclasses.replace(rollouts, tokens=tokens)


def test_the_submissions_are_what_they_are_called(handed: Handed) -> None:
    said = {
        name: each if isinstance(each, str) else each.failed for name, each in handed.alone.items()
    }
    assert said["honest"] == said["other"] == ""
    assert said["wrong seed"] == "sampling" and said["edited"]
    assert "outside the vocabulary" in said["unknown token"]
    assert "not numbers" in said["poisonous"]
    assert said["blank proofs"] and said["other file"]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_whatever_is_judged_together_gets_its_own_verdict(handed: Handed, data: Any) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(handed.jobs)), min_size=1, max_size=5))
    for name, found in zip(names, handed.together(names), strict=True):
        handed.check(name, found)


def test_a_pass_is_bounded_and_the_first_is_always_in_it(
    handed: Handed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PREFILL_TOKENS_MAX", 1)
    first, second, third = handed.together(["other file", "honest", "other"])
    handed.check("other file", first)
    handed.check("honest", second)
    assert third == JudgedOne()


class Child:
    """A prefill child that judges by name and takes a second for each call."""

    def __init__(self, kills: Callable[[list[bytes]], bool] = lambda _: False) -> None:
        self.calls: list[list[bytes]] = []
        self.kills = kills
        self.limit = 100
        self.failed = ""

    async def load(self, job: Any) -> Any:
        raise AssertionError

    async def judge(self, job: Judge) -> Judged:
        found = (await self._judge([job]))[0]
        assert found.judged is not None
        return found.judged

    async def judge_together(self, job: JudgeTogether) -> JudgedTogether:
        return JudgedTogether(results=await self._judge(job.jobs), failed=self.failed)

    async def _judge(self, jobs: list[Judge]) -> list[JudgedOne]:
        digests = [job.digest for job in jobs]
        self.calls.append(digests)
        await trio.sleep(1)
        if self.kills(digests):
            raise ChildDied("gone", "prefill")
        return [
            JudgedOne(error="broken")
            if digest == b"broken"
            else JudgedOne(judged=report(digest))
            if index < self.limit
            else JudgedOne()
            for index, digest in enumerate(digests)
        ]


def report(digest: bytes) -> Judged:
    """A report that names the submission."""
    return Judged(
        detail=digest.decode(),
        proofs=ProofFigures(
            chunks=0,
            chunks_passed=0,
            exponents_min=0,
            exponents_mean=0.0,
            mantissa_mean_max=0.0,
            error_mean=0.0,
        ),
        sampling=SamplingFigures(tokens=0, mismatches=0, margin_mean=0.0, margin_max=0.0),
        evidence=Evidence(tokens=0, mismatches=0, sampler=[], policy=[], text=[], selection=[]),
    )


def unheard(count: int, reason: str) -> None:
    raise AssertionError(f"{count}: {reason}")


def asked(name: str, step: int = 1) -> Judge:
    order = submission_order(policy=policy(step))
    return Judge(order=order, path="", digest=name.encode(), thresholds=THRESHOLDS, rewards=[])


def judge_all(
    child: Child, jobs: list[Judge], *, together: Together | None = None
) -> tuple[dict[bytes, Any], Together]:
    """Ask for all jobs at once, in order; their results or errors by digest."""
    together = together or Together(unheard)
    results: dict[bytes, Any] = {}

    async def one(job: Judge) -> None:
        try:
            results[job.digest] = (
                await together.judge(job, child, trio.lowlevel.checkpoint)
            ).detail
        except (ChildDied, ChildError) as error:
            results[job.digest] = error

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for job in jobs:
                nursery.start_soon(one, job)
                await trio.testing.wait_all_tasks_blocked()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return results, together


def test_what_waits_for_one_policy_is_judged_in_one_call() -> None:
    child = Child()
    jobs = [asked("a"), asked("b"), asked("c", step=2), asked("d"), asked("broken"), asked("e")]
    results, _ = judge_all(child, jobs)
    assert child.calls == [[b"a"], [b"b", b"d", b"broken", b"e"], [b"c"]]
    error = results.pop(b"broken")
    assert isinstance(error, ChildError) and str(error) == "broken"
    assert results == {name: name.decode() for name in (b"a", b"b", b"c", b"d", b"e")}


def test_what_did_not_fit_into_a_pass_is_in_a_later_one() -> None:
    child = Child()
    child.limit = 2
    results, _ = judge_all(child, [asked(name) for name in "abcdef"])
    assert child.calls == [[b"a"], [b"b", b"c", b"d", b"e", b"f"], [b"d", b"e", b"f"], [b"f"]]
    assert len(results) == 6


def test_a_pass_that_fails_as_a_whole_is_said(handed: Handed) -> None:
    asked_for = JudgeTogether(jobs=[handed.jobs[name] for name in ("honest", "unknown token")])
    found = trio.run(handed.stage.prefill.judge_together, asked_for)
    assert "outside the vocabulary" in found.failed
    child, said = Child(), []
    child.failed = found.failed
    judge_all(
        child,
        [asked(name) for name in "abc"],
        together=Together(lambda count, reason: said.append((count, reason))),
    )
    assert said == [(2, found.failed)]


def test_a_deadly_submission_costs_its_neighbours_one_pass() -> None:
    child = Child(kills=lambda digests: b"deadly" in digests)
    jobs = [asked(name) for name in ("a", "b", "deadly", "c")]
    results, together = judge_all(child, jobs)
    died = [results[name] for name in (b"b", b"deadly", b"c")]
    assert all(isinstance(each, ChildDied) and each.blameless for each in died)
    results, _ = judge_all(child, jobs[1:], together=together)
    assert child.calls[-3:] == [[b"b"], [b"deadly"], [b"c"]]
    assert results[b"b"] == "b" and results[b"c"] == "c"
    assert not results[b"deadly"].blameless  # alone, it is to blame
    results, _ = judge_all(child, [asked(name) for name in "xbc"], together=together)
    assert child.calls[-1] == [b"b", b"c"]  # nobody suspects them any more


def test_another_goes_on_when_the_one_whose_turn_it_is_is_cancelled() -> None:
    child, together = Child(), Together(unheard)
    results: list[str] = []

    async def one(name: str, scope: trio.CancelScope) -> None:
        with scope:
            judged = await together.judge(asked(name), child, trio.lowlevel.checkpoint)
            results.append(judged.detail)

    async def main() -> None:
        scopes = [trio.CancelScope() for _ in range(4)]
        async with trio.open_nursery() as nursery:
            for name, scope in zip("abcd", scopes, strict=True):
                nursery.start_soon(one, name, scope)
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(1.5)  # b judges b, c and d
            scopes[1].cancel()
            scopes[2].cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert results == ["a", "d"]
    assert list(itertools.chain(child.calls)) == [[b"a"], [b"b", b"c", b"d"], [b"d"]]
