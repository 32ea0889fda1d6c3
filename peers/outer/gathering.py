"""Contributions of the other trainers: fetched, checked, and ready for a record."""

from __future__ import annotations

from collections.abc import Callable

import trio

from peers.outer.loop import OuterLoop
from swarm.errors import SwarmError
from swarm.jobs.outer import InspectContribution, OuterService
from swarm.shardcast.manifest import BadManifest
from swarm.wire.outer import Contribution
from swarm.world import ChildDied

RETRY_SECONDS = 10.0
"""Pause before a contribution is fetched again that could not be fetched."""

REFUSED_MAX = 1000
"""Refused artifacts that are remembered."""


class Gathering:
    """The contributions that this trainer could list in a record now.

    A trainer has at most one: its newest. A contribution is refused in one sentence, once; one of
    another branch counts after all if this trainer comes to follow that branch.
    """

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop
        self._ready: dict[str, tuple[Contribution, float]] = {}
        self._busy: set[bytes] = set()
        """Artifacts that are being fetched and checked."""
        self._refused: dict[bytes, str] = {}
        """Artifacts that can never count, and the reasons."""
        self._reported: dict[bytes, str] = {}
        """Artifacts that do not count on the present branch, and the reasons."""

    def add(self, contribution: Contribution) -> None:
        """Add a contribution that is on this disk and was checked."""
        now = self._loop.peer.node.world.now()
        self._ready[contribution.trainer] = (contribution, now)
        self._loop.changed.touch()

    def ready(self, head: bytes) -> dict[str, tuple[Contribution, float]]:
        """The contributions that the record after `head` can have, and since when they are ready.

        By trainer id; those of trainers that the run no longer names are left out.
        """
        trusted = self._loop.peer.run.manifest.trainer_ids()
        return {
            trainer: held
            for trainer, held in sorted(self._ready.items())
            if trainer in trusted and self._loop.chain.refusal(held[0], head) is None
        }

    async def run(self, head: Callable[[], bytes], child: OuterService, bytes_max: int) -> None:
        """Fetch and check every announced contribution until cancelled.

        `head()` is the record whose outer state this trainer holds. Raises `ChildDied`.
        """
        async with trio.open_nursery() as nursery:
            while True:
                for trainer, status in self._loop.presence.others().items():
                    contribution = status.contribution
                    if contribution is not None and self._is_new(trainer, contribution, head()):
                        self._busy.add(contribution.artifact.digest)
                        nursery.start_soon(self._take, contribution, child, bytes_max)
                await self._loop.changed.wait_change()

    def _is_new(self, trainer: str, contribution: Contribution, head: bytes) -> bool:
        """Whether a contribution is to be fetched: it may count, and is not here yet."""
        digest = contribution.artifact.digest
        held = self._ready.get(trainer)
        if digest in self._busy or (held is not None and held[0].artifact.digest == digest):
            return False
        if digest in self._refused:
            return False
        if contribution.trainer != trainer:
            self._refuse(contribution, f"{trainer} announced it, not its trainer")
            return False
        if contribution.base not in self._loop.chain:
            return False  # its record has not arrived, or this trainer has recovered past it
        if self._loop.chain.ancestor(head, contribution.base_round) is None:
            return False  # this trainer has not merged as far
        why = self._loop.chain.refusal(contribution, head)
        if why is not None and digest not in self._reported:
            _remember(self._reported, digest, why)
            self._report(contribution, why)
        if why is None and not contribution.is_signed(self._loop.peer.run.id):
            why = "its trainer has not signed it"
            self._refuse(contribution, why)
        return why is None

    def _refuse(self, contribution: Contribution, why: str) -> None:
        """Refuse a contribution for good, whatever branch this trainer follows later."""
        _remember(self._refused, contribution.artifact.digest, why)
        self._report(contribution, why)

    def _report(self, contribution: Contribution, why: str) -> None:
        self._loop.peer.node.events.emit(
            "outer.contribution_refused",
            trainer=contribution.trainer,
            base_round=contribution.base_round,
            reason=why,
        )

    async def _take(self, contribution: Contribution, child: OuterService, bytes_max: int) -> None:
        digest = contribution.artifact.digest
        try:
            if contribution.total_bytes > bytes_max:
                why = (
                    f"it has {contribution.total_bytes} bytes, more than the {bytes_max} that a "
                    "contribution to this model can have"
                )
            else:
                artifacts = self._loop.artifacts
                folder = await artifacts.fetch_contribution(contribution, contribution.total_bytes)
                job = InspectContribution(contribution=artifacts.local(folder))
                why = await child.inspect(job)
            if why:
                self._refuse(contribution, why)
            else:
                self.add(contribution)
        except ChildDied:
            raise
        except BadManifest as error:
            self._refuse(contribution, str(error))
        except (SwarmError, OSError) as error:
            self._loop.peer.node.events.emit(
                "outer.fetch_failed", trainer=contribution.trainer, reason=str(error)
            )
            await trio.sleep(RETRY_SECONDS)
        finally:
            self._busy.discard(digest)
        self._loop.changed.touch()


def _remember(reasons: dict[bytes, str], digest: bytes, why: str) -> None:
    """Note why an artifact is refused; the oldest of too many is forgotten."""
    reasons[digest] = why
    if len(reasons) > REFUSED_MAX:
        del reasons[next(iter(reasons))]
