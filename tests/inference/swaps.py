"""A worker with four policies that swaps when it is told to, and the checks of a validator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from peers.demo.recipes import THRESHOLDS
from peers.engines import demo
from peers.engines.service import EngineService
from peers.validator.cases import Outcome
from peers.validator.inspector import InspectorService
from peers.validator.prefill import PrefillService
from swarm.jobs import Load, SubmissionOrder
from swarm.jobs.inference import Generate, Generated, InferenceSetup, Swap
from swarm.jobs.validation import Inspect, InspectionSetup, Judge, PrefillSetup
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import read
from tests.background import in_background, inspect_whole
from tests.inference.files import LIMITS
from tests.orders import policy as reference
from tests.orders import submission_order

NAMED = 1
"""The policy that the step order names."""
ORDER = submission_order(
    policy=reference(NAMED), groups=2, max_new_tokens=40, stop_ids=[63], swaps_max=2
)

Act = Callable[[], object]


@dataclass
class Bench:
    """A worker with policies 1 to 4, and the checks of a validator."""

    folders: dict[int, Path]
    at: Path
    inspect: Callable[[Inspect], Outcome]

    def load(self, policy: int) -> Load:
        return Load(policy=reference(policy), folder=str(self.folders[policy]))

    def service(self, order: SubmissionOrder = ORDER, policy: int = NAMED) -> EngineService:
        service = EngineService(InferenceSetup(environments=order.environments))
        trio.run(service.load, self.load(policy))
        return service

    def offer(self, service: EngineService, policy: int) -> Act:
        return lambda: trio.run(service.swap, Swap(load=self.load(policy)))

    def path(self, order: SubmissionOrder) -> Path:
        return self.at / f"made-{order.number}"

    def generate(
        self, service: EngineService, orders: Sequence[SubmissionOrder], acts: dict[int, Act]
    ) -> list[Generated | Exception]:
        """Submissions made at once; `acts` happen before some steps of the engine, counted
        from 1."""
        engine: Any = service._engine
        step, steps = engine.step, 0
        made: dict[int, Generated | Exception] = {}

        def stepping() -> Any:
            nonlocal steps
            steps += 1
            acts.get(steps, lambda: None)()
            return step()

        async def one(order: SubmissionOrder) -> None:
            try:
                job = Generate(order=order, path=str(self.path(order)))
                made[order.number] = await service.generate(job)
            except Exception as error:
                made[order.number] = error

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                for order in orders:
                    nursery.start_soon(one, order)

        engine.step = stepping
        trio.run(main)
        engine.step = step
        return [made[order.number] for order in orders]

    def check(self, order: SubmissionOrder, made: Generated | Exception) -> Rollouts:
        """Let a validator check a submission by all that can be recomputed."""
        assert isinstance(made, Generated), made
        path, canonical = self.path(order), self.at / "canonical"
        inspected = self.inspect(
            Inspect(
                order=order,
                path=str(path),
                digest=made.digest,
                canonical_path=str(canonical),
                tokenizer_folder=str(self.folders[NAMED]),
                bytes_max=1 << 20,
            )
        )
        assert inspected.failed == "", inspected.detail
        judged = trio.run(
            PrefillService(PrefillSetup(policies_kept=4)).judge,
            Judge(
                order=order,
                path=str(canonical),
                digest=inspected.canonical_digest,
                thresholds=THRESHOLDS,
                rewards=inspected.rewards,
                later=[self.load(policy) for policy in self.folders],
            ),
        )
        assert judged.failed == "", judged.detail
        assert judged.sampling.mismatches == 0 and judged.proofs.error_mean < 0.01
        return read(path, LIMITS).rollouts


@contextmanager
def open_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folders = {policy: tmp_path_factory.mktemp(f"policy-{policy}") for policy in (1, 2, 3, 4)}
    for policy, folder in folders.items():
        demo.make_policy(folder, seed=policy)
    inspector = InspectorService(InspectionSetup(environments=[]))
    with in_background(inspector.run) as ask:
        at = tmp_path_factory.mktemp("swaps")
        yield Bench(folders, at, partial(inspect_whole, ask, inspector))
