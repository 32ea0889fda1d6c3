"""The validator's prefill child: policies in memory, and trouble that is not the worker's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

from peers.engines.engine import Engine
from peers.engines.registry import make_engine
from peers.validator import prefill as module
from peers.validator.prefill import PrefillService
from peers.validator.recompute import Completed, recompute
from swarm.errors import UserError
from swarm.jobs import Load
from swarm.jobs.validation import PrefillSetup
from swarm.wire.manifest import Thresholds
from swarm.wire.messages import CheckpointReference
from tests.orders import ORDER


def reference(step: int) -> CheckpointReference:
    return msgspec.structs.replace(ORDER.policy, step=step)


def load(service: PrefillService, folder: Path, step: int) -> list[int]:
    """Load a policy; return the steps of all that are in memory."""
    loaded = trio.run(service.load, Load(policy=reference(step), folder=str(folder)))
    return [policy.step for policy in loaded]


def test_as_many_policies_stay_as_memory_allows(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = PrefillService(PrefillSetup(policies_kept=3))
    free = 1 << 40
    monkeypatch.setattr(module, "available_bytes", lambda _: free)
    assert load(service, policy, 1) == [1]
    assert load(service, policy, 2) == [1, 2]
    free = 1000
    assert load(service, policy, 3) == [2, 3]
    free = 1 << 40
    assert load(service, policy, 4) == [2, 3, 4]
    assert load(service, policy, 5) == [3, 4, 5]


def test_the_next_policy_takes_the_place_of_the_oldest(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Engine] = []

    def making(*arguments: Any) -> Engine:
        made.append(make_engine(*arguments))
        return made[-1]

    monkeypatch.setattr(module, "make_engine", making)
    service = PrefillService(PrefillSetup(policies_kept=1))
    load(service, policy, 1)
    other = tmp_path / "other"
    shutil.copytree(policy, other)
    halved = {name: value / 2 for name, value in load_file(other / "model.safetensors").items()}
    save_file(halved, other / "model.safetensors")
    assert load(service, other, 2) == [2]
    (engine,) = made
    given = ([[5, 6, 7, 8]], [[2, 3]])
    (states,), (fresh,) = (
        each.prefill(*given).states for each in (engine, make_engine("native", other))
    )
    assert torch.equal(states, fresh)


def test_a_load_without_memory_drops_the_others_and_then_is_one_sentence(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = PrefillService(PrefillSetup(policies_kept=3))
    load(service, policy, 1)
    failing = 1

    def making(*arguments: Any) -> Engine:
        nonlocal failing
        failing -= 1
        if failing >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_engine(*arguments)

    monkeypatch.setattr(module, "make_engine", making)
    assert load(service, policy, 2) == [2]
    failing = 2
    with pytest.raises(UserError, match="there is no memory for policy 3 in"):
        load(service, policy, 3)


def test_a_folder_without_a_policy_is_one_sentence_and_drops_nothing(
    policy: Path, tmp_path: Path
) -> None:
    service = PrefillService(PrefillSetup())
    load(service, policy, 1)
    with pytest.raises(UserError, match="cannot be read"):
        load(service, tmp_path, 2)
    assert load(service, policy, 3) == [1, 3]


def test_states_that_are_no_numbers_refuse_nothing(policy: Path) -> None:
    """They would otherwise pass for tokens that fit: no comparison with NaN holds."""
    engine: Any = make_engine("native", policy)
    forward = engine._decoder.forward
    engine._decoder.forward = lambda *given: forward(*given) * torch.nan
    given = Completed([[1, 5, 6]], [[1, 2]], [7], [[b""]])
    with pytest.raises(UserError, match=r"not numbers here \(row 7\).*nothing is refused"):
        recompute(engine, given, (1, 2), 1.0, Thresholds())
