"""What the inference peer's child process makes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch
import trio
import trio.lowlevel

import swarm
from peers.engines import demo
from peers.engines.engine import Piece
from peers.engines.episodes import Player, Playing, finish
from peers.engines.native import NativeEngine
from peers.engines.service import EngineService
from peers.environments import Renderer, task_of
from peers.environments import load as load_environment
from peers.proofs.format import PROOF_BYTES, check_format, split
from peers.validator.inspector import InspectorService
from peers.validator.prefill import PrefillService
from swarm.errors import UserError
from swarm.jobs import Hardware, Load
from swarm.jobs.inference import Generate, Generated, InferenceSetup
from swarm.jobs.validation import InspectionSetup, PrefillSetup
from swarm.rollouts import seeds
from swarm.rollouts.submission_file import Submission, read
from swarm.wire.identity import Identity
from swarm.world.progress import Reporter, current
from tests.inference.files import LIMITS, tokens_of
from tests.orders import policy as policy_reference
from tests.orders import reference, submission_order
from tests.rollouts.harness import completion

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower


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
        task = task_of(environment, seeds.task_seed(seed, row // 4))
        assert rollouts.prompt(row) == renderer.encode_prompt(task.prompt)
        length = len(completion(rollouts, row))
        check_format(split(rollouts.proof(row)), [length])
        assert (completion(rollouts, row)[-1] == 2) or length == 40
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


@pytest.mark.parametrize(
    "cheating",
    [
        InferenceSetup(alter_weights=0.5, environments=[]),
        InferenceSetup(round_weights="int8", environments=[]),
    ],
    ids=["noise", "int8"],
)
def test_altering_leaves_the_folder_alone(
    policy: Path, tmp_path: Path, cheating: InferenceSetup
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(policy, copy)
    honest, cheat = EngineService(InferenceSetup(environments=[])), EngineService(cheating)
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


@pytest.mark.parametrize(("devices", "at_once"), [([], 1), (["cpu", "cpu"], 2)])
def test_submissions_asked_for_together_give_the_files_they_give_alone(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], at_once: int
) -> None:
    """One after the other on a CPU; in one batch where several devices share the layers."""
    hardware = Hardware(device="cpu", devices=devices)
    service = EngineService(InferenceSetup(environments=[], hardware=hardware))
    load(service, policy, 4)
    alone = [generate(service, tmp_path / f"alone-{number}", number=number) for number in range(3)]
    live: list[set[tuple[int, int] | None]] = []
    step = NativeEngine.step

    def watched(engine: NativeEngine) -> list[Piece]:
        live.append({row.noise_key for row in engine._rows.live.values()})
        return step(engine)

    monkeypatch.setattr(NativeEngine, "step", watched)
    together: dict[int, Generated] = {}

    async def one(number: int) -> None:
        job = Generate(
            order=submission_order(ORDER, number=number), path=str(tmp_path / f"{number}")
        )
        together[number] = await service.generate(job)

    async def all_at_once() -> float:
        before = await service.usage()
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(one, number)
        return await service.usage() - before

    seconds = trio.run(all_at_once)
    for number in range(3):
        assert tokens_of(tmp_path / f"{number}") == tokens_of(tmp_path / f"alone-{number}")
    assert [each.tokens for each in alone] == [together[number].tokens for number in range(3)]
    assert max(map(len, live)) == at_once, "rows of one enter as rows of another finish"
    # The shares of a step add up to it but for the last bit of a float.
    shares = sum(each.seconds_generate for each in together.values())
    assert 0 < shares <= seconds * (1 + 1e-12)


class Counted(Reporter):
    """Counts the reports of one call."""

    def __init__(self) -> None:
        self.count = 0

    def report(self, *, cancellable: bool) -> None:
        self.count += 1


def test_a_call_that_waits_for_the_batch_reports_progress(policy: Path) -> None:
    """Else its caller takes the engine for hung, and kills it."""
    player = Player(NativeEngine(policy), sets_at_once=1)
    environment, renderer = load_environment("sort-digits", "1"), Renderer(policy)
    work = [(environment, task_of(environment, bytes(32)))]

    def begin() -> Playing:
        current.set(Counted())
        playing = Playing(renderer, work, [0], None, ORDER.sampling)
        player.add(playing)
        return playing

    first, second = (copy_context().run(begin) for _ in range(2))
    finish(player, first)
    assert len(second.waiting) == 1, "it has not begun"
    assert isinstance(second.reporter, Counted) and second.reporter.count > 0


def test_a_submission_that_fails_or_is_cancelled_leaves_the_others_alone(
    policy: Path, tmp_path: Path
) -> None:
    service = EngineService(InferenceSetup(environments=[]))
    load(service, policy, 4)
    whole = generate(service, tmp_path / "alone")
    failed: list[str] = []

    async def too_long() -> None:
        try:
            order = submission_order(ORDER, number=3, max_new_tokens=10_000)
            await service.generate(Generate(order=order, path=str(tmp_path / "long")))
        except UserError as error:
            failed.append(str(error))

    async def cancelled() -> None:
        with trio.move_on_after(0.001):
            order = submission_order(ORDER, number=4)
            await service.generate(Generate(order=order, path=str(tmp_path / "cancelled")))

    async def main() -> Generated:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(too_long)
            nursery.start_soon(cancelled)
            return await service.generate(Generate(order=ORDER, path=str(tmp_path / "file")))

    assert trio.run(main).tokens == whole.tokens
    assert tokens_of(tmp_path / "file") == tokens_of(tmp_path / "alone")
    assert len(failed) == 1 and "0 tokens are the most that leave room" in failed[0]
    assert not (tmp_path / "long").exists() and not (tmp_path / "cancelled").exists()
    load(service, policy, 4)  # nothing of them is left


def test_no_policy_is_loaded_over_submissions_that_are_generated(
    policy: Path, tmp_path: Path
) -> None:
    service = EngineService(InferenceSetup(environments=[]))
    load(service, policy, 4)
    refused: list[str] = []

    async def main() -> None:
        async def first() -> None:
            await service.generate(Generate(order=ORDER, path=str(tmp_path / "a")))

        async def second() -> None:
            order = submission_order(ORDER, number=3)
            await service.generate(Generate(order=order, path=str(tmp_path / "b")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            while service._player is None or service._player.is_idle:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(swap)
            while not (service._thread._turn.statistics().tasks_waiting or refused):
                await trio.lowlevel.checkpoint()
            nursery.start_soon(second)

    async def swap() -> None:
        try:
            await service.load(Load(policy=policy_reference(5), folder=str(policy)))
        except ValueError as error:
            refused.append(str(error))

    trio.run(main)
    assert refused and "are being generated" in refused[0]
    assert tokens_of(tmp_path / "b")
