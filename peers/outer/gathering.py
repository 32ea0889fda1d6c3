"""Contributions of the other trainers: fetched, checked, and ready for a record."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import trio

from peers.outer.presence import OuterLoop
from peers.outer.rating import Said
from peers.outer.sharing import TAKEOVER_SECONDS, Sharing, View
from swarm.errors import SwarmError
from swarm.jobs.outer import InspectContribution, OuterService
from swarm.rollouts.seeds import rendezvous
from swarm.shardcast.manifest import BadManifest
from swarm.wire.manifest import Outer
from swarm.wire.outer import Contribution
from swarm.world import ChildDied
from swarm.world.recent import Recent


@lru_cache(maxsize=16)
def ranking(trainers: tuple[str, ...], run: str, round: int) -> tuple[str, ...]:
    """Trainers in the order in which they may close a round, by rendezvous hash.

    The first that is present signs the round's record once a quorum and the grace window are over;
    each further one waits a while longer."""
    return tuple(rendezvous(trainers, b"outer", run.encode(), round.to_bytes(8, "big")))


SCORERS = 3
"""Trainers that score strangers: the first in rank, who signs, and the next ones. Of three, no liar
decides."""


def measured(loop: OuterLoop, base: bytes, round: int) -> dict[str, Said]:
    """What the first scorers in rank say of the contributions to a round, from `base`."""
    run, others = loop.peer.run, loop.presence.others().items()
    told = {who: (status.measured_from, status.measured) for who, status in others}
    told[loop.peer.peer_id] = loop.presence.own
    ranked = ranking(tuple(run.manifest.trainer_ids()), run.id, round)
    spoken = [who for who in ranked if who in told and told[who][0] == base]
    return {who: {each.trainer: each for each in told[who][1]} for who in spoken[:SCORERS]}


@dataclass(frozen=True)
class Gathered:
    """What a trainer knows of the round that is to be closed. Times are in the world's seconds."""

    ready: dict[str, float]
    """When the contribution of each trainer from the newest outer state was complete and checked
    here. A late contribution from an older state joins the record, but nobody waits for it."""
    present: Collection[str]
    """Trainers that can be waited for, this one included."""
    began: float
    """When this trainer got the outer state that the round begins from."""

    def missing(self) -> list[str]:
        """Trainers that are present and have not contributed."""
        return sorted(set(self.present) - set(self.ready))

    def quorum(self, outer: Outer) -> int:
        """Contributions that the round needs."""
        return max(1, min(outer.quorum, len(self.present)))

    def due_at(self, outer: Outer) -> float:
        """When the round closes, as far as is known now; infinite without such a contribution."""
        if not self.ready:
            return math.inf
        times = sorted(self.ready.values())
        if not self.missing():
            return times[-1]
        deadline = max(times[0], self.began + outer.deadline_seconds)
        quorum = self.quorum(outer)
        if len(times) < quorum:
            return deadline
        return min(deadline, times[quorum - 1] + outer.grace_seconds)

    def closes_at(self, outer: Outer, ranked: Sequence[str], own: str) -> float:
        """When this trainer closes the round unless another one has."""
        before = [trainer for trainer in ranked if trainer in self.present]
        rank = before.index(own) if own in before else len(before)
        return self.due_at(outer) + rank * TAKEOVER_SECONDS


RETRY_SECONDS = 10.0
"""Pause before a contribution is fetched again that could not be fetched."""

REFUSED_MAX = 1000
"""Refused artifacts that are remembered."""


_Name = tuple[str, bytes]
"""Names a contribution by its trainer and its artifact: anybody may name another one's files."""


def _name(contribution: Contribution) -> _Name:
    return contribution.trainer, contribution.artifact.digest


