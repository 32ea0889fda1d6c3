"""Training, step by step: each new policy is handed over to be published, figures reported."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from peers.evaluation.during import Evaluations
from peers.trainer.accepted import AcceptedSubmissions
from peers.trainer.batches import Batches
from peers.trainer.child import accepted_submissions, training_terms
from peers.trainer.orders import Orders
from peers.trainer.pool import SPREAD_MIN, Accepted, environment_of
from peers.trainer.publishing import Publisher
from peers.trainer.saving import State
from peers.trainer.settings import TrainerSettings
from peers.trainer.store import Batch
from swarm.jobs.training import Figures, Follow, Record, ScoreAhead, TrainingService, TrainStep
from swarm.ledger.entries import Consumed, TrainingFigures
from swarm.rollouts.rollouts import mean_parts, parts_in
from swarm.run.manifest import manifest_in
from swarm.wire.envelope import Envelope
from swarm.wire.manifest import EnvironmentReference, RunManifest, labels
from swarm.wire.messages import Verdict

EnvironmentFigures = dict[str, dict[str, float]]
"""Figures by name, by the environment's label."""


@dataclass
class StepTimes:
    """Start times of a step's parts, in the world's seconds."""

    began: float
    training: float = 0.0
    """When its last batch was complete."""
    trained: float = 0.0
    handed_over: float = 0.0
    """When the next step could begin: the policy was copied, to be written and published."""


@dataclass(frozen=True)
class TrainedStep:
    """A batch and the child's results on it."""

    batch: list[Accepted]
    figures: Figures
    """The learner's metrics."""
    record: Batch
    """The batch's entries for the log."""
    environments: Sequence[Figures]
    """The child's of each environment, by index."""


