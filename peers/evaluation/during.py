"""Evaluations during a run: a child of its own plays held-out tasks with new policies.

Trainers and validators may do this. Each announces what it begins, and its result, so that no two
evaluate the same policy. Nothing waits for an evaluation: a policy that comes while one runs is
left to the next, and a child that dies or fails is a sentence in the log. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio

from peers.environments.collection import labels
from peers.evaluation import run
from peers.evaluation.report import estimate
from peers.evaluation.settings import EvaluationSettings
from swarm.errors import leaf_errors
from swarm.jobs import Hardware
from swarm.jobs.evaluation import EVALUATION_START_SECONDS, EvaluationSetup, Sample
from swarm.node.run_node import RunNode
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.manifest import EnvironmentReference, RunManifest
from swarm.wire.messages import Checkpoint, CheckpointReference, EnvironmentEvaluation, Evaluation
from swarm.world.observable import Observable

NICENESS = 19
"""Priority of the child: it takes only the processor time that nobody else wants."""

CLAIM_SECONDS = 120.0
"""Time for which the announcement that an evaluation has begun counts. After the death of its peer
another one may evaluate."""


class Evaluations:
    """Evaluates the newest policy each time `evaluate_steps` further steps are done.

    Another peer's evaluation of a policy of these steps counts, too.
    """

    def __init__(self, peer: RunNode, settings: EvaluationSettings) -> None:
        self._peer, self._settings = peer, settings
        self._tried: tuple[int, int] = (-1, -1)
        """(lineage, number of whole intervals done) at this peer's last evaluation."""
        self._others: dict[PeerId, Envelope] = {}
        """The newest `Evaluation` of each other peer."""
        self._heard = Observable(0)
        self._new: Evaluation | None = None
        peer.gossip.listen(Checkpoint, lambda _: self._heard.touch())
        peer.gossip.listen(Evaluation, self._hear)

    def take(self) -> Evaluation | None:
        """The newest result of any peer, once."""
        found, self._new = self._new, None
        return found

    async def run(self) -> None:
        """Evaluate policies until cancelled."""
        while self._settings.evaluate_steps:
            newest = self._peer.newest_checkpoint()
            if newest is None or not self._is_due(newest.reference):
                await self._heard.wait_change()
            else:
                await self._attempt(newest.reference)

    # --- which peer evaluates ----------------------------------------------------------------

    def _hear(self, envelope: Envelope) -> None:
        found = envelope.expect(Evaluation)
        if found.state == "done":
            self._new = found
        if envelope.sender != self._peer.peer_id:
            self._others[PeerId(envelope.sender)] = envelope
        self._heard.touch()

    def _interval(self, reference: CheckpointReference) -> tuple[int, int]:
        return reference.lineage, reference.step // self._settings.evaluate_steps

    def _is_due(self, reference: CheckpointReference) -> bool:
        interval = self._interval(reference)
        return interval > self._tried and not any(
            self._covers(envelope, interval) for envelope in self._others.values()
        )

    def _covers(self, envelope: Envelope, interval: tuple[int, int]) -> bool:
        """Whether another peer has evaluated a policy of this interval, or evaluates one."""
        found = envelope.expect(Evaluation)
        if found.state == "failed" or self._interval(found.reference) < interval:
            return False
        if found.state == "done":
            return True
        wall_ms = self._peer.node.world.wall_time() * 1000
        return envelope.body.expires_ms > wall_ms and not self._gave_way(envelope)

    def _gave_way(self, claim: Envelope) -> bool:
        """Whether a peer that had begun has stopped since, as one of a lesser id had begun, too."""
        interval = self._interval(claim.expect(Evaluation).reference)
        return any(
            other.sender < claim.sender
            and other.body.issued_ms >= claim.body.issued_ms
            and self._interval(other.expect(Evaluation).reference) == interval
            for other in self._others.values()
        )

    async def _wait_preceded(self, interval: tuple[int, int]) -> None:
        """Wait until another peer has the result, or has begun and has the lesser id."""
        while not any(
            self._covers(envelope, interval)
            and (sender < self._peer.peer_id or envelope.expect(Evaluation).state == "done")
            for sender, envelope in self._others.items()
        ):
            await self._heard.wait_change()

    # --- evaluating --------------------------------------------------------------------------

    async def _attempt(self, reference: CheckpointReference) -> None:
        """Evaluate a policy unless another peer begins to.

        It stays on this disk until then: it may be the oldest that is kept, and the child reads it
        for as long as the run takes several steps. One policy at a time is kept for this.
        """
        interval = self._interval(reference)
        before, self._tried = self._tried, interval
        with self._peer.store.pinned(reference):
            ended = await self._evaluate_unless_preceded(reference, interval)
        if not ended:
            self._tried = before

    async def _evaluate_unless_preceded(
        self, reference: CheckpointReference, interval: tuple[int, int]
    ) -> bool:
        """Return whether the evaluation ended, and not because another peer precedes this one."""
        ended = False
        async with trio.open_nursery() as nursery:

            async def evaluate() -> None:
                nonlocal ended
                await self._evaluate_and_tell(reference)
                ended = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(evaluate)
            await self._wait_preceded(interval)
            nursery.cancel_scope.cancel()
        return ended

    async def _evaluate_and_tell(self, reference: CheckpointReference) -> None:
        events = self._peer.node.events
        try:
            folder = await self._peer.policies.get(reference)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._claim, reference)
                found = await self._evaluate(reference, self._peer.node.disk.local_path(folder))
                nursery.cancel_scope.cancel()
        except Exception as error:  # of an environment, an engine, a machine: the run goes on
            reason = "; ".join(str(leaf) or type(leaf).__name__ for leaf in leaf_errors(error))
            events.emit("evaluation.failed", policy=reference.step, reason=reason)
            found = Evaluation(reference=reference, state="failed")
        await self._peer.announce(found, STATE_LIFETIME_SECONDS)
        if found.state == "done":
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

    async def _claim(self, reference: CheckpointReference) -> None:
        while True:
            await self._peer.announce(Evaluation(reference=reference, state="begun"), CLAIM_SECONDS)
            await trio.sleep(CLAIM_SECONDS / 2)

    def _manifest(self) -> RunManifest:
        """The run's version in force."""
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
            step=reference.step,
        )
        setup = EvaluationSetup(
            folder=str(folder),
            environments=environments,
            hardware=Hardware(device=settings.evaluate_device, dtype=settings.dtype),
            niceness=NICENESS,
        )
        samples: list[list[Sample]] = []
        async with self._peer.node.compute.child(
            run.SERVICE,
            setup,
            name="evaluation",
            interpreter=settings.interpreter or None,
            start_deadline_seconds=EVALUATION_START_SECONDS,
        ) as child:
            drawn = await run.draw(child, wanted)
            for index, tasks in enumerate(drawn.tasks):
                rows = run.play_rows(child, wanted, drawn, index, range(tasks))
                samples.append([sample async for sample in rows])
        return _evaluation(reference, weighted, samples)


def _evaluation(
    reference: CheckpointReference,
    weighted: Sequence[tuple[str, EnvironmentReference]],
    samples: Sequence[Sequence[Sample]],
) -> Evaluation:
    total = sum(each.weight for _, each in weighted)
    reward, found = 0.0, []
    for (label, each), of in zip(weighted, samples, strict=True):
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
