"""Step orders: which step is open, and how many groups it still wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import trio

from peers.trainer.filters import groups_to_ask_for
from peers.trainer.forecast import Forecast
from peers.trainer.pause import Pause
from peers.trainer.pool import Pool
from peers.trainer.progress import Progress
from peers.trainer.publishing import Publisher
from peers.trainer.store import TrainerStore
from swarm.envelope import STATE_LIFETIME_SECONDS
from swarm.messages import StepOrder
from swarm.node.run_node import RunNode
from swarm.run.manifest import MANIFEST_LIFETIME_SECONDS, content_digest, manifest_in


class Orders:
    """Keeps exactly one step open: the oldest whose batch is not on its way yet."""

    def __init__(
        self,
        peer: RunNode,
        store: TrainerStore,
        progress: Progress,
        forecast: Forecast,
        pool: Pool,
        publisher: Publisher,
        pause: Pause,
    ) -> None:
        self._peer = peer
        self._run = peer.run
        self._store = store
        self._progress = progress
        self._forecast = forecast
        self._pool = pool
        self._publisher = publisher
        self._pause = pause
        self._newest: StepOrder | None = None
        self._issuing = trio.Lock()
        """Held while an order is issued, and while the lineage changes."""

    @property
    def opened(self) -> bool:
        """Whether this life has opened a step."""
        return self._newest is not None

    async def open_first(self) -> None:
        """Open the first step or, after a restart, the one that was open."""
        before = self._store.newest_orders(self._progress.lineage, 1)
        if before:
            await self._issue(before[0].step, before[0])
        else:
            await self._issue(self._progress.policy, None)  # 0, but for a lineage just begun

    async def run(self) -> None:
        """Open steps and revise their orders until cancelled."""
        while True:
            async with self._issuing:
                issued = await self._issue_if_due()
            if not issued:
                await self._progress.changed.wait_change()

    async def ask_for_more(self) -> None:
        """Revise the order for what is missing: where work was lost on its way, the workers' quota
        is spent, and none of them could make up for it."""
        with trio.CancelScope(shield=True):
            async with self._issuing:
                order = self._order()
                if self.missing_groups(order.step) > 0 and not self._pause:
                    await self._issue(order.step, order)

    @asynccontextmanager
    async def reopened(self) -> AsyncIterator[None]:
        """Close the open step, and open the first one of the lineage that the block begins."""
        async with self._issuing:
            await self._close(self._order())
            yield
            await self._issue(self._progress.policy, None)

    async def end(self) -> None:
        """Announce that the run is over."""
        async with self._issuing:
            order = self._order()
            self._newest = final = msgspec.structs.replace(
                order, revision=order.revision + 1, groups_wanted=0, final=True
            )
            await self._peer.announce(final, MANIFEST_LIFETIME_SECONDS)

    def missing_groups(self, step: int) -> int:
        """Groups still to be made for the batches of every step up to `step`.

        With `fill = "refill"` a batch is what the filter keeps, so more are made than are missing.
        """
        versions = self._progress.versions
        last = min(step, self._run.manifest.schedule.steps - 1)
        needed = sum(
            versions.manifest_of(each).schedule.groups_per_step
            for each in range(self._progress.policy, last + 1)
        )
        held = self._progress.training_groups + self._pool.groups
        keep_rate = self._forecast.keep_rate.value if self._refills(step) else 1.0
        return groups_to_ask_for(needed - held, keep_rate, self._forecast.coming())

    # --- issuing -----------------------------------------------------------------------------

    def _order(self) -> StepOrder:
        assert self._newest is not None
        return self._newest

    def _refills(self, step: int) -> bool:
        return self._progress.versions.manifest_of(step).filters.fill == "refill"

    async def _issue_if_due(self) -> bool:
        """Issue the order that the run's state asks for; whether it asks for one."""
        order = self._order()
        if order.final:
            return False
        if self._pause:
            if order.groups_wanted == 0:
                return False
            await self._close(order)
            return True
        if not self._publisher.published:
            return False  # its child died as it began a new lineage
        missing = self.missing_groups(order.step)
        following = order.step + 1
        if missing == 0 and self._may_open(following):
            await self._issue(following, None)
        elif self._must_revise(order, missing):
            await self._issue(order.step, order)
        else:
            return False
        return True

    def _may_open(self, step: int) -> bool:
        steps = self._run.manifest.schedule.steps
        return step < steps and self._policy_for(step) <= self._progress.policy

    def _must_revise(self, order: StepOrder, missing: int) -> bool:
        """Whether an order wants too much or too little, or its quota was spent for nothing."""
        sampling = self._progress.versions.manifest_of(order.step).sampling
        if (missing == 0) != (order.groups_wanted == 0):
            return True
        if missing > order.groups_wanted + sampling.groups_per_submission:
            return True
        spent = self._forecast.quota_spent(refill=self._refills(order.step))
        return missing > 0 and self._forecast.coming() == 0 and spent

    def _policy_for(self, step: int) -> int:
        """The policy that a step's rollouts come from.

        A new lineage begins with its first policy, and no step goes back to an older one than the
        step before, however asynchrony grows.
        """
        order = self._newest
        lineage = self._progress.lineage
        before = order.policy if order is not None and order.lineage == lineage else 0
        asynchrony = self._progress.versions.manifest_of(step).schedule.asynchrony
        return max(min(self._publisher.published), step - asynchrony, before)

    async def _close(self, order: StepOrder) -> None:
        """Revise an order to want nothing more."""
        await self._announce(order.step, order, 0)

    async def _issue(self, step: int, revised: StepOrder | None) -> None:
        """Open a step, or revise its order, for the groups that are missing."""
        await self._announce(step, revised, self.missing_groups(step))

    async def _announce(self, step: int, revised: StepOrder | None, missing: int) -> None:
        """Sign and announce an order; durable first, so that a restart keeps its nonce."""
        policy = revised.policy if revised else self._policy_for(step)
        checkpoint = self._publisher.published[policy]
        followed = self._progress.versions.follow(step)
        manifest = manifest_in(followed)
        await self._peer.versions.store()  # before one is named
        submissions = -(-missing // manifest.sampling.groups_per_submission)
        if revised and manifest.filters.fill == "refill":
            submissions = min(1, submissions)  # one more per worker, not many of the fastest
        self._forecast.order_issued()
        order = StepOrder(
            lineage=self._progress.lineage,
            step=step,
            revision=revised.revision + 1 if revised else 0,
            policy=policy,
            manifest_digest=checkpoint.digest,
            manifest_bytes=checkpoint.size_bytes,
            nonce=revised.nonce if revised else self._peer.node.world.secret_bytes(32),
            groups_wanted=missing,
            submissions_max=(revised.submissions_max if revised else 0) + submissions,
            run_version=manifest.version,
            run_digest=content_digest(followed),
        )
        await self._store.keep_order(order)
        self._newest = order
        await self._peer.announce(order, STATE_LIFETIME_SECONDS)
        self._peer.status.step = step
        self._peer.node.events.emit(
            "trainer.step_opened",
            step=step,
            policy=policy,
            groups_wanted=missing,
            revision=order.revision,
        )