class Training:
    """Takes the steps of the run, with what only they need."""

    def __init__(
        self,
        settings: TrainerSettings,
        accepted: AcceptedSubmissions,
        orders: Orders,
        publisher: Publisher,
        published: Callable[[], None],
    ) -> None:
        """`published` is called after each published step."""
        self._peer = peer = accepted.peer
        self._world, self._progress = peer.node.world, accepted.progress
        self._accepted = accepted
        self._publisher, self._published = publisher, published
        self._batches = Batches(accepted, orders, settings.starved_seconds)
        self.evaluations = Evaluations(peer, settings)
        self._followed: Envelope | None = None
        """The run manifest that the child follows."""

    async def live(self, nursery: trio.Nursery, life: Callable[[], Awaitable[None]]) -> None:
        """Await `life`, which takes steps with one child; policies are published in `nursery`."""
        self._background = Background(nursery)
        await self._background.run(life)

    async def idle(self) -> None:
        """Wait until the newest policy is published."""
        await self._background.idle()

    def follow(self, step: int) -> RunManifest:
        """The version of the run that the child is to begin with: that of a step."""
        self._followed = self._progress.versions.follow(step)
        return manifest_in(self._followed)

    async def apply_terms(self, child: TrainingService, step: int) -> None:
        """Have the child follow the version of the run that a step follows."""
        followed = self._progress.versions.follow(step)
        if followed is not self._followed:
            await child.follow(Follow(terms=training_terms(manifest_in(followed))))
            self._followed = followed

    async def take_step(self, child: TrainingService) -> Figures | None:
        """Turn the newest policy into the next; return its metrics; None: no further step."""
        if self._progress.over:
            return None
        step = self._progress.step
        await self.apply_terms(child, step)
        times = StepTimes(began=self._world.now())
        self._batches.begin_step()
        trained = await self._train(child, step, times)
        if trained is None:
            return None
        await self.hand_over(child, step, trained, times)
        return trained.figures

    async def _train(
        self, child: TrainingService, step: int, times: StepTimes
    ) -> TrainedStep | None:
        """Train on the next batch that the child can read; None if no further batch comes."""
        if not self._progress.paused:
            self._peer.status.doing = f"waiting for rollouts of step {step}"
        versions, disk = self._progress.versions, self._peer.node.disk

        async def score(some: list[Accepted]) -> None:
            await child.score(ScoreAhead(submissions=accepted_submissions(some, versions, disk)))

        while (batch := await self._batches.next(score)) is not None:
            self._peer.status.doing = f"training step {step}"
            times.training = self._world.now()
            values = self._accepted.state_values.of(batch)
            given = accepted_submissions(batch, versions, disk)
            result = await child.train(TrainStep(step=step, submissions=given, values=values))
            if not result.unreadable:
                break
            await self._accepted.leave_out({each.index: each.reason for each in result.unreadable})
        else:
            return None
        times.trained = self._world.now()
        for problem in result.problems:
            self._peer.node.events.emit("trainer.formula_failed", step=step, reason=problem)
        self._accepted.log.filtered(batch)
        consumed = [
            Consumed(step=step, submission=accepted.digest, outcomes=[*outcomes])
            for accepted, outcomes in zip(batch, result.outcomes, strict=True)
        ]
        record = Batch(consumed, result.figures["reward"], values)
        return TrainedStep(batch, result.figures, record, result.environments)

    async def hand_over(
        self, child: TrainingService, step: int, trained: TrainedStep, times: StepTimes
    ) -> None:
        """Copy the new policy, and have it written and published beside the next step."""
        publisher, progress = self._publisher, self._progress
        await self._accepted.store.keep_batch(progress.lineage, step, trained.record)
        self._accepted.trained(step)
        progress.advance(step + 1)
        await self._background.idle()
        state = State(progress.lineage, step + 1) if publisher.states.due(step + 1) else None
        await publisher.begin_save(child, step + 1, state)
        times.handed_over = self._world.now()
        figures = self._figures(step, trained, times)
        references = progress.versions.manifest_of(step).environments
        environments = environment_figures(trained.batch, trained.environments, references)

        async def publish() -> None:
            """Wait until the policy is durable, then log the step and publish it."""
            await publisher.finish_save(child, step + 1, state)
            await publisher.publish(
                child,
                step + 1,
                reward=trained.record.reward,
                figures=logged_figures(figures, environments),
                consumed=trained.record.consumed,
            )
            self._published()
            figures["publish_seconds"] = self._world.now() - times.handed_over
            evaluated = self.evaluations.take()
            if evaluated is not None:
                policy = evaluated.reference.step
                figures.update(evaluation=evaluated.reward, evaluation_policy=policy)
                for found in evaluated.environments:
                    environments.setdefault(found.label, {})["evaluation"] = found.reward
            digests = [each.digest for each in trained.batch]
            told = {**figures, "environments": environments, "step": step}
            self._peer.node.events.emit("trainer.trained_on", step=step, submissions=digests)
            self._peer.node.events.emit("trainer.step_trained", **told)
            await child.record(Record(step=step, figures=figures, environments=environments))
            if state is not None:
                await self._accepted.saved(state.step)

        self._background.start(publish)

    def _figures(self, step: int, trained: TrainedStep, times: StepTimes) -> Figures:
        """The learner's metrics, those of the step's time, and of the groups left out."""
        idle = self._batches.idle
        batch, values = trained.batch, trained.record.values
        left_out = sorted(self._accepted.log.left_out.items())
        return {
            **trained.figures,
            "submissions": len(batch),
            "seconds": times.handed_over - times.training,
            "ahead_seconds": self._batches.ahead,
            "idle_seconds": sum(idle.values()),
            **{f"idle_{cause}_seconds": waited for cause, waited in idle.items()},
            "idle_weights_seconds": times.handed_over - times.trained,
            "step_seconds": times.handed_over - times.began,
            "keep_rate": self._accepted.forecast.keep_rate.value,
            **{f"left_out_{reason}": groups for reason, groups in left_out},
            "staleness": step - min(accepted.verdict.policy for accepted in batch),
            **({"states_valued": sum(map(len, values))} if values else {}),
        }


