"""Cost model of an environment peer's children, and the episodes of served environments."""

from collections.abc import Iterable, Sequence

import trio
from blake3 import blake3

from peers.sandbox import SandboxError
from simnet.compute.rollouts import SimulatedRollouts, rollouts, true_rewards, ungradable_groups
from simnet.compute.setting import PROBE_HASH, Setting
from swarm.jobs import SubmissionOrder, environment, inference
from swarm.rollouts.rollout import Segment
from swarm.rollouts.signed_turns import check_turns, open_turn
from swarm.wire.envelope import open_envelope
from swarm.wire.turns import EpisodeGrade, Turn, unpack

VOCABULARY = 150_000


class EnvironmentModel:
    """Cost model of `peers.environment.service.EnvironmentPeerService`."""

    def __init__(self, setting: Setting, setup: environment.EnvironmentSetup) -> None:
        self._setting = setting

    async def probe(self, job: inference.Probe) -> bytes:
        return PROBE_HASH

    async def draw(self, job: environment.DrawPrompt) -> environment.Drawn:
        await self._work()
        if self._setting.fabricated(job.order) == "a failure":
            raise ValueError("no such task")
        workload = self._setting.workload
        tokens = tokens_of(workload.prompt_tokens, job.order.seed(), "prompt", job.group)
        return environment.Drawn(tokens=tokens, last=workload.turns == 0)

    async def play(self, job: environment.PlayTurn) -> environment.Played:
        await self._work()
        if self._setting.fabricated(job.order) == "no sandbox":
            raise SandboxError("no memory")
        self._setting.tell("turn_played", worker=job.order.worker)
        workload, turn = self._setting.workload, len(job.segments) // 2
        if turn > workload.turns:
            return environment.Played(tokens=[])
        key = (job.group, job.sample, turn, *([trio.current_time()] if workload.is_random else []))
        return environment.Played(
            tokens=tokens_of(workload.observation_tokens, job.order.seed(), "turn", *key)
        )

    async def grade(self, job: environment.GradeEpisode) -> EpisodeGrade:
        await trio.sleep(self._setting.hardware.grade_seconds)
        made = rollouts(self._setting, job.order)
        if job.group in ungradable_groups(self._setting.workload, made):
            return EpisodeGrade(reward=0.0, not_gradable="nobody can know it")
        return EpisodeGrade(
            reward=true_rewards(self._setting.workload, made)[job.group][job.sample]
        )

    async def _work(self) -> None:
        await trio.sleep(self._setting.hardware.environment_seconds)


def tokens_of(count: int, seed: bytes, *what: object) -> list[int]:
    """Token ids that follow from a seed."""
    raw = blake3(seed + repr(what).encode()).digest(length=3 * max(1, count))
    return [int.from_bytes(raw[at : at + 3], "big") % VOCABULARY for at in range(0, len(raw), 3)]


def model_segments(length: int, turns: int, seed: bytes, row: int) -> list[list[int]]:
    """The model's segments of an episode: its tokens, divided evenly among its turns."""
    ends = [length * (turn + 1) // (turns + 1) for turn in range(turns + 1)]
    starts = [0, *ends[:-1]]
    return [
        tokens_of(end - start, seed, "model", row, index)
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def served_episodes(
    order: SubmissionOrder, made: SimulatedRollouts, turns: int, peers: Sequence[str]
) -> Iterable[tuple[int, int, list[list[int]]]]:
    """(group, sample, segments) of a file's served episodes, with their turns checked as the
    inspector does; raises `BadTurn`."""
    size = order.sampling.group_size
    for group in order.served_groups():
        signed = made.turns[group * size][0]
        prompt = open_turn(
            signed,
            run=order.run,
            peers=peers,
            seed=order.seed(),
            group=group,
            sample=0,
            index=0,
            before=(),
        )
        for sample, length in enumerate(made.lengths[group]):
            row = group * size + sample
            own = made.turns[row][1:] if sample == 0 else made.turns[row]
            given = [unpack(open_envelope(raw).expect(Turn).tokens) for raw in own]
            segments = [Segment("prompt", unpack(prompt.tokens))]
            for index, model in enumerate(model_segments(length, turns, made.seed, row)):
                segments.append(Segment("model", model, "stop"))
                if index < len(given) and given[index]:
                    segments.append(Segment("environment", given[index]))
            check_turns(
                prompt,
                own,
                segments,
                run=order.run,
                peers=peers,
                sample=sample,
                max_new_tokens=order.sampling.max_new_tokens,
            )
            yield group, sample, [list(segment.tokens) for segment in segments]
