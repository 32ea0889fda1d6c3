"""Evaluations during a run: a child of its own plays held-out tasks with new policies.

Nothing waits for an evaluation: a policy that comes meanwhile is left to the next, and a child that
dies or fails is a sentence in the log. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from peers.evaluation import run
from peers.evaluation.report import estimate
from peers.evaluation.settings import EvaluationSettings
from swarm.errors import UserError, leaf_errors
from swarm.jobs import Hardware
from swarm.jobs.evaluation import EVALUATION_START_SECONDS, EvaluationSetup, Sample
from swarm.node.run_node import RunNode
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.manifest import EnvironmentReference, RunManifest, labels
from swarm.wire.messages import Checkpoint, CheckpointReference, EnvironmentEvaluation, Evaluation
from swarm.world.observable import Observable

NICENESS = 19
"""Priority of the child: it takes only the processor time that nobody else wants."""


class Evaluations:
    """Evaluates the newest policy each time that `evaluate_steps` further steps are done and no
    other peer has evaluated one of them."""

    def __init__(self, peer: RunNode, settings: EvaluationSettings) -> None:
        self._peer, self._settings = peer, settings
        self._evaluated: CheckpointReference | None = None
        """The newest policy that this peer tried to evaluate, or another one has evaluated."""
        self._heard = Observable(0)
        self._new: Evaluation | None = None
        peer.gossip.listen(Checkpoint, lambda _: self._heard.touch())
        peer.gossip.listen(Evaluation, self._hear)

    def take(self) -> Evaluation | None:
        """The newest result of any peer, once."""
        found, self._new = self._new, None
        return found

    async def run(self) -> None:
        while self._settings.evaluate_steps:
            newest = self._peer.newest_checkpoint()
            if newest is None or not self._is_due(newest.reference):
                await self._heard.wait_change()
                continue
            self._evaluated = newest.reference
            # It may be the oldest that is kept, and the child reads it as long as it evaluates.
            with self._peer.store.pinned(newest.reference):
                await self._evaluate_and_tell(newest.reference)

    def _hear(self, envelope: Envelope) -> None:
        found = envelope.expect(Evaluation)
        if found.state != "done":
            return  # of an older build
        self._new = found
        if self._evaluated is None or self._place(found.reference) > self._place(self._evaluated):
            self._evaluated = found.reference
        self._heard.touch()

    def _is_due(self, reference: CheckpointReference) -> bool:
        """Whether `evaluate_steps` further steps are done since the last evaluation of any peer."""
        done = self._evaluated
        return done is None or self._interval(reference) > self._interval(done)

    def _place(self, reference: CheckpointReference) -> tuple[int, int]:
        return reference.lineage, reference.step

    def _interval(self, reference: CheckpointReference) -> tuple[int, int]:
        return reference.lineage, reference.step // self._settings.evaluate_steps

    async def _evaluate_and_tell(self, reference: CheckpointReference) -> None:
        events = self._peer.node.events
        try:
            folder = await self._peer.policies.get(reference)
            found = await self._evaluate(reference, self._peer.node.disk.local_path(folder))
        except Exception as error:  # of an environment, an engine, a machine: the run goes on
            reason = "; ".join(str(leaf) or type(leaf).__name__ for leaf in leaf_errors(error))
            events.emit("evaluation.failed", policy=reference.step, reason=reason)
            return
        await self._peer.announce(found, STATE_LIFETIME_SECONDS)
        events.emit(
            "evaluation.done",
            policy=reference.step,
            reward=found.reward,
            environments={
                each.label: {
                    "reward": each.reward,
                    "low": each.low,
                    "high": each.high,
                    "completion_length": each.tokens,
                }
                for each in found.environments
            },
        )

    def _manifest(self) -> RunManifest:
        order = self._peer.step_order()
        followed = self._peer.run.manifest_of(order) if order is not None else None
        return followed or self._peer.run.manifest

    async def _evaluate(self, reference: CheckpointReference, folder: Path) -> Evaluation:
        manifest, settings = self._manifest(), self._settings
        named = zip(labels(manifest.environments), manifest.environments, strict=True)
        weighted = [(label, each) for label, each in named if each.weight]
        environments = [each for _, each in weighted]
        wanted = run.Evaluation(
            environments=environments,
            split="held_out",
            tasks=settings.evaluate_tasks,
            samples=1,
            temperature=manifest.sampling.temperature,
            max_new_tokens=manifest.sampling.max_new_tokens,
            stop_ids=manifest.sampling.stop_ids,
        )
        setup = EvaluationSetup(
            folder=str(folder),
            environments=environments,
            hardware=Hardware(device=settings.evaluate_device, dtype=settings.dtype),
            niceness=NICENESS,
        )
        async with self._peer.node.compute.child(
            run.SERVICE,
            setup,
            name="evaluation",
            interpreter=settings.interpreter or None,
            start_deadline_seconds=EVALUATION_START_SECONDS,
        ) as child:
            samples = await run.play_all(child, wanted, await run.draw(child, wanted))
        return _evaluation(reference, weighted, samples)


def _evaluation(
    reference: CheckpointReference,
    weighted: Sequence[tuple[str, EnvironmentReference]],
    samples: Sequence[Sequence[Sample]],
) -> Evaluation:
    total = sum(each.weight for _, each in weighted)
    reward, found = 0.0, []
    for (label, each), played in zip(weighted, samples, strict=True):
        of = [sample for sample in played if not sample.problem]
        if not of:
            raise UserError(f"no held-out task of {label} can be graded: {played[0].problem}")
        figure = estimate([sample.reward for sample in of])
        reward += each.weight / total * figure.value
        found.append(
            EnvironmentEvaluation(
                label=label,
                reward=figure.value,
                low=figure.low,
                high=figure.high,
                tokens=sum(sample.tokens for sample in of) / len(of),
            )
        )
    return Evaluation(
        reference=reference,
        state="done",
        tasks=sum(map(len, samples)),
        reward=reward,
        environments=found,
    )