class Background:
    """Runs one piece of work at a time in a nursery, beside a loop that may go on meanwhile."""

    def __init__(self, nursery: trio.Nursery) -> None:
        """`nursery` must outlive `run`."""
        self._nursery = nursery
        self._loop = trio.CancelScope()
        self._ended = trio.Event()
        self._ended.set()
        self._error: Exception | None = None

    async def run(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Await `loop`, then the work that it has started. Raises what either raises."""
        with self._loop:
            try:
                await loop()
            finally:
                await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def idle(self) -> None:
        """Wait until no work is running."""
        await self._ended.wait()

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start a piece of work. None may be running."""
        assert self._ended.is_set()
        self._ended = trio.Event()
        self._nursery.start_soon(self._attempt, work)

    async def _attempt(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            self._error = error
            self._loop.cancel()
        finally:
            self._ended.set()


OF_EACH = ["reward", "completion_length", "entropy", "kl_generation", "repetition", "truncated"]
"""The figures in `TrainingFigures.of_each`, by the learner's names."""


def logged_figures(figures: Figures, of_each: EnvironmentFigures | None = None) -> TrainingFigures:
    """The figures of a step that its trainer logs, by the learner's names; only finite ones."""
    clipped = [value for name, value in figures.items() if name.startswith("clipped_")]
    found = {
        **{name: figures.get(name) for name in ("reward", "entropy", "gradient_norm", "loss")},
        "length": figures.get("completion_length"),
        "kl": figures.get("kl_generation"),
        "kl_reference": figures.get("kl_reference"),
        "clipped": sum(clipped) if clipped else None,
        "learning_rate": figures.get("learning_rate"),
        "seconds": figures.get("step_seconds"),
        "repetition": figures.get("repetition"),
        "truncated": figures.get("truncated"),
    }
    several = of_each.values() if of_each and len(of_each) > 1 else ()
    return TrainingFigures(
        **{
            name: float(value)
            for name, value in found.items()
            if value is not None and math.isfinite(value)
        },
        of_each=[[each.get(name) for name in OF_EACH] for each in several],
    )


def environment_figures(
    batch: Sequence[Accepted],
    computed: Sequence[Figures],
    environments: Sequence[EnvironmentReference],
) -> EnvironmentFigures:
    """Figures of each environment in order, empty for those without groups; groups left out count,
    too, those that continue states excepted.

    `computed`: the child's figures of each environment, or nothing. pass_at_1 is the share of right
    completions and pass_at_g that of groups with a right one, where a completion is right if its
    task reward is 1; both are of graded groups, as the reward is. With a length penalty a verdict
    has only mean and spread of a group's task rewards: these figures then are exact for rewards of
    0 and 1. part_NAME is the mean of a part of the rewards."""
    gathered: list[list[tuple[Accepted, int]]] = [[] for _ in environments]
    for accepted in batch:
        for group in range(len(accepted.verdict.rewards)):
            if not accepted.verdict.continues(group):  # else it begins within a rollout
                gathered[environment_of(accepted.verdict, group)].append((accepted, group))
    known: list[Figures] = [*computed, *[{} for _ in environments]]
    found = [
        _figures(own) | more if own else {} for own, more in zip(gathered, known, strict=False)
    ]
    return dict(zip(labels(environments), found, strict=True))


def _figures(groups: Sequence[tuple[Accepted, int]]) -> dict[str, float]:
    count = len(groups)
    labels = [accepted.labels[group] for accepted, group in groups]
    found = {
        "groups": float(count),
        "keep_rate": labels.count("kept") / count,
        "quarantine_rate": labels.count("quarantined") / count,
    }
    graded = [
        (accepted.verdict, group)
        for (accepted, group), label in zip(groups, labels, strict=True)
        if label != "quarantined"
    ]
    return {**found, **_reward_figures(graded)} if graded else found


def _reward_figures(groups: Sequence[tuple[Verdict, int]]) -> dict[str, float]:
    rewards = [verdict.rewards[group] for verdict, group in groups]
    shares = [_right(verdict, group) for verdict, group in groups]
    parts = mean_parts(
        each
        for verdict, group in groups
        for each in parts_in(verdict.parts, verdict.rewards, group)
    )
    return {
        "reward": sum(map(sum, rewards)) / sum(map(len, rewards)),
        "pass_at_1": sum(share for share, _ in shares) / len(groups),
        "pass_at_g": sum(any_right for _, any_right in shares) / len(groups),
        **{f"part_{name}": mean for name, mean in parts.items()},
    }


def _right(verdict: Verdict, group: int) -> tuple[float, bool]:
    """(share of right completions, whether there is any)."""
    if verdict.task_means:
        mean, spread = verdict.task_means[group], verdict.task_spreads[group]
        return mean, max(mean, spread) >= 1 - SPREAD_MIN
    right = [reward >= 1 - SPREAD_MIN for reward in verdict.rewards[group]]
    return sum(right) / len(right), any(right)