class Gathering:
    """The contributions that this trainer could list in a record now.

    A trainer has at most one: its newest. A contribution is refused in one sentence, once; one of
    another branch counts after all if this trainer comes to follow that branch.

    In a run with shards this trainer fetches and checks only those that it may have to merge. A
    contribution is then ready when trainers that are present have all of its shards."""

    def __init__(self, loop: OuterLoop, sharing: Sharing) -> None:
        self._loop = loop
        self._sharing = sharing
        self._since: Recent[bytes, float] = Recent(REFUSED_MAX)
        """When each artifact was first covered."""
        self._ready: dict[str, tuple[Contribution, float]] = {}
        """With shards, all that were announced and can count, and when."""
        self._busy: set[_Name] = set()
        """Contributions that are being fetched and checked."""
        self._refused: Recent[_Name, str] = Recent(REFUSED_MAX)
        """Those that can never count, and the reasons."""
        self._reported: Recent[_Name, str] = Recent(REFUSED_MAX)
        """Those that do not count on the present branch, and the reasons."""

    def add(self, contribution: Contribution) -> None:
        """Add a contribution that is on this disk and was checked."""
        now = self._loop.peer.node.world.now()
        self._ready[contribution.trainer] = (contribution, now)
        self._loop.changed.touch()

    def ready(self, head: bytes) -> dict[str, tuple[Contribution, float]]:
        """The contributions that the record after `head` can have, and since when they are ready.

        By trainer id; those of trainers that the run no longer names are left out."""
        trusted = set(self._loop.peer.run.manifest.trainer_ids()) - self._sharing.left_out
        found = {
            trainer: held
            for trainer, held in sorted(self._ready.items())
            if trainer in trusted and self._loop.chain.refusal(held[0], head) is None
        }
        if self._sharing.count == 1:
            return found
        view, now = self._view(head), self._loop.peer.node.world.now()
        return {
            trainer: (part, self._since.setdefault(part.artifact.digest, now))
            for trainer, (part, _) in found.items()
            if self._sharing.is_covered(part, view)
        }

    def _view(self, head: bytes) -> View:
        return self._sharing.view(self._loop.chain.round_of(head) + 1)

    async def run(
        self,
        head: Callable[[], bytes],
        is_behind: Callable[[], bool],
        child: OuterService,
        bytes_max: int,
    ) -> None:
        """Fetch and check every announced contribution until cancelled.

        `head()` is the record whose outer state this trainer holds; `is_behind()`: there is another
        one to follow. Raises `ChildDied`."""
        async with trio.open_nursery() as nursery:
            while True:
                for trainer, status in self._loop.presence.others().items():
                    contribution = status.contribution
                    if contribution is None or not self._is_new(trainer, contribution, head()):
                        continue
                    if self._sharing.count > 1:
                        self.add(contribution)
                    else:
                        self._busy.add(_name(contribution))
                        nursery.start_soon(self._take, contribution, child, bytes_max)
                # Those who have merged a record first have no part in its round any more. Their
                # shards would fall to those who still write the state: a whole shard each.
                if self._sharing.count == 1 or is_behind():
                    await self._loop.changed.wait_change()
                    continue
                view = self._view(head())
                own = self._loop.peer.peer_id
                # From the next trainer on: if all began with the same one, its line would be full
                # and the others' idle.
                for trainer in sorted(self._ready, key=lambda each: (each <= own, each)):
                    contribution, since = self._ready[trainer]
                    if trainer == own or _name(contribution) in self._busy:
                        continue
                    if self._loop.chain.refusal(contribution, head()) is not None:
                        continue  # counted already: the next round has other mergers
                    due = self._sharing.due(contribution, view, since)
                    if due:
                        self._busy.add(_name(contribution))
                        nursery.start_soon(self._take, contribution, child, bytes_max, due)
                with trio.move_on_after(TAKEOVER_SECONDS):
                    await self._loop.changed.wait_change()

    async def take_stranger(
        self, contribution: Contribution, head: bytes, child: OuterService, bytes_max: int
    ) -> None:
        """Fetch and check a stranger's contribution, which `holds` then knows."""
        if self._is_new(contribution.trainer, contribution, head):
            await self._take(contribution, child, bytes_max)

    def forget(self, contribution: Contribution) -> None:
        """Forget a stranger's contribution to a round that is over."""
        if self.holds(contribution):
            del self._ready[contribution.trainer]

    def holds(self, contribution: Contribution) -> bool:
        """Whether a contribution was fetched, and nothing was wrong with it."""
        held = self._ready.get(contribution.trainer)
        return held is not None and held[0] == contribution

    @property
    def is_fetching(self) -> bool:
        return bool(self._busy)

    def reason(self, contribution: Contribution) -> str:
        """Why a contribution was refused; empty if it was not."""
        name = _name(contribution)
        return self._refused.get(name) or self._reported.get(name, "")

    def _is_new(self, trainer: str, contribution: Contribution, head: bytes) -> bool:
        """Whether a contribution is to be fetched: it may count, and is not here yet."""
        name = _name(contribution)
        held = self._ready.get(trainer)
        if name in self._busy or (held is not None and _name(held[0]) == name):
            return False
        if name in self._refused:
            return False
        if contribution.trainer != trainer:
            self.refuse(contribution, f"{trainer} announced it, not its trainer")
            return False
        if contribution.base not in self._loop.chain:
            return False  # its record has not arrived, or this trainer has recovered past it
        if self._loop.chain.ancestor(head, contribution.base_round) is None:
            return False  # this trainer has not merged as far
        why = self._loop.chain.refusal(contribution, head)
        if why is not None and name not in self._reported:
            self._reported[name] = why
            self._report(contribution, why)
        if why is None and not contribution.is_signed(self._loop.peer.run.id):
            why = "its trainer has not signed it"
            self.refuse(contribution, why)
        return why is None

    def refuse(self, contribution: Contribution, why: str) -> None:
        """Refuse a contribution for good, whatever branch this trainer follows later."""
        self._refused[_name(contribution)] = why
        held = self._ready.get(contribution.trainer)
        if self._sharing.count > 1 and held is not None and held[0] == contribution:
            del self._ready[contribution.trainer]
        self._report(contribution, why)

    def _report(self, contribution: Contribution, why: str) -> None:
        self._loop.peer.node.events.emit(
            "outer.contribution_refused",
            trainer=contribution.trainer,
            base_round=contribution.base_round,
            reason=why,
        )

    async def _take(
        self,
        contribution: Contribution,
        child: OuterService,
        bytes_max: int,
        shards: Sequence[int] = (),
    ) -> None:
        begun = self._loop.peer.node.world.now()
        try:
            if not 0 < contribution.total_bytes <= bytes_max:  # 0 would stand for any size
                why = (
                    f"it has {contribution.total_bytes} bytes; a contribution to this model can "
                    f"have 1 to {bytes_max}"
                )
            else:
                artifacts, size = self._loop.artifacts, contribution.total_bytes
                holders = self._sharing.holding(contribution, shards)
                folder = await artifacts.fetch_contribution(contribution, size, shards, holders)
                self._sharing.took(self._loop.peer.node.world.now() - begun)
                why = await self._inspect(artifacts.local(folder), shards, child)
            if why:
                self.refuse(contribution, why)
            elif shards:
                self._sharing.hold(contribution, shards)
            else:
                self.add(contribution)
        except ChildDied:
            raise
        except BadManifest as error:
            self.refuse(contribution, str(error))
        except (SwarmError, OSError) as error:
            self._loop.peer.node.events.emit(
                "outer.fetch_failed", trainer=contribution.trainer, reason=str(error)
            )
            await trio.sleep(RETRY_SECONDS)
        finally:
            self._busy.discard(_name(contribution))
        self._loop.changed.touch()

    async def _inspect(self, folder: str, shards: Sequence[int], child: OuterService) -> str:
        """One sentence about what is wrong with a contribution, or with some of its shards."""
        count = self._sharing.count
        for shard in shards or [0]:
            path = f"{folder}/{shard}" if shards else folder
            job = InspectContribution(contribution=path, shard=shard, shards=count)
            found = await child.inspect(job)
            if found.problem:
                return found.problem
        return ""
