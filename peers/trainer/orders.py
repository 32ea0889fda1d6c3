"""Step orders, which say which step is open and how many groups it still wants.

That follows from the groups in the pool, and from the forecast of those already on their way.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import trio

from peers.trainer.environments import Curricula
from peers.trainer.pool import GroupLabel, Pool
from peers.trainer.progress import STEPS_REMEMBERED, Progress
from peers.trainer.state_values import StateValues
from peers.trainer.store import TrainerStore
from swarm.node.run_node import RunNode
from swarm.run.manifest import MANIFEST_LIFETIME_SECONDS, content_digest, manifest_in
from swarm.wire.envelope import EVENT_LIFETIME_SECONDS, STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.messages import StepOrder

SMOOTHING = 0.1
"""Weight of the newest submission in the running share of groups kept."""

KEEP_RATE_MIN = 1 / 16
"""Floor of that share: a smaller share would request over sixteen times the work at once."""

UNJUDGED_SECONDS = 60.0
"""Least time after which an announced submission without a verdict leaves the forecast, ..."""
UNJUDGED_FACTOR = 3.0
"""... and how many times the longest recent check it is, if that is more: a check of a large
model's rollouts takes minutes."""
RECENT_SHARE = 0.9
"""Part of the longest recent check that counts at the next verdict."""

JUDGED_SECONDS = EVENT_LIFETIME_SECONDS
"""Time for which a judged submission is remembered, so that a late acknowledgement of it does not
enter the forecast: by then every acknowledgement has expired."""

JUDGED_MAX = 10_000
"""Most of them; the oldest is forgotten."""

WORKERS_MAX = 4096
"""Workers remembered by their last outcome; the least recent is forgotten."""

Outcome = Literal["accepted", "refused", "quarantined"]
Offer = tuple[str, bytes]
"""(worker, digest): a worker's announcement says nothing about another worker's file."""


class KeepRate:
    """A running share of the groups that the filter keeps."""

    def __init__(self) -> None:
        self._average = 0.0
        self._weight = 0.0

    def observe(self, labels: list[GroupLabel]) -> None:
        """Add a submission's groups to the share; continuations do not count."""
        count = len(labels) - labels.count("continuation")
        if not count:
            return
        share = labels.count("kept") / count
        self._average += SMOOTHING * (share - self._average)
        self._weight += SMOOTHING * (1 - self._weight)

    @property
    def value(self) -> float:
        """The share, in [1/16, 1]; 1 before the first submission."""
        if not self._weight:
            return 1.0
        return max(KEEP_RATE_MIN, self._average / self._weight)


def groups_to_ask_for(missing: int, keep_rate: float, coming: int) -> int:
    """Number of groups that a step order asks for.

    This is `missing`, the kept groups still needed, divided by `keep_rate`, less `coming`, the
    groups announced and not yet judged.
    """
    return max(0, math.ceil(missing / keep_rate - 1e-9) - coming)


