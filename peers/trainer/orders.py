"""Step orders: the open step, and the groups it still wants beyond those pooled or forecast."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import trio

from peers.trainer.accepted import AcceptedSubmissions
from peers.trainer.forecast import groups_to_ask_for
from peers.trainer.progress import STEPS_REMEMBERED
from swarm.run.manifest import MANIFEST_LIFETIME_SECONDS, content_digest, manifest_in
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.messages import StepOrder


@dataclass(eq=False)
class Orders:
    """Keeps exactly one step open: the oldest step whose batch is not on its way yet."""

    accepted: AcceptedSubmissions
    _newest: StepOrder | None = None
    _issuing: trio.Lock = field(default_factory=trio.Lock)
    """Held while an order is issued, and while the lineage changes."""

    def __post_init__(self) -> None:
        accepted = self.accepted
        self.peer, self.store, self.progress = accepted.peer, accepted.store, accepted.progress
        self.forecast, self.pool = accepted.forecast, accepted.pool

    @property
    def opened(self) -> bool:
        """Whether this process has opened a step."""
        return self._newest is not None

    def continue_lineage(self, lineage: int) -> None:
        """Restore the lineage and the version of the run that each of its steps follows."""
        if lineage != self.progress.lineage:
            self.progress.versions.clear()
        self.progress.lineage = lineage
        self.progress.versions.restore(self.store.newest_orders(lineage, STEPS_REMEMBERED))

    async def restore_states(self) -> None:
        """Read the states that the orders of an earlier process name."""
        orders = self.store.newest_orders(self.progress.lineage, STEPS_REMEMBERED)
        await self.accepted.state_values.restore(orders)

    async def open_first(self) -> None:
        """Open the first step or, after a restart, the step that was open before it."""
        before = self.store.newest_orders(self.progress.lineage, STEPS_REMEMBERED)
        if before:
            await self._issue(before[0].step, before[0])
        else:
            await self._issue(self.progress.policy, None)  # 0, except in a new lineage

    async def run(self) -> None:
        """Open steps and revise their orders until cancelled."""
        while True:
            async with self._issuing:
                issued = await self._issue_if_due()
            if not issued:
                await self.progress.changed.wait_change()

    async def ask_for_more(self) -> None:
        """Revise the order for missing groups: lost work spent quotas, none could replace it."""
        with trio.CancelScope(shield=True):
            async with self._issuing:
                order = self._order()
                if self.missing_groups(order.step) > 0 and not self.progress.paused:
                    await self._issue(order.step, order)

    @asynccontextmanager
    async def reopened(self) -> AsyncIterator[None]:
        """Close the open step, run the block, which begins a lineage, and open its first step.

        Before a first step is opened in this process, `open_first` will do it."""
        async with self._issuing:
            if not self.opened:
                yield
                return
            await self._close(self._order())
            yield
            await self._issue(self.progress.policy, None)

    async def end(self) -> None:
        """Announce that the run is over."""
        async with self._issuing:
            order = self._order()
            self._newest = final = msgspec.structs.replace(
                order, revision=order.revision + 1, groups_wanted=0, final=True
            )
            await self.peer.announce(final, MANIFEST_LIFETIME_SECONDS)

    def missing_groups(self, step: int) -> int:
        """Groups still to generate up to `step`; with `fill = "refill"` more than are missing."""
        versions = self.progress.versions
        last = min(step, self.peer.run.manifest.schedule.steps - 1)
        needed = sum(
            versions.manifest_of(each).schedule.groups_per_step
            for each in range(self.progress.step, last + 1)
        )
        held = self.progress.training_groups + self.pool.groups
        keep_rate = self.forecast.keep_rate.value if self._refills(step) else 1.0
        own = 1 - self._share_continued(step)
        return groups_to_ask_for(needed - held, keep_rate * own, self.forecast.coming())

    def has_all(self, step: int) -> bool:
        """Whether all the work that a step's order asked for is here, or judged and lost."""
        order = self._newest
        if order is None or order.lineage != self.progress.lineage or order.step < step:
            return False
        idle = self.missing_groups(step) == 0 and self.forecast.coming() == 0
        return order.step > step or idle

    # --- issuing -----------------------------------------------------------------------------

    def _order(self) -> StepOrder:
        assert self._newest is not None
        return self._newest

    def _share_continued(self, step: int) -> float:
        order = self._newest
        if order is None or order.step != step or not order.states:
            return 0.0
        return self.progress.versions.manifest_of(step).values.share

    def _refills(self, step: int) -> bool:
        return self.progress.versions.manifest_of(step).filters.fill == "refill"

    async def _issue_if_due(self) -> bool:
        """Issue the order that the run's state calls for; False if it calls for none."""
        order = self._order()
        if order.final:
            return False
        if self.progress.paused:
            if order.groups_wanted == 0:
                return False
            await self._close(order)
            return True
        if not self.progress.published:
            return False  # the child died while a new lineage began
        missing = self.missing_groups(order.step)
        following = order.step + 1
        if missing == 0 and self._may_open(following) and not self._awaits_states(following):
            await self._issue(following, None)
        elif self._must_revise(order, missing):
            await self._issue(order.step, order)
        else:
            return False
        return True

    def _awaits_states(self, step: int) -> bool:
        """Whether rollouts that a step's workers are to continue have not been judged yet."""
        values = self.progress.versions.manifest_of(step).values
        return values.estimate == "continuations" and self.forecast.coming() > 0

    def _may_open(self, step: int) -> bool:
        steps = self.peer.run.manifest.schedule.steps
        return step < steps and self._policy_for(step) <= self.progress.policy

    def _must_revise(self, order: StepOrder, missing: int) -> bool:
        """Whether an order wants too much or too little, or its quota was spent without result."""
        sampling = self.progress.versions.manifest_of(order.step).sampling
        if (missing == 0) != (order.groups_wanted == 0):
            return True
        if missing > order.groups_wanted + sampling.groups_per_submission:
            return True
        spent = self.forecast.quota_spent(refill=self._refills(order.step))
        return missing > 0 and self.forecast.coming() == 0 and spent

    def _policy_for(self, step: int) -> int:
        """A step's policy: of this lineage, and never older than the previous step's."""
        order = self._newest
        lineage = self.progress.lineage
        before = order.policy if order is not None and order.lineage == lineage else 0
        asynchrony = self.progress.versions.manifest_of(step).schedule.asynchrony
        return max(min(self.progress.published), step - asynchrony, before)

    async def _choose_states(self, step: int, followed: Envelope, groups: int) -> tuple[bytes, int]:
        """The states that a new step continues, of steps before it that drew their tasks alike."""
        lineage, version = self.progress.lineage, content_digest(followed)
        waiting = self.pool.oldest_first()
        steps = {each.verdict.step for each in waiting}
        orders = [self.store.order(lineage, each) for each in sorted(steps)]
        alike = {each.step for each in orders if each is not None and each.run_digest == version}
        return await self.accepted.state_values.choose(
            step,
            manifest_in(followed),
            [each for each in waiting if each.verdict.step in alike],
            groups,
        )

    async def _close(self, order: StepOrder) -> None:
        """Revise an order to want no more groups."""
        await self._issue(order.step, order, closes=True)

    async def _issue(self, step: int, revised: StepOrder | None, *, closes: bool = False) -> None:
        """Open or revise a step for the groups missing; durable before it is announced."""
        policy = revised.policy if revised else self._policy_for(step)
        checkpoint = self.progress.published[policy]
        followed = self.progress.versions.follow(step)
        manifest = manifest_in(followed)
        await self.peer.versions.store()  # before the order names a version
        states = (revised.states, revised.states_bytes) if revised else (b"", 0)
        missing = 0 if closes else self.missing_groups(step)
        if not revised and missing:
            states = await self._choose_states(step, followed, missing)
            if states[0]:
                missing = math.ceil(missing / (1 - manifest.values.share))
        submissions = -(-missing // manifest.sampling.groups_per_submission)
        if states[0] and missing:
            submissions += 1  # the shares of a few submissions are not exact
        if revised and manifest.filters.fill == "refill":
            submissions = min(1, submissions)  # one more each, not many of the fastest worker
        self.forecast.order_issued()
        order = StepOrder(
            step=step,
            revision=revised.revision + 1 if revised else 0,
            checkpoint=checkpoint,
            nonce=revised.nonce if revised else self.peer.node.world.secret_bytes(32),
            groups_wanted=missing,
            submissions_max=(revised.submissions_max if revised else 0) + submissions,
            run_version=manifest.version,
            run_digest=content_digest(followed),
            states=states[0],
            states_bytes=states[1],
        )
        await self.store.keep_order(order)
        self._newest = order
        await self.peer.announce(order, STATE_LIFETIME_SECONDS)
        self.peer.status.step = step
        self.peer.node.events.emit(
            "trainer.step_opened",
            step=step,
            policy=policy,
            groups_wanted=missing,
            revision=order.revision,
        )
