"""A submission of a served environment: its engine has neither the environment nor a tokenizer's
prompt, and its file proves every turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
import trio

from peers.engines import demo
from peers.engines.service import EngineService
from peers.environment.service import EnvironmentPeerService
from peers.environments import Renderer
from peers.environments.episodes import EpisodeLimits
from peers.validator.checks.base import run
from peers.validator.checks.file import CHECKS, Inspection
from peers.validator.reader import Contents
from swarm.jobs import Load, SubmissionOrder
from swarm.jobs.environment import EnvironmentSetup, GradeEpisode, PlayTurn
from swarm.jobs.inference import AskedTurn, Generate, InferenceSetup
from swarm.jobs.validation import Report
from swarm.rollouts.submission_file import ReadLimits, Submission, read
from swarm.wire.envelope import open_envelope
from swarm.wire.identity import Identity
from swarm.wire.turns import Turn
from tests.environment.served import ECHO, LonePeer, answer, generate, install, job_of, without
from tests.orders import policy as policy_reference
from tests.orders import submission_order

torch.set_num_threads(1)

ORDER = without(
    submission_order(
        policy=policy_reference(0),
        groups=2,
        group_size=4,
        max_new_tokens=32,
        stop_ids=list(range(2, 18)),  # of an untrained policy, whose turns are short thus
    ),
    ECHO,
)
LIMITS = ReadLimits(1 << 24, 1000, 64, 65, 64)


@dataclass(frozen=True)
class Made:
    """A submission's content, and its environment peer."""

    peer: LonePeer
    engine: EngineService
    folder: Path
    submission: Submission

    def inspect(
        self, change: Callable[[list[list[bytes]]], None], order: SubmissionOrder = ORDER
    ) -> Report:
        """Run the file's checks after a change of its turns."""
        turns = [list(each) for each in self.submission.turns]
        change(turns)
        contents = Contents(
            msgspec.structs.replace(
                self.submission.header, number=order.number, worker=order.worker, step=order.step
            ),
            self.submission.rollouts,
            turns,
            b"",
            0,
        )
        inspection = Inspection(
            read=lambda: contents,
            header=order.header_fields(),
            groups=[None] * order.groups,
            environments=[0] * order.groups,
            prompts=[None] * order.groups,
            group_size=order.sampling.group_size,
            renderer=Renderer(self.folder),
            vocabulary=64,
            limits=EpisodeLimits(order.sampling.stop_ids, order.sampling.max_new_tokens, 1024),
            run=order.run,
            seed=order.seed(),
            environment_peers=[self.peer.identity.peer_id],
        )
        return run(CHECKS, inspection, Report())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("served")
    demo.make_policy(folder / "policy", seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install(folder / "site"))
        service = EnvironmentPeerService(
            EnvironmentSetup(environments=[ECHO], folder=str(folder / "policy"))
        )
    peer = LonePeer(service)
    engine = EngineService(InferenceSetup(environments=[ECHO]))
    trio.run(engine.load, Load(policy=ORDER.policy, folder=str(folder / "policy")))
    trio.run(generate, engine, peer, ORDER, folder / "file")
    yield Made(peer, engine, folder / "policy", read(folder / "file", LIMITS))


def test_the_file_proves_every_turn(made: Made) -> None:
    report = made.inspect(lambda turns: None)
    assert (report.failed, report.detail) == ("", "")
    counts = made.submission.rollouts.segment_counts()
    assert counts.max() == 6, "an episode with all three turns"
    assert [len(each) for each in made.submission.turns] != [0] * ORDER.rows()


def test_one_more_begins_while_all_episodes_wait_for_an_environment_peer(
    made: Made, tmp_path: Path
) -> None:
    """Its tokens, and those of the ones that waited, are the same as of each alone."""
    engine, orders = made.engine, [submission_order(ORDER, number=number) for number in range(3)]
    jobs: list[Generate] = []
    done: set[int] = set()
    held: list[tuple[SubmissionOrder, AskedTurn]] = []

    async def make(number: int, over: trio.CancelScope) -> None:
        await engine.generate(jobs[number])
        done.add(number)
        if len(done) == len(orders):
            over.cancel()

    async def hear() -> int:
        heard = await engine.turns()
        of_seed = {each.seed(): each for each in orders}
        held.extend((of_seed[each.seed], each) for each in heard.turns)
        return heard.stalled

    async def main() -> None:
        for order in orders:
            jobs.append(await job_of(made.peer, order, tmp_path / str(order.number)))
        async with trio.open_nursery() as nursery:
            over = nursery.cancel_scope
            for number in (0, 1):
                nursery.start_soon(make, number, over)
            while await hear() < 2:
                assert not done
            waiting = len(held)
            nursery.start_soon(make, 2, over)
            while await hear() < 3:
                assert not done
            assert {order.number for order, _ in held[waiting:]} == {2}
            while True:
                while held:
                    await answer(engine, made.peer, *held.pop())
                await hear()

    trio.run(main)
    for order in orders:
        trio.run(generate, engine, made.peer, order, tmp_path / "alone")
        together, alone = (read(tmp_path / name, LIMITS) for name in (str(order.number), "alone"))
        assert together.rollouts.tokens.tolist() == alone.rollouts.tokens.tolist()
        assert together.turns == alone.turns