class Forecast:
    """Submissions held by a validator but not judged yet, and counts since the newest order."""

    def __init__(self) -> None:
        self.keep_rate = KeepRate()
        """Share of accepted groups that the online filter keeps."""
        self._announced: dict[Offer, tuple[int, float]] = {}
        """Groups of the submissions that a validator holds and has not judged yet, and since when.
        """
        self._late: OrderedDict[Offer, float] = OrderedDict()
        """Submissions that left the forecast without a verdict, and since when they were in it."""
        self._longest_check_seconds = 0.0
        """The longest recent time from an acknowledgement to the verdict."""
        self._judged: OrderedDict[Offer, float] = OrderedDict()
        """The last submissions judged, and when: an acknowledgement may arrive after the verdict.
        """
        self._judged_since_order = 0
        """Verdicts since the newest order or revision."""
        self._wasted_since_order = 0
        """Submissions since then that serve no batch, although they spent their workers' quota."""
        self._wasteful: OrderedDict[str, None] = OrderedDict()
        """Workers whose last judged submission was refused."""
        self._reliable: OrderedDict[str, None] = OrderedDict()
        """Workers whose last judged submission was accepted."""

    def announce(self, offer: Offer, groups: int, now: float, *, has_stake: bool) -> bool:
        """Add a submission that a validator holds and that may serve a batch.

        An acknowledgement says only that a file has arrived. So nothing is expected of a worker
        that has neither stake nor an accepted submission, nor of one whose last was refused:
        otherwise, identities that cost nothing would fill the forecast with files of garbage, and
        nobody else would be asked. Returns False for these, and for what was judged already.
        """
        worker, _ = offer
        if offer in self._judged or worker in self._wasteful:
            return False
        if not has_stake and worker not in self._reliable:
            return False
        self._announced.setdefault(offer, (groups, now))
        return True

    def judge(self, offer: Offer, outcome: Outcome, now: float) -> None:
        """Count a verdict; the submission's groups stay in the forecast until `settle`.

        The refusals of one worker count once until it is accepted again. Otherwise it could have
        more asked of all workers as often as it likes.
        """
        worker, _ = offer
        _, since = self._announced.get(offer, (0, self._late.pop(offer, now)))
        if offer not in self._judged:
            recent = RECENT_SHARE * self._longest_check_seconds
            self._longest_check_seconds = max(recent, now - since)
        self._judged[offer] = now
        self._judged.move_to_end(offer)
        if len(self._judged) > JUDGED_MAX:
            self._judged.popitem(last=False)
        if outcome == "refused" and worker in self._wasteful:
            return
        self._judged_since_order += 1
        self._wasted_since_order += outcome != "accepted"
        if outcome == "refused":
            _move(worker, self._reliable, self._wasteful)
        elif outcome == "accepted":
            _move(worker, self._wasteful, self._reliable)

    def settle(self, offer: Offer) -> None:
        """Remove a submission that is in the pool, or never will be."""
        self._announced.pop(offer, None)

    def waste(self, submissions: int) -> None:
        """Count submissions that serve no batch after all, or not with all of their groups."""
        self._wasted_since_order += submissions

    def forget_late(self, now: float) -> int:
        """Drop, as wasted, submissions not judged for long; return how many.

        Also forgets submissions that were judged long ago.
        """
        while self._judged and now - next(iter(self._judged.values())) > JUDGED_SECONDS:
            self._judged.popitem(last=False)
        longest = max(UNJUDGED_SECONDS, UNJUDGED_FACTOR * self._longest_check_seconds)
        late = [offer for offer, (_, since) in self._announced.items() if now - since > longest]
        for offer in late:
            _, self._late[offer] = self._announced.pop(offer)
            if len(self._late) > JUDGED_MAX:
                self._late.popitem(last=False)
        self.waste(len(late))
        return len(late)

    def forget_announced(self) -> None:
        """Drop all announced submissions: they belong to an abandoned lineage."""
        self._announced.clear()

    def coming(self) -> int:
        """Groups announced and not yet judged."""
        return sum(groups for groups, _ in self._announced.values())

    def order_issued(self) -> None:
        """Restart the counts: workers have new quotas."""
        self._judged_since_order = self._wasted_since_order = 0

    def quota_spent(self, *, refill: bool) -> bool:
        """Whether submissions spent the newest order's quota without filling its batch.

        With `refill`, even an accepted submission may have no group that counts.
        """
        return self._wasted_since_order + (self._judged_since_order if refill else 0) > 0


def _move(worker: str, before: OrderedDict[str, None], after: OrderedDict[str, None]) -> None:
    before.pop(worker, None)
    after[worker] = None
    after.move_to_end(worker)
    if len(after) > WORKERS_MAX:
        after.popitem(last=False)


