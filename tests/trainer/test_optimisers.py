"""AdamW with its moments in 8 bits, and Muon."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from peers.learning import optimisers
from peers.learning.learner import Learner
from peers.learning.optimisers import BLOCK, make_optimiser
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings
from peers.learning.sharding import whole
from swarm.errors import UserError
from swarm.jobs.training import Sharding
from swarm.wire.manifest import Optimiser
from tests.trainer.ranks_harness import run_ranks
from tests.trainer.test_learner import random_groups, run_steps, same, settings, teach, weights_of

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
WITH_DECAY = Optimiser(learning_rate=1e-3, weight_decay=0.1)


def chosen(optimiser: Any) -> LearnerSettings:
    return dataclasses.replace(
        settings(optimiser_steps=2, weight_decay=0.05), sharding=Sharding(optimiser=optimiser)
    )


def descend(
    name: str, steps: int = 4, divide: DeviceMesh | None = None
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Steps on random gradients of two parameters, one of them too small for 8 bits; `divide`: each
    is divided by rows over these ranks."""
    generator = torch.Generator().manual_seed(1)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator)
        return drawn if divide is None else distribute_tensor(drawn, divide, [Shard(0)])

    shapes = ((96, 128), (7,))
    parameters = [torch.nn.Parameter(random(shape)) for shape in shapes]
    optimiser = make_optimiser(name, parameters, WITH_DECAY)
    for _ in range(steps):
        for parameter, shape in zip(parameters, shapes, strict=True):
            parameter.grad = random(shape)
        optimiser.step()
    return [parameter.detach() for parameter in parameters], optimiser


def test_without_torchao_8_bits_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        UserError, match=r"needs torchao; type: pip install 'swarm-rl\[adamw8bit\]'"
    ):
        make_optimiser("adamw8bit", [], WITH_DECAY)


@needs_torchao
def test_8_bit_moments_take_two_bytes_and_nearly_the_same_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = descend("adamw")
    monkeypatch.setattr(optimisers, "PIECE", 5 * BLOCK)
    found, optimiser = descend("adamw8bit")
    large = next(iter(optimiser.state.values()))
    assert sum(value.nbytes for value in large.values()) == 96 * 128 * 2 * (1 + 4 / BLOCK) + 4
    assert torch.equal(found[1], expected[1])  # too small for 8 bits
    moved = (expected[0] - found[0]).abs().mean() / WITH_DECAY.learning_rate
    assert 0 < float(moved) < 0.1


@needs_torchao
def test_8_bit_moments_are_torchaos() -> None:
    """The same codes and scales as torchao's own AdamW keeps."""
    from torchao.optim.subclass_8bit import OptimState8bit

    memory = optimisers.QuantisedMoments()
    value = torch.randn(64, 64)
    state = memory.begin(torch.zeros(64, 64))
    whole = slice(0, value.numel())
    for moment, signed in optimisers.MOMENTS.items():
        wanted = value if signed else value.square()
        theirs = OptimState8bit.zeros((64, 64), signed, BLOCK)
        theirs.copy_(wanted)
        memory.write(state, moment, whole, wanted.view(-1))
        assert torch.equal(state[f"{moment}.codes"], theirs.codes)
        assert torch.equal(state[f"{moment}.scales"], theirs.scale)
        found = memory.read(state, moment, whole, torch.device("cpu"))
        assert torch.equal(found, theirs.dequantize().view(-1))


def test_muon_is_torchs_on_matrices_and_adamw_on_all_else() -> None:
    matrix, other = descend("muon")[0]
    assert torch.equal(other, descend("adamw")[0][1])
    generator = torch.Generator().manual_seed(1)
    expected = torch.nn.Parameter(torch.randn((96, 128), generator=generator))
    torch.randn(7, generator=generator)
    theirs = torch.optim.Muon([expected], lr=1e-3, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        expected.grad = torch.randn((96, 128), generator=generator)
        torch.randn(7, generator=generator)
        theirs.step()
    torch.testing.assert_close(matrix, expected.detach(), atol=1e-7, rtol=1e-6)


def test_muon_on_two_ranks_is_muon_on_one(tmp_path: Path) -> None:
    """To the last bit, given the same gradients. (Those of a batch are summed in another order, and
    Muon makes what rounding adds as large as all else where a gradient has a low rank.)"""
    expected, _ = descend("muon")

    def work(ranks: Ranks) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (ranks.world,))
        return [whole(each) for each in descend("muon", divide=mesh)[0]]

    for found in run_ranks(2, tmp_path, work):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", [pytest.param("adamw8bit", marks=needs_torchao), "muon"])
def test_a_learner_resumes_to_the_last_bit(name: str, base: Path, tmp_path: Path) -> None:
    through = Learner(base, chosen(name))
    run_steps(through, [0, 1])
    through.export(tmp_path / "policy-2")
    through.save(tmp_path / "state")
    expected = run_steps(through, [2])
    resumed = Learner(base, chosen(name))
    resumed.load(tmp_path / "state", {0: base, 2: tmp_path / "policy-2"})
    assert run_steps(resumed, [2]) == expected
    assert same(weights_of(resumed), weights_of(through))
    with pytest.raises(UserError, match=r"resume it with the trainer\.optimiser that wrote it"):
        Learner(base, chosen("adamw")).load(tmp_path / "state", {})


@needs_torchao
def test_two_ranks_resume_8_bit_moments_but_one_cannot(base: Path, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[dict[str, float], dict[str, float]]:
        through = Learner(base, chosen("adamw8bit"), ranks=ranks)
        teach(through, random_groups(0, policy=0), 0)
        through.save(tmp_path / "state")
        resumed = Learner(base, chosen("adamw8bit"), ranks=ranks)
        resumed.load(tmp_path / "state", {0: base})
        groups = random_groups(1, policy=1)
        return teach(through, groups, 1), teach(resumed, groups, 1)

    for expected, found in run_ranks(2, tmp_path, work):
        assert found == expected
    with pytest.raises(UserError, match="if that is adamw8bit with as many ranks"):
        Learner(base, chosen("adamw8bit")).load(tmp_path / "state", {})
