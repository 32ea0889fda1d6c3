"""A submission's way through worker, validator and trainer, without a network between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio
from blake3 import blake3

from peers.demo.recipes import THRESHOLDS
from peers.engines.service import EngineService
from peers.trainer.service import TrainerService
from peers.validator.cases import Outcome
from peers.validator.inspector import InspectorService
from peers.validator.prefill import PrefillService
from swarm.jobs import Load, SubmissionOrder
from swarm.jobs.inference import Generate, InferenceSetup
from swarm.jobs.training import AcceptedSubmission, Export, StartTraining, TrainingTerms, TrainStep
from swarm.jobs.validation import Inspect, InspectionSetup, Judge, PrefillSetup
from swarm.rollouts.rollouts import Rollouts
from swarm.wire.identity import Identity
from swarm.wire.manifest import EnvironmentReference, Sampling
from swarm.wire.messages import CheckpointReference
from tests.background import Ask, in_background, inspect_whole


@dataclass
class Pipeline:
    """The work of worker, validator and trainer on one submission, in turn."""

    folder: Path
    engine: EngineService
    inspector: InspectorService
    prefill: PrefillService
    trainer: TrainerService
    ask: Ask
    """Awaits a method of the inspector."""
    environment: EnvironmentReference
    sampling: Sampling
    learned_steps: int = 0
    """Steps with a group whose rewards differ."""
    trained: Mapping[str, float] = field(default_factory=dict)
    """Figures of the last step."""

    def take_step(self, step: int) -> tuple[float, float, Rollouts]:
        """Generate a step's rollouts: (mean reward, share of episodes with two turns, rollouts)."""
        policy = CheckpointReference(lineage=0, step=step, digest=bytes(32), size_bytes=1)
        published = str(self.folder / str(step))
        trio.run(self.engine.load, Load(policy=policy, folder=published))
        trio.run(self.prefill.load, Load(policy=policy, folder=published))
        order = SubmissionOrder(
            run="owner/run",
            policy=policy,
            step=step,
            nonce=blake3(b"step %d" % step).digest(),
            worker=Identity(bytes(32)).peer_id,
            number=0,
            groups=self.sampling.groups_per_submission,
            environments=[self.environment],
            sampling=self.sampling,
        )
        file, canonical = self.folder / "file", self.folder / "canonical"
        made = trio.run(self.engine.generate, Generate(order=order, path=str(file)))
        inspected = inspect_whole(
            self.ask,
            self.inspector,
            Inspect(
                order=order,
                path=str(file),
                digest=made.digest,
                canonical_path=str(canonical),
                tokenizer_folder=published,
                bytes_max=1 << 24,
            ),
        )
        assert inspected.failed == "", inspected.detail
        judged = trio.run(
            self.prefill.judge,
            Judge(
                order=order,
                path=str(canonical),
                digest=inspected.canonical_digest,
                thresholds=THRESHOLDS,
                rewards=[],
            ),
        )
        assert judged.failed == "", judged.detail
        assert (judged.sampling.tokens, judged.sampling.mismatches) == (made.tokens, 0)
        self._train(step, inspected, made.digest, canonical)
        rollouts = Rollouts.from_bytes(canonical.read_bytes())
        rewards = [reward for group in inspected.rewards for reward in group]
        two_turns = (rollouts.segment_counts() == 4).mean()
        return sum(rewards) / len(rewards), float(two_turns), rollouts

    def _train(self, step: int, inspected: Outcome, digest: bytes, canonical: Path) -> None:
        accepted = AcceptedSubmission(
            digest=digest,
            path=str(canonical),
            rollouts_digest=blake3(canonical.read_bytes()).digest(),
            policy=step,
            rewards=inspected.rewards,
            temperatures=[self.sampling.temperature],
            kept=[True] * self.sampling.groups_per_submission,
        )
        trained = trio.run(self.trainer.train, TrainStep(step=step, submissions=[accepted]))
        assert trained.unreadable == []
        self.trained = trained.figures
        # Groups of equal rewards teach nothing, and have no such figure.
        difference = trained.figures.get("engine_log_probability_difference")
        if difference is not None:
            assert difference < 1e-3
            self.learned_steps += 1
        trio.run(self.trainer.export, Export(folder=str(self.folder / str(step + 1))))


@contextmanager
def pipeline(
    folder: Path, environment: EnvironmentReference, terms: TrainingTerms
) -> Iterator[Pipeline]:
    """The pipeline of a run whose first policy is in `folder`/0."""
    environments = [environment]
    inspector, trainer = (
        InspectorService(InspectionSetup(environments=environments)),
        TrainerService(),
    )
    start = StartTraining(model=str(folder / "0"), terms=terms, seed=0)
    trio.run(trainer.start, start)
    engine = EngineService(InferenceSetup(environments=environments))
    prefill = PrefillService(PrefillSetup())
    with in_background(inspector.run) as ask:
        yield Pipeline(
            folder, engine, inspector, prefill, trainer, ask, environment, terms.sampling
        )
