"""Killed by SIGKILL at any instant, a learner goes on as if nothing had been; and full disks."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.engines.model import read_weights
from peers.learning.learner import Learner
from swarm.errors import DiskFullError
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import random_groups, settings, teach

CHOSEN = settings(optimiser_steps=2, kl_coefficient=0.01, entropy_coefficient=0.001)
STEPS = 8


def learn(
    folder: Path, base: Path, steps: int, every: int, ready: Callable[[], object] = lambda: None
) -> None:
    """Learn from a recorded log of batches, as the trainer's child does for its role, from the
    newest state on.

    Policies, and every `every` steps a state, are written while the next step trains. A policy that
    is on disk already must come out the same again, bit for bit.
    """
    learner = Learner(base, CHOSEN)
    states = sorted(int(p.name) for p in (folder / "states").glob("*") if p.name.isdigit())
    policies = {int(p.name): p for p in (folder / "policies").glob("*") if p.name.isdigit()}
    if states:
        learner.load(folder / "states" / str(states[-1]), policies)
    if learner.step not in policies:
        learner.export(folder / "policies" / str(learner.step))
    ready()
    with (folder / "metrics").open("a") as log:
        while learner.step < steps:
            step = learner.step
            groups = random_groups(step, policy=max(0, step - 2), count=5)
            metrics = teach(learner, groups, step, [f"batch-{step}"])
            if step + 1 in policies:
                assert learner.matches(policies[step + 1]), step
                with (folder / "repeated").open("a") as repeated:
                    print(step, file=repeated)
            learner.finish_save()  # of the step before: now it may be announced
            note = [step, learner.consumed, metrics["loss"], metrics["gradient_norm"]]
            print(json.dumps(note), file=log, flush=True)
            state = folder / "states" / str(step + 1) if (step + 1) % every == 0 else None
            learner.begin_save(state, folder / "policies" / str(step + 1))
    learner.finish_save()


def be_killed(folder: Path, base: Path, every: int, after_seconds: float = math.inf) -> None:
    """Let a learner live for so much CPU time after it was ready, then let the kernel kill it.

    CPU time, because a busy machine changes it little. SIGPROF's default kills as SIGKILL does.
    """

    def live() -> None:
        os.setsid()
        torch.set_num_threads(1)
        learn(folder, base, STEPS, every, begin)

    def begin() -> None:
        if after_seconds < math.inf:
            signal.setitimer(signal.ITIMER_PROF, max(after_seconds, 1e-6))

    process = multiprocessing.get_context("fork").Process(target=live)
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGPROF)


def noted(folder: Path) -> dict[int, Any]:
    """What was noted of each step; a step noted twice must have been the same."""
    found: dict[int, Any] = {}
    for line in (folder / "metrics").read_text().splitlines():
        step, *rest = json.loads(line)
        assert found.setdefault(step, rest) == rest
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "every"), [(0, 1), (2, 4)])
def test_killed_at_any_instant_it_has_the_same_losses_to_the_last_bit(
    base: Path, tmp_path: Path, seed: int, every: int
) -> None:
    """Also between the copy of a step and its durable write, and with a state every four steps."""
    through, broken = tmp_path / "through", tmp_path / "broken"
    for folder in (through, broken):
        folder.mkdir()
    began = time.process_time()
    learn(through, base, STEPS, every)
    whole_seconds = time.process_time() - began
    draw = random.Random(seed)
    lives = 0
    while not (broken / "states" / str(STEPS)).exists():
        # longer ones with time: a machine that has grown slower than it was gets on all the same
        be_killed(broken, base, every, draw.uniform(0, whole_seconds * 1.08**lives / 8))
        lives += 1
        assert lives < 60
    be_killed(broken, base, every)  # one more, so that the last step's note is there
    assert lives > 2
    assert every == 1 or (broken / "repeated").exists()
    expected, found = noted(through), noted(broken)
    assert {step: found[step] for step in found} == {step: expected[step] for step in found}
    left, right = (read_weights(f / "policies" / str(STEPS)) for f in (through, broken))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
def test_two_ranks_resume_as_if_nothing_had_been(base: Path, tmp_path: Path) -> None:
    def step(learner: Learner) -> dict[str, float]:
        groups = random_groups(learner.step, policy=max(0, learner.step - 2), count=5)
        return teach(learner, groups, learner.step, [str(learner.step)])

    def through(ranks: Any) -> list[dict[str, float]]:
        learner = Learner(base, CHOSEN, ranks=ranks)
        learner.export(tmp_path / "policy-0")
        metrics = [step(learner), step(learner)]
        learner.export(tmp_path / "policy-2")
        learner.begin_save(tmp_path / "state")
        metrics.append(step(learner))  # while the state is written
        learner.finish_save()
        return metrics

    def again(ranks: Any) -> tuple[dict[int, list[str]], dict[str, float]]:
        learner = Learner(base, CHOSEN, ranks=ranks)
        learner.load(tmp_path / "state", {0: tmp_path / "policy-0", 2: tmp_path / "policy-2"})
        return dict(learner.consumed), step(learner)

    expected = run_ranks(2, tmp_path, through)
    (tmp_path / "meeting").unlink()
    for (consumed, metrics), wanted in zip(run_ranks(2, tmp_path, again), expected, strict=True):
        assert consumed == {0: ["0"], 1: ["1"]}
        assert metrics == wanted[2]


def test_killed_between_the_copy_and_the_durable_write_it_repeats_the_step(
    base: Path, tmp_path: Path
) -> None:
    """The copies are lost with the process; the policy announced before them is not."""
    through, broken = tmp_path / "through", tmp_path / "broken"
    for folder in (through, broken):
        folder.mkdir()
    learn(through, base, 5, every=2)
    learn(broken, base, 3, every=2)  # the state of step 2, and policy 3
    shutil.rmtree(broken / "policies" / "3")  # not durable yet when it died
    assert [path.name for path in (broken / "states").iterdir()] == ["2"]
    learn(broken, base, 5, every=2)
    assert noted(broken) == noted(through)
    left, right = (read_weights(f / "policies" / "5") for f in (through, broken))
    assert all(torch.equal(left[name], right[name]) for name in left)
    learner = Learner(base, CHOSEN)
    assert learner.matches(base) and not learner.matches(through / "policies" / "1")


def test_a_published_policy_without_its_state_is_where_learning_goes_on(
    base: Path, tmp_path: Path
) -> None:
    """With another optimiser, but the same weights and numbers; policies before it are not held."""
    learn(tmp_path, base, 3, every=10)
    learner = Learner(base, CHOSEN)
    learner.begin_with(tmp_path / "policies" / "3", 3, lineage=1)
    assert learner.matches(tmp_path / "policies" / "3") and not learner.matches(base)
    assert (learner.step, learner.policies) == (3, [3])
    learner.save(tmp_path / "state")
    again = Learner(base, CHOSEN)
    again.load(tmp_path / "state", {})
    first, second = (
        teach(each, random_groups(3, policy=3), 3, ["batch"]) for each in (learner, again)
    )
    assert first["loss"] == second["loss"] and first["gradient_norm"] > 0
    with pytest.raises(ValueError, match="policy 2 is not held"):
        teach(learner, random_groups(4, policy=2), 4, ["older"])


def test_a_full_disk_leaves_the_state_before(base: Path, tmp_path: Path) -> None:
    """As far as the learner can tell: files may not grow beyond a limit."""
    learner = Learner(base, CHOSEN)
    learner.save(tmp_path / "state")
    teach(learner, random_groups(0, policy=0), 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(DiskFullError, match=r"disk is full; free some space, then start the t"):
            learner.save(tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    good = Learner(base, CHOSEN)
    good.load(tmp_path / "state", {})
    assert good.step == 0
    learner.save(tmp_path / "state")  # room again
    good.load(tmp_path / "state", {})
    assert good.step == 1


def test_what_begin_save_copied_is_what_is_written(base: Path, tmp_path: Path) -> None:
    """Learning goes on while the thread writes."""
    learner = Learner(base, CHOSEN)
    teach(learner, random_groups(0, policy=0), 0)
    learner.save(tmp_path / "at-once")
    learner.export(tmp_path / "policy")
    learner.begin_save(tmp_path / "meanwhile", tmp_path / "policy-meanwhile")
    teach(learner, random_groups(1, policy=0), 1)
    learner.finish_save()
    policies = [read_weights(tmp_path / name) for name in ("policy", "policy-meanwhile")]
    assert all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])
    for name in ("at-once", "meanwhile"):
        files = sorted((tmp_path / name).iterdir())
        assert [path.suffix for path in files] == [".safetensors", ".json"]
    assert (tmp_path / "at-once/state.json").read_bytes() == (
        tmp_path / "meanwhile/state.json"
    ).read_bytes()
    left, right = (read_weights(tmp_path / name) for name in ("at-once", "meanwhile"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
