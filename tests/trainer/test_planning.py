"""What a trainer plans on the machine that it is started on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peers.learning import packing, plan
from peers.learning.learner import Learner
from peers.learning.plan import Workload, machine_of
from peers.learning.ranks import Launch, Ranks
from peers.trainer import planning
from peers.trainer.service import TrainerService
from swarm.errors import UserError
from swarm.jobs.training import PlanTraining, Sharding
from tests.trainer.test_learner import close, run_steps, settings, weights_of
from tests.trainer.test_service import start


def test_the_service_plans_before_it_loads(base: Path, tmp_path: Path) -> None:
    """A folder with a config.json alone is enough; a broken one is a sentence."""
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    found = trio.run(TrainerService().plan, PlanTraining(start=start(tmp_path)))
    assert found.parameters == 228_192 and found.problem == ""
    assert found.host_limit > found.host_bytes > 16 * found.parameters
    assert found.device_bytes == 0  # a CPU's memory is the host's
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded by transformers"):
        trio.run(TrainerService().plan, PlanTraining(start=start(tmp_path)))


def test_what_a_teacher_holds_is_planned(base: Path, tmp_path: Path) -> None:
    """A model of its own apart, an adapter or the base as one policy more."""
    job, run = start(base), {}
    objective = msgspec.structs.replace(job.terms.objective, teacher_weight=0.5)
    taught = msgspec.structs.replace(
        job, terms=msgspec.structs.replace(job.terms, objective=objective)
    )
    (tmp_path / "adapter_config.json").write_text("{}")
    for name, given in {"none": job, "base": taught}.items():
        run[name] = trio.run(TrainerService().plan, PlanTraining(start=given))
    for name, folder in {"adapter": tmp_path, "own": base}.items():
        given = msgspec.structs.replace(taught, teacher=str(folder))
        run[name] = trio.run(TrainerService().plan, PlanTraining(start=given))
    policies = {
        name: next(part.bytes for part in found.parts if part.name.startswith("past policies"))
        for name, found in run.items()
    }
    one = policies["none"] // (job.terms.schedule.max_staleness + 2)
    assert policies["base"] == policies["adapter"] == policies["none"] + one
    assert policies["own"] == policies["none"]
    parts = {part.name: part.bytes for part in run["own"].parts}
    assert parts["teacher's weights"] == one


def test_a_machine_without_the_memory_is_a_sentence(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "free_memory_bytes", lambda: 4_096_000)
    found = trio.run(TrainerService().plan, PlanTraining(start=start(base)))
    assert found.problem.startswith("the trainer needs ")
    assert "more than its 504 MB" in found.problem  # 0.5 GB of which this process has already


def test_passes_are_as_large_as_the_memory_allows(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of half a million tokens, on a machine for passes of some thousands."""
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    job = start(tmp_path)
    terms = msgspec.structs.replace(
        job.terms,
        schedule=msgspec.structs.replace(job.terms.schedule, groups_per_step=128),
        sampling=msgspec.structs.replace(job.terms.sampling, group_size=8),
    )
    wanted = PlanTraining(start=msgspec.structs.replace(job, terms=terms))
    found = {}
    for free_mb in (100_000, 250, 100, 4):
        monkeypatch.setattr(plan, "free_memory_bytes", lambda: free_mb * 1_024_000)  # noqa: B023
        found[free_mb] = trio.run(TrainerService().plan, wanted)
    assert found[100_000].tokens == packing.PASS_TOKENS_MAX
    assert packing.PASS_TOKENS_MAX > found[250].tokens > found[100].tokens >= 512
    assert not any(found[each].problem for each in (100_000, 250, 100))
    assert found[4].tokens == 512 and "more than its 504 MB" in found[4].problem


def test_a_planned_pass_is_the_trainers(base: Path) -> None:
    service = TrainerService()
    planned = trio.run(service.plan, PlanTraining(start=start(base)))
    trio.run(service.start, start(base))
    assert service._held().settings.sharding.pass_tokens == planned.tokens
    trio.run(service.start, start(base, sharding=Sharding(pass_tokens=24)))
    assert service._held().settings.sharding.pass_tokens == 24


@pytest.mark.parametrize(
    ("run", "sharding", "positions", "world", "tokens"),
    [
        ({"max_new_tokens": 8}, {}, 32, 1, 2 * 16 * 32),  # the whole batch
        ({"max_new_tokens": 8}, {}, 32, 2, 16 * 32),
        ({"max_new_tokens": 2000}, {}, 1 << 15, 1, packing.PASS_TOKENS_MAX),
        ({"max_new_tokens": 2000}, {"pass_tokens": 4096}, 1 << 15, 1, 4096),
        ({"max_new_tokens": 9000}, {"pass_tokens": 4096}, 1 << 15, 1, 9000 + 1024),
        ({"max_new_tokens": 1 << 18}, {}, 1 << 15, 1, 1 << 15),
    ],
)
def test_a_pass_is_planned_for_the_longest_sequence_or_the_batch(
    run: dict[str, Any], sharding: dict[str, Any], positions: int, world: int, tokens: int
) -> None:
    terms = start(Path()).terms
    sampling = msgspec.structs.replace(terms.sampling, group_size=16, **run)
    terms = msgspec.structs.replace(terms, sampling=sampling)
    terms = msgspec.structs.replace(
        terms, optimiser=msgspec.structs.replace(terms.optimiser, optimiser_steps=1)
    )
    found = planning.workload_of(terms, Sharding(**sharding), positions, world)
    assert not found.process
    longest = min(positions, sampling.max_new_tokens + 1024)
    assert found == Workload(tokens, longest, terms.schedule.max_staleness + 2, False)


def test_ranks_of_several_machines_share_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(Launch(3, 16, 3))
    monkeypatch.setattr(ranks, "max", list)  # no other rank is here
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = machine_of(ranks)
    assert (found.ranks, found.ranks_here, found.device) == (16, 8, "cpu")


@pytest.mark.parametrize("flat", [False, True])
def test_shorter_passes_teach_the_same(base: Path, flat: bool) -> None:
    whole, short = (
        Learner(
            base, dataclasses.replace(settings(), sharding=Sharding(pass_tokens=tokens), flat=flat)
        )
        for tokens in (0, 24)
    )
    run_steps(whole, [0, 1])
    run_steps(short, [0, 1])
    assert close(weights_of(whole), weights_of(short))
    batch = packing.first_fit([20, 20, 4], 24)
    assert batch == [[0, 2], [1]]
