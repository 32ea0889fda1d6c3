"""What the inference peer's child process makes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
import trio

import swarm
from peers.engines import demo
from peers.environments import Renderer
from peers.environments import load as load_environment
from peers.inference.engine_service import EngineService
from peers.proofs.format import PROOF_BYTES, check_format, split
from peers.validator.inspector import InspectorService
from peers.validator.prefill import PrefillService
from swarm.errors import UserError
from swarm.identity import Identity
from swarm.jobs import Load
from swarm.jobs.inference import Generate, Generated, InferenceSetup
from swarm.jobs.validation import InspectionSetup, PrefillSetup
from swarm.rollouts import seeds
from swarm.rollouts.submission_file import ReadLimits, Submission, read
from tests.orders import policy as policy_reference
from tests.orders import reference, submission_order
from tests.rollouts.harness import completion

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower

LIMITS = ReadLimits(1 << 20, 1 << 10, 1 << 10, 1 << 10, 1 << 10)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    demo.make_policy(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def service(policy: Path) -> Iterator[EngineService]:
    service = EngineService(InferenceSetup(environments=[]))
    load(service, policy, 4)
    yield service


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"engine": "warp"}, "engine 'warp' is unknown"),
        ({"environments": [reference("chess")]}, "'chess' is not installed here"),
        ({"environments": [reference(version="9")]}, "but the run wants '9'"),
        ({"environments": [reference(options={"x": 1})]}, "unknown key 'x'"),
        ({"environments": [reference(), reference("chess")]}, "'chess' is not installed here"),
    ],
)
def test_what_is_not_here_is_said_before_a_policy_is_fetched(
    wanted: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        EngineService(InferenceSetup(**{"environments": [], **wanted}))
    with pytest.raises(UserError, match=re.escape(sentence)):
        if "engine" in wanted:
            PrefillService(PrefillSetup(**wanted))
        else:
            InspectorService(InspectionSetup(**wanted))


ORDER = submission_order(step=6, policy=policy_reference(4), number=2, groups=3, max_new_tokens=40)


def load(service: EngineService, folder: Path, step: int) -> None:
    trio.run(service.load, Load(policy=policy_reference(step), folder=str(folder)))


def generate(service: EngineService, path: Path, **changes: Any) -> Generated:
    job = Generate(order=submission_order(ORDER, **changes), path=str(path))
    return trio.run(service.generate, job)


def made(service: EngineService, path: Path, **changes: Any) -> tuple[Generated, Submission]:
    result = generate(service, path, **changes)
    return result, read(path, LIMITS)


def test_a_submission_says_what_it_is(service: EngineService, policy: Path, tmp_path: Path) -> None:
    result, submission = made(service, tmp_path / "file")
    raw = (tmp_path / "file").read_bytes()
    assert result.digest == blake3.blake3(raw).digest()
    assert result.size_bytes == len(raw)
    rollouts = submission.rollouts
    assert result.groups == 3
    assert result.tokens == len(rollouts.log_probabilities)
    assert rollouts.group.tolist() == [row // 4 for row in range(12)]
    assert rollouts.sample.tolist() == [row % 4 for row in range(12)]
    header = submission.header
    assert (header.step, header.policy, header.number) == (6, 4, 2)
    assert header.engine == f"native {swarm.__version__} float32 cpu"
    assert (header.temperature, header.max_new_tokens, header.stop_ids) == (1.0, 40, [2])
    environment, renderer = load_environment("sort-digits", "1"), Renderer(policy)
    seed = seeds.submission_seed(header.run, bytes(32), header.worker, header.number)
    for row in range(12):
        task = environment.task(seeds.task_seed(seed, row // 4))
        assert rollouts.prompt(row) == renderer.encode_prompt(task.prompt)
        length = len(completion(rollouts, row))
        check_format(split(rollouts.proof(row)), [length])
        assert (completion(rollouts, row)[-1] == 2) or length == 40
    finished = sum(completion(rollouts, row)[-1] == 2 for row in range(12)) / 12
    assert result.finished_share == finished
    assert (rollouts.log_probabilities < 0).all()
    assert len(rollouts.proofs) > 12 * PROOF_BYTES  # completions of 40 tokens have two proofs


def test_the_same_order_gives_the_same_file(service: EngineService, tmp_path: Path) -> None:
    first, _ = made(service, tmp_path / "a")
    again, _ = made(service, tmp_path / "b")
    other, _ = made(service, tmp_path / "c", number=3)
    assert first.digest == again.digest != other.digest


@pytest.mark.parametrize(
    "change", [{"number": 3}, {"nonce": bytes([1] * 32)}, {"worker": Identity(b"1" * 32).peer_id}]
)
def test_nothing_of_it_is_the_workers_choice(
    service: EngineService, tmp_path: Path, change: dict[str, Any]
) -> None:
    _, mine = made(service, tmp_path / "a", max_new_tokens=4)
    _, other = made(service, tmp_path / "b", max_new_tokens=4, **change)
    assert mine.rollouts.prompt(0) != other.rollouts.prompt(0)
    assert completion(mine.rollouts, 0) != completion(other.rollouts, 0)


def test_only_the_loaded_policy_generates(policy: Path, tmp_path: Path) -> None:
    service = EngineService(InferenceSetup(environments=[]))
    with pytest.raises(ValueError, match="policy 4 of lineage 0 is wanted"):
        generate(service, tmp_path / "file")
    load(service, policy, 4)
    with pytest.raises(ValueError, match="policy 5 of lineage 0 is wanted"):
        generate(service, tmp_path / "file", policy=policy_reference(5))
    with pytest.raises(UserError):
        load(service, tmp_path, 5)
    with pytest.raises(
        ValueError, match="policy 4 of lineage 0 is wanted"
    ):  # a failed load leaves none
        generate(service, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_swapped_policy_generates_otherwise(policy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    demo.make_policy(other, seed=2)
    service = EngineService(InferenceSetup(environments=[]))
    load(service, policy, 4)
    _, before = made(service, tmp_path / "a")
    load(service, other, 5)
    _, after = made(service, tmp_path / "b", policy=policy_reference(5))
    assert completion(before.rollouts, 0) != completion(after.rollouts, 0)
    load(service, policy, 4)
    _, back = made(service, tmp_path / "c")
    assert back.rollouts.to_bytes() == before.rollouts.to_bytes()


def test_altering_leaves_the_folder_alone(policy: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(policy, copy)
    honest, cheat = (
        EngineService(InferenceSetup(environments=[])),
        EngineService(InferenceSetup(alter_weights=0.5, environments=[])),
    )
    load(honest, copy, 4)
    load(cheat, copy, 4)
    _, mine = made(honest, tmp_path / "a")
    _, altered = made(cheat, tmp_path / "b")
    assert mine.rollouts.prompt(0) == altered.rollouts.prompt(0)
    assert mine.rollouts.proof(0) != altered.rollouts.proof(0)
    for path in policy.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes()


def test_an_unknown_environment_is_said_so(service: EngineService, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not installed"):
        generate(service, tmp_path / "file", environments=[reference("chess")])
