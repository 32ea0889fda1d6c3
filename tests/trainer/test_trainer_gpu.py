"""The trainer on a GPU. `make test-gpu` runs it; no GPU has run it yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.groups import Group, as_accepted
from peers.engines.device import find_device
from peers.engines.loading import load as load_model
from peers.learning.attention import why_not
from peers.learning.host import HostMemory, host_tensor
from peers.learning.learner import Learner
from peers.learning.packing import lay_out
from peers.learning.ranks import Ranks
from peers.learning.scorer import Scorer
from peers.learning.settings import LearnerSettings
from swarm.jobs.training import Sharding
from swarm.rollouts.rollout import Rollout
from swarm.wire.manifest import Objective, Optimiser, Schedule
from tests.trainer.test_packing import alone, scores, spread_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
]

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def _one_group() -> Iterator[None]:
    """The group of one rank, with libraries for the device and for host memory."""
    torch.cuda.set_device(CUDA)
    Ranks(device=CUDA).make_mesh(1)
    yield
    dist.destroy_process_group()


def groups(count: int = 4) -> list[Group]:
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> list[int]:
        return torch.randint(4, 14, (length,), generator=generator).tolist()

    return [
        Group(
            [Rollout.single_turn([4, 5, 6], draw(2 + 5 * index)) for index in range(4)],
            rewards=[1.0, 0.0, 0.5, 0.0],
            policy=0,
        )
        for _ in range(count)
    ]


def step(base: Path, device: torch.device, **sharding: Any) -> dict[str, float]:
    """The metrics of one step."""
    settings = LearnerSettings(
        Objective(entropy_coefficient=0.0),
        Schedule(steps=10, groups_per_step=4),
        optimiser=Optimiser(learning_rate=1e-3, warmup_steps=0),
        sharding=Sharding(**sharding),
        flat=True,
    )
    learner = Learner(base, settings, ranks=Ranks(device=device))
    return learner.train_step(as_accepted(groups()), 0)


@pytest.mark.parametrize("attention", ["flex_attention", "sdpa"])
def test_packed_rows_do_not_leak(base: Path, attention: str) -> None:
    assert why_not(attention, CUDA) == ""
    truth = load_model(base).float().eval()
    model = load_model(base).float().eval().to(CUDA)
    model.set_attn_implementation(attention)
    batch = spread_batch(8)
    expected = scores(truth, batch, alone(batch))[0]
    found = torch.empty(batch.token_count())
    with torch.no_grad():
        for rows in lay_out(batch, "flat"):
            found[rows.index] = Scorer(model)(rows.to(CUDA))[0].cpu()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("sharding", "tolerance"),
    [
        ({}, 1e-4),
        ({"mixed_precision": True}, 0.05),
        ({"mixed_precision": True, "cpu_offload": True}, 0.05),
    ],
)
def test_a_step_is_that_of_a_cpu_in_fp32(
    base: Path, sharding: dict[str, Any], tolerance: float
) -> None:
    """Also the group of one rank: NCCL on the device, gloo for what lies in host memory."""
    expected = step(base, torch.device("cpu"))
    found = step(base, CUDA, **sharding)
    for figure in ("loss", "gradient_norm"):
        assert found[figure] == pytest.approx(expected[figure], rel=tolerance, abs=tolerance)


def test_host_memory_returns_what_it_got() -> None:
    like = {"one": torch.randn(1000, 300, device=CUDA), "two": torch.randn(7, device=CUDA)}
    memory = HostMemory(CUDA, torch.bfloat16, like)
    first = memory.copy(like)
    assert all(each.is_pinned() for each in first.values())
    for name, value in like.items():
        assert torch.equal(first[name], value.to(torch.bfloat16).cpu())
    memory.reuse(first)
    second = memory.copy({name: value + 1 for name, value in like.items()})
    assert second["one"].data_ptr() == first["one"].data_ptr()
    assert torch.equal(second["two"], (like["two"] + 1).to(torch.bfloat16).cpu())
    assert host_tensor(0, torch.float32, CUDA).numel() == 0


def test_nccl_gathers_in_a_world_of_one() -> None:
    ranks = Ranks(device=find_device("cuda"))
    mesh = ranks.make_mesh(1)
    assert mesh.device_type == "cuda"
    ones = torch.ones(8, device=CUDA)
    dist.all_reduce(ones)
    assert float(ones.sum()) == 8
    on_host = torch.ones(8)
    dist.all_reduce(on_host)
    assert float(on_host.sum()) == 8
