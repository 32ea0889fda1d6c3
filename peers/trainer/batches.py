"""Batches: what one step trains on, once enough of it has arrived."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from peers.trainer.accepted import AcceptedSubmissions
from peers.trainer.orders import Orders
from peers.trainer.pool import Accepted
from swarm.world.observable import STARVED_SECONDS


@dataclass(eq=False)
class Batches:
    """Takes a batch once the pool holds enough, and reports meanwhile whom it waits for."""

    accepted: AcceptedSubmissions
    orders: Orders
    starved_seconds: float
    """Time without a new rollout after which workers are asked for more."""
    idle: dict[str, float] = field(default_factory=lambda: {"rollouts": 0.0, "checks": 0.0})
    """Seconds of waiting for this step's batch, by what was missing."""
    ahead: float = 0.0
    """Seconds of this wait in which its first submissions were scored."""
    _scored: set[bytes] = field(default_factory=set)
    """Digests of the submissions scored for this step."""
    _waiting_since: float = 0.0
    _said: float = 0.0
    """When the last report that the pool does not grow was made."""
    _asked: float = 0.0
    """When workers were last asked for more."""

    def __post_init__(self) -> None:
        self._world, self._progress = self.accepted.peer.node.world, self.accepted.progress

    def begin_step(self) -> None:
        """Count the seconds of waiting from 0."""
        self.idle = dict.fromkeys(self.idle, 0.0)
        self.ahead = 0.0
        self._scored.clear()

    async def next(
        self, score: Callable[[list[Accepted]], Awaitable[None]]
    ) -> list[Accepted] | None:
        """Wait for a whole batch, and take the oldest submissions in the pool that make one.

        Meanwhile those that already arrived are scored, so that the step only trains.
        With `fill = "refill"`, after its deadline, the batch is the groups in the pool that the
        filter keeps. None when a new version of the run no longer has this step."""
        manifest = self._progress.versions.manifest_of(self._progress.step)
        wanted = manifest.schedule.groups_per_step
        filters = manifest.filters
        patience = filters.refill_seconds if filters.fill == "refill" else math.inf
        self._waiting_since = self._world.now()
        deadline = self._waiting_since + patience
        values_due = math.inf
        """When the batch no longer waits for values of its states."""
        pool = self.accepted.pool
        while not self._progress.over:
            if self._progress.paused:
                await trio.sleep_forever()
            await self.accepted.drop_stale()
            late = self._world.now() >= deadline
            if pool.groups >= wanted or (late and pool.groups > 0):
                values_due = min(values_due, self._world.now() + self._values_seconds())
                if self._world.now() >= values_due:
                    return self.accepted.take(wanted)
                with trio.move_on_at(values_due):
                    await self._wait(missing=self.orders.missing_groups(self._progress.step + 1))
                continue
            if not await self._score(pool.first(wanted), score):
                with trio.move_on_at(math.inf if late else deadline):
                    await self._wait(missing=wanted - pool.groups)
        return None

    def _values_seconds(self) -> float:
        """How long a full batch may wait for the values that the next step gives its states."""
        step = self._progress.step
        manifest = self._progress.versions.manifest_of(step)
        none_follow = step + 1 >= manifest.schedule.steps
        if manifest.values.estimate == "group" or none_follow or self.orders.has_all(step + 1):
            return 0.0
        return manifest.values.wait_seconds

    async def _score(
        self, batch: list[Accepted], score: Callable[[list[Accepted]], Awaitable[None]]
    ) -> bool:
        """Score what is new of the batch so far; False if nothing is."""
        new = [accepted for accepted in batch if accepted.digest not in self._scored]
        if new:
            began = self._world.now()
            await score(new)
            self._scored |= {accepted.digest for accepted in new}
            self.ahead += self._world.now() - began
        return bool(new)

    async def _wait(self, missing: int) -> None:
        """Wait for a change; report when the pool has not grown for long."""
        began = self._world.now()
        unjudged = self.accepted.forecast.coming()
        cause = "checks" if unjudged >= missing else "rollouts"
        patience = min(STARVED_SECONDS, self.starved_seconds)
        try:
            with trio.move_on_at(max(self._fed(), self._said) + patience) as waited:
                await self._progress.changed.wait_change()
            if waited.cancelled_caught:
                await self._starve(cause, missing, unjudged)
        finally:  # the wait may end with the batch's deadline
            self.idle[cause] += self._world.now() - began

    def _fed(self) -> float:
        """When the pool last grew, or the wait for this batch began."""
        return max(self.accepted.grew, self._waiting_since)

    async def _starve(self, cause: str, missing: int, unjudged: int) -> None:
        """Report whom the batch waits for, and ask workers for more after a long silence."""
        now = self._said = self._world.now()
        role, word = ("validator",) * 2 if cause == "checks" else ("inference", "inference peer")
        present = self.accepted.log.trusted.registrar.present()
        alive = [p.peer for p in present if p.standing == "live" and role in p.heartbeat.roles]
        self.accepted.peer.node.events.emit(
            "trainer.starved",
            step=self._progress.step,
            groups_missing=missing,
            groups_unjudged=unjudged,
            seconds=now - self._fed(),
            waiting_for=alive or f"any {word}: none is there",
        )
        due = max(self._fed(), self._asked) + self.starved_seconds
        if cause == "rollouts" and alive and now > due - 1e-3:
            self._asked = now
            await self.orders.ask_for_more()
