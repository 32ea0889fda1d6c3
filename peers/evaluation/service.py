"""The child of `swarm eval`, and of evaluations during training: plays tasks and grades them."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from peers.engines.device import use_hardware
from peers.engines.engine import Engine
from peers.engines.episodes import Player, Playing, SpanStates
from peers.engines.registry import check_engine, make_engine
from peers.environments import Environment, Grade, NotGradable, Renderer, Task, grade
from peers.environments.episodes import transcript_of
from peers.environments.interface import Prompt, messages_of
from peers.environments.prompt_room import PromptRoom, shorter_answers
from peers.environments.registry import load_named
from peers.environments.renderer import stop_ids_of
from peers.environments.row_check import first_rows
from peers.evaluation.tasks import checkpoint_hash, different_tasks, evaluation_seed
from peers.sandbox.launcher import start_launcher
from swarm.jobs.evaluation import (
    DrawTasks,
    EvaluationSetup,
    NextSamples,
    PlayTasks,
    PromptMessage,
    Sample,
    TasksDrawn,
)
from swarm.rollouts.rollout import Rollout
from swarm.rollouts.seeds import noise_key
from swarm.world.progress import checkpoint
from swarm.world.tasks import JobThread, in_job_thread

BATCH = 128
"""Episodes of a set; two sets share the engine, so that it is full while the first one ends."""

NEW_TOKENS = 512
"""Length limit of a sample where neither the command nor the run names one."""


class EvaluationService:
    """Implements `swarm.jobs.evaluation.EvaluationService`."""

    reads_in_home = ("checkpoints",)
    before_keys_close = staticmethod(start_launcher)

    def __init__(self, setup: EvaluationSetup) -> None:
        os.nice(setup.niceness)
        check_engine(setup.engine)
        use_hardware(setup.hardware)
        self._setup = setup
        self._folder = Path(setup.folder)
        self._environments = [load_named(each, setup.allowed) for each in setup.environments]
        self._renderer = Renderer(self._folder)
        self._tasks: list[list[Task]] = []
        """By environment."""
        self._engine: Engine | None = None
        self._thread = JobThread()

    @in_job_thread
    def draw(self, job: DrawTasks) -> TasksDrawn:
        found = checkpoint_hash(self._folder)
        stop_ids = job.stop_ids or stop_ids_of(self._folder)
        self._engine = make_engine(self._setup.engine, self._folder, self._setup.hardware)
        self._key = noise_key(evaluation_seed(job.split, job.seed))
        positions, wanted = self._engine.capabilities.length_max, max(1, job.max_new_tokens)
        room = PromptRoom.of_policy(self._renderer, positions, wanted)
        with shorter_answers():
            self._tasks = [
                [
                    task
                    for _, task in different_tasks(each, job.split, job.seed, job.tasks, room=room)
                ]
                for each in self._environments
            ]
        return TasksDrawn(
            checkpoint=found,
            rows=[first_rows(each, room) for each in self._environments],
            engine=self._engine.capabilities.engine_class,
            tasks=[len(tasks) for tasks in self._tasks],
            max_new_tokens=self._new_tokens(job.max_new_tokens),
            stop_ids=stop_ids,
        )

    def _new_tokens(self, wanted: int) -> int:
        """The length limit of a sample; without one, what the longest prompt leaves."""
        assert self._engine is not None
        longest = max(
            len(self._renderer.encode_prompt(task.prompt))
            for tasks in self._tasks
            for task in tasks
        )
        return wanted or min(NEW_TOKENS, self._engine.capabilities.length_max - longest)

    @in_job_thread
    def play(self, job: PlayTasks) -> None:
        self._playing = self._samples(job)

    @in_job_thread
    def finished(self, job: NextSamples) -> list[Sample]:
        return next(self._playing, [])

    def _samples(self, job: PlayTasks) -> Iterator[list[Sample]]:
        """The samples of a job as they are finished. Raises the error of an environment or of the
        engine, which then holds no request."""
        if self._engine is None:
            raise ValueError("call draw first")
        player = Player(self._engine, sets_at_once=2)
        waiting, done = deque(job.rows), deque[Sample]()
        sets: list[Playing] = []
        try:
            while waiting or sets:
                checkpoint()
                while waiting and len(sets) < 2:
                    rows = [waiting.popleft() for _ in range(min(BATCH, len(waiting)))]
                    sets.append(self._set_of(job, rows, done))
                    player.add(sets[-1])
                player.step()
                for each in sets:
                    if each.error is not None:
                        raise each.error
                sets = [each for each in sets if not each.is_over]
                if done:
                    yield list(done)
                    done.clear()
        finally:
            for each in sets:
                player.remove(each)

    def _set_of(self, job: PlayTasks, rows: Sequence[int], done: deque[Sample]) -> Playing:
        """Some rows as a set of episodes; each is graded as it ends, and added to `done`."""
        environment = self._environments[job.environment]
        tasks = self._tasks[job.environment]
        samples = job.sampling.group_size

        def end(row: int, rollout: Rollout, states: Sequence[SpanStates]) -> None:
            for each in states:
                each.parts.clear()  # no proof needs them, and they would fill the memory
            done.append(self._graded(job, environment, tasks[row // samples], row, rollout))

        return Playing(
            self._renderer,
            [(environment, tasks[row // samples]) for row in rows],
            rows,
            None if job.greedy else self._key,
            job.sampling,
            end,
        )

    def _graded(
        self, job: PlayTasks, environment: Environment, task: Task, row: int, rollout: Rollout
    ) -> Sample:
        segments = rollout.segments
        transcript = transcript_of(self._renderer, segments, job.sampling.stop_ids)
        problem = ""
        try:
            found = grade(environment, task, transcript)
        except NotGradable as error:
            found, problem = Grade(0.0), str(error)
        prompt, _ = self._renderer.decode_completion(segments[0].tokens, ())
        return Sample(
            environment=job.environment,
            row=row,
            reward=found.reward,
            parts=dict(found.parts),
            finished=transcript.finished,
            tokens=sum(len(each.tokens) for each in segments if each.kind == "model"),
            turns=[prompt, *(turn.text for turn in transcript.turns)],
            prompt=_unrendered(task.prompt),
            problem=problem,
        )


def _unrendered(prompt: Prompt) -> list[PromptMessage]:
    if isinstance(prompt, str):
        return [PromptMessage("", prompt)]
    return [PromptMessage(each.role, each.content) for each in messages_of(prompt)]
