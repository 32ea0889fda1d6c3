"""The child process of an environment peer: draws, renders, plays and grades, one call at a time.

It holds the states of the last episodes, so that the next turn continues them. An episode that it
does not hold, for example another peer's, is played again from the tokens in the request."""

from collections.abc import Sequence
from pathlib import Path

from peers.environment.memory import States, is_out_of_memory
from peers.environments.collection import Environments, GroupTask
from peers.environments.episodes import EpisodeLimits, Replies, grade_segments
from peers.environments.interface import Grade, episodes_of
from peers.environments.probe import probe_hash
from peers.environments.prompt_room import ModelFacts, PromptRoom
from peers.environments.renderer import Renderer
from peers.sandbox import SandboxError
from peers.sandbox.launcher import start_launcher
from swarm.errors import UserError
from swarm.jobs import environment as jobs
from swarm.jobs.inference import Probe
from swarm.rollouts.rollout import Segment
from swarm.rollouts.rollouts import bounded
from swarm.wire.turns import EpisodeGrade, tokens_digest
from swarm.world.recent import Recent
from swarm.world.tasks import JobThread, in_job_thread

EPISODES_KEPT = 4096
"""Episodes whose state is kept between turns; others are played again."""

TASKS_KEPT = 1024
"""Tasks kept between the calls for a group's samples."""


class EnvironmentPeerService:
    """Implements `swarm.jobs.environment.EnvironmentService`."""

    reads_in_home = ("checkpoints",)
    before_keys_close = staticmethod(start_launcher)

    def __init__(self, setup: jobs.EnvironmentSetup) -> None:
        """Load the environments; raises `UserError` for one that is not installed here."""
        folder = Path(setup.folder)
        self._renderer = Renderer(folder)
        self._facts = ModelFacts.read(folder)
        self._environments = Environments()
        for reference in setup.environments:
            self._environments.of(reference)
        self._tasks: Recent[tuple[bytes, int], GroupTask] = Recent(TASKS_KEPT)
        self._going = States(EPISODES_KEPT)
        self._thread = JobThread()

    @in_job_thread
    def probe(self, job: Probe) -> bytes:
        return probe_hash(self._environments.of(job.environment), self._renderer)

    @in_job_thread
    def draw(self, job: jobs.DrawPrompt) -> jobs.Drawn:
        drawn = self._task(job)
        return jobs.Drawn(tokens=list(drawn.tokens), last=episodes_of(drawn.environment) is None)

    @in_job_thread
    def play(self, job: jobs.PlayTurn) -> jobs.Played:
        drawn = self._task(job)
        self._check_prompt(drawn, job.segments)
        self._check_tokens(job)
        try:
            return self._play(job, drawn)
        except (UserError, MemoryError) as error:
            if not is_out_of_memory(error) or not len(self._going):
                raise
            self._going.clear()  # others' states took the memory; this episode is played again
        return self._play(job, drawn)

    def _play(self, job: jobs.PlayTurn, drawn: GroupTask) -> jobs.Played:
        order, segments = job.order, _segments(job.segments)
        episode = (order.seed(), job.group, job.sample)
        replies = self._going.pop(order.worker, (*episode, _digest(job.segments[:-1])))
        if replies is None:
            limits = EpisodeLimits(
                order.sampling.stop_ids,
                order.sampling.max_new_tokens,
                self._facts.max_position_embeddings,
            )
            replies = Replies(drawn.environment, drawn.task, self._renderer, limits)
            for count in range(2, len(segments), 2):
                if replies.next(segments[:count]) != job.segments[count]:
                    return jobs.Played(tokens=[], differs=True)
        if answer := replies.next(segments):
            self._going.keep(order.worker, (*episode, _digest([*job.segments, answer])), replies)
        return jobs.Played(tokens=answer or [])

    @in_job_thread
    def grade(self, job: jobs.GradeEpisode) -> EpisodeGrade:
        drawn = self._task(job)
        self._check_prompt(drawn, job.segments)
        stops = job.order.sampling.stop_ids
        tokens = sum(map(len, job.segments[1::2]))
        grade, not_gradable = Grade(0.0), ""
        try:
            grade = grade_segments(
                drawn.environment, drawn.task, self._renderer, _segments(job.segments), stops
            )
        except SandboxError:
            raise  # another environment peer can grade it
        except UserError as error:
            not_gradable = str(error)
        return EpisodeGrade(
            reward=grade.reward,
            parts=bounded(grade.parts),
            penalty=drawn.task.length_penalty(tokens),
            has_target=bool(drawn.task.length_weight),
            not_gradable=not_gradable[:500],
        )

    def _task(self, job: jobs.EpisodeJob) -> GroupTask:
        order = job.order
        key = (order.seed(), job.group)
        room = PromptRoom.of_policy(
            self._renderer, self._facts.max_position_embeddings, order.sampling.max_new_tokens
        )
        return self._tasks.of(key, lambda: self._environments.task(order.environments, *key, room))

    def _check_prompt(self, drawn: GroupTask, segments: Sequence[Sequence[int]]) -> None:
        if list(segments[0]) != drawn.tokens:
            raise ValueError("the episode does not begin with the prompt of its group")

    def _check_tokens(self, job: jobs.PlayTurn) -> None:
        """Raise `ValueError` for tokens that no model can have written."""
        stops = set(job.order.sampling.stop_ids)
        for written in job.segments[1::2]:
            if max(written) >= self._facts.vocab_size:
                raise ValueError("the episode has a token id outside the model's vocabulary")
            if written[-1] not in stops or not stops.isdisjoint(written[:-1]):
                raise ValueError("a segment of the model must end at its first stop token")


_SERVICE: type[jobs.EnvironmentService] = EnvironmentPeerService


def _segments(tokens: Sequence[Sequence[int]]) -> list[Segment]:
    """Segments whose model segments end with a stop token."""
    return [
        Segment("prompt", each)
        if index == 0
        else Segment("model", each, "stop")
        if index % 2
        else Segment("environment", each)
        for index, each in enumerate(tokens)
    ]


def _digest(segments: Sequence[Sequence[int]]) -> bytes:
    return tokens_digest(token for segment in segments for token in segment)