@dataclass(eq=False)
class Orders:
    """Keeps exactly one step open: the oldest step whose batch is not on its way yet."""

    peer: RunNode
    store: TrainerStore
    progress: Progress
    forecast: Forecast
    pool: Pool
    state_values: StateValues
    _newest: StepOrder | None = None
    _issuing: trio.Lock = field(default_factory=trio.Lock)
    """Held while an order is issued, and while the lineage changes."""

    def __post_init__(self) -> None:
        self.curricula = Curricula(self.peer.node.events)

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
        await self.state_values.restore(orders)

    def restore_levels(self, inherited: StepOrder | None) -> None:
        """Continue with the levels of an inherited order, or else of the newest one here."""
        newest = self.store.newest_orders(self.progress.lineage, 1)
        self.curricula.restore(newest if inherited is None else [inherited])

    async def open_first(self) -> None:
        """Open the first step or, after a restart, the step that was open before it."""
        before = self.store.newest_orders(self.progress.lineage, STEPS_REMEMBERED)
        self.curricula.restore(before)
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
        """Revise the order for the missing groups.

        Where work was lost on its way, the workers' quota is spent, and without a revision no
        worker could replace that work.
        """
        with trio.CancelScope(shield=True):
            async with self._issuing:
                order = self._order()
                if self.missing_groups(order.step) > 0 and not self.progress.paused:
                    await self._issue(order.step, order)

    @asynccontextmanager
    async def reopened(self) -> AsyncIterator[None]:
        """Close the open step, run the block, which begins a lineage, and open its first step.

        Before a first step is opened in this process, `open_first` will do it.
        """
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
        """Groups still to generate for the batches of every step up to `step`.

        With `fill = "refill"` a batch holds only groups that the filter keeps, so more are
        generated than are missing.
        """
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
        """The share of a step's groups that continue states."""
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
        """The policy that generates a step's rollouts.

        It is at least the lineage's first policy, and never older than the previous step's policy,
        even when a new version of the run raises `asynchrony`.
        """
        order = self._newest
        lineage = self.progress.lineage
        before = order.policy if order is not None and order.lineage == lineage else 0
        asynchrony = self.progress.versions.manifest_of(step).schedule.asynchrony
        return max(min(self.progress.published), step - asynchrony, before)

    async def _choose_states(
        self, step: int, followed: Envelope, levels: list[int], groups: int
    ) -> tuple[bytes, int]:
        """The states that a new step continues, of steps before it that drew their tasks alike."""
        lineage, version = self.progress.lineage, content_digest(followed)
        waiting = self.pool.oldest_first()
        steps = {each.verdict.step for each in waiting}
        orders = [self.store.order(lineage, each) for each in sorted(steps)]
        alike = {
            each.step
            for each in orders
            if each is not None and each.run_digest == version and each.levels == levels
        }
        return await self.state_values.choose(
            step,
            manifest_in(followed),
            [each for each in waiting if each.verdict.step in alike],
            groups,
        )

    async def _close(self, order: StepOrder) -> None:
        """Revise an order to want no more groups."""
        await self._announce(order.step, order, closes=True)

    async def _issue(self, step: int, revised: StepOrder | None) -> None:
        """Open a step, or revise its order, for the groups that are missing."""
        await self._announce(step, revised, closes=False)

    async def _announce(self, step: int, revised: StepOrder | None, *, closes: bool) -> None:
        """Sign and announce an order, durable before it is announced: a restart keeps its nonce."""
        policy = revised.policy if revised else self._policy_for(step)
        levels = revised.levels if revised else self.curricula.levels_for(step)
        checkpoint = self.progress.published[policy]
        followed = self.progress.versions.follow(step)
        manifest = manifest_in(followed)
        await self.peer.versions.store()  # before the order names a version
        states = (revised.states, revised.states_bytes) if revised else (b"", 0)
        missing = 0 if closes else self.missing_groups(step)
        if not revised and missing:
            states = await self._choose_states(step, followed, levels, missing)
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
            levels=levels,
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