def _forge(turns: list[list[bytes]]) -> None:
    stranger = LonePeer(service=None, identity=Identity(bytes([8]) * 32))  # type: ignore[arg-type]
    turns[0][0] = stranger.sign(ORDER, open_envelope(turns[0][0]).expect(Turn))


def _bend(turns: list[list[bytes]]) -> None:
    turns[0][0] = turns[0][0][:-1] + bytes([turns[0][0][-1] ^ 1])


def _swap_rows(turns: list[list[bytes]]) -> None:
    turns[1], turns[2] = turns[2], turns[1]


def _longest(turns: list[list[bytes]]) -> list[bytes]:
    return max(turns, key=len)


def _cut(turns: list[list[bytes]]) -> None:
    _longest(turns).pop()


FAULTS: dict[str, tuple[Callable[[list[list[bytes]]], None], str]] = {
    "forged by a stranger": (_forge, "no environment peer of it"),
    "bent": (_bend, "no valid signature"),
    "missing": (lambda turns: turns.__setitem__(slice(None), [[] for _ in turns]), "no signed pro"),
    "of another sample": (_swap_rows, "was signed as turn"),
    "reordered": (lambda turns: _longest(turns).reverse(), "was signed a"),
    "truncated": (_cut, "is missing"),
    "too many": (lambda turns: turns[1].append(turns[0][0]), "more signed turns than"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_turn_is_a_proven_fault(made: Made, fault: str) -> None:
    change, sentence = FAULTS[fault]
    report = made.inspect(change)
    assert (report.failed, report.proven_fault) == ("signed_turns", True)
    assert sentence in report.detail


@pytest.mark.parametrize("field", [{"number": 1}, {"step": 4}, {"worker": Identity(b"1" * 32)}])
def test_turns_cannot_be_replayed_in_another_submission(made: Made, field: dict) -> None:
    if "worker" in field:
        field = {"worker": field["worker"].peer_id}
    if "step" in field:
        field = {**field, "nonce": b"n" * 32}
    report = made.inspect(lambda turns: None, submission_order(ORDER, **field))
    assert report.failed == "signed_turns"
    assert "another submission" in report.detail


def test_another_environment_peer_takes_over(made: Made) -> None:
    """It plays the episode again from its tokens, and gives the same turn and grade."""
    other = EnvironmentPeerService(EnvironmentSetup(environments=[], folder=str(made.folder)))
    other._environments = made.peer.service._environments
    rollouts = made.submission.rollouts
    row = int(rollouts.segment_counts().argmax())
    segments = [list(each.tokens) for each in rollouts.rollout(row).segments]
    size = ORDER.sampling.group_size
    job = PlayTurn(order=ORDER, group=row // size, sample=row % size, segments=segments[:4])
    assert trio.run(other.play, job).tokens == segments[4]
    altered = [*segments[:2], [5, 5], *segments[3:4]]
    for written, sentence in (
        ([20, 64, 5], "outside the model's vocabulary"),
        ([20, 20], "end at its first stop token"),
        ([5, 5], "end at its first stop token"),
    ):
        impossible = [*segments[:3], written]
        with pytest.raises(ValueError, match=sentence):
            trio.run(other.play, msgspec.structs.replace(job, segments=impossible))
    assert trio.run(other.play, msgspec.structs.replace(job, segments=altered)).differs
    grade = GradeEpisode(order=ORDER, group=row // size, sample=row % size, segments=segments)
    graded = [trio.run(each.grade, grade) for each in (other, made.peer.service)]
    assert graded[0] == graded[1]
    with pytest.raises(ValueError, match="does not begin with the prompt"):
        wrong = [[1, 2], *segments[1:]]
        trio.run(
            other.grade,
            GradeEpisode(order=ORDER, group=row // size, sample=row % size, segments=wrong),
        )
