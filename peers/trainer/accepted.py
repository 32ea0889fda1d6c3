"""Accepted submissions on this disk: the pool, the batch taken from it, and their files."""

from __future__ import annotations

from collections.abc import Mapping, Set

from peers.trainer.filters import label_groups
from peers.trainer.forecast import Forecast
from peers.trainer.outcomes import Outcomes
from peers.trainer.pool import Accepted, Pool, SubmissionKey
from peers.trainer.progress import Progress
from peers.trainer.store import TrainerStore
from swarm.envelope import Envelope
from swarm.messages import Verdict
from swarm.node.run_node import RunNode

ACCEPTED = "accepted"
"""Folder of the files."""


def path_of(digest: bytes) -> str:
    """An accepted submission's rollouts in canonical form."""
    return f"{ACCEPTED}/{digest.hex()}.rollouts"


class AcceptedSubmissions:
    """Takes accepted submissions in once each, and gives them out in batches."""

    def __init__(
        self,
        peer: RunNode,
        store: TrainerStore,
        progress: Progress,
        forecast: Forecast,
        outcomes: Outcomes,
    ) -> None:
        self._run = peer.run
        self._disk = peer.node.disk
        self._world = peer.node.world
        self._events = peer.node.events
        self._store = store
        self._progress = progress
        self._forecast = forecast
        self._outcomes = outcomes
        self.pool = Pool()
        self.in_hand: list[Accepted] = []
        """The batch in training."""
        self.grew = 0.0
        """When a submission was added last."""
        self._taken: dict[SubmissionKey, bytes] = {}
        """Which file was taken under each key, while its policy is young enough: a worker may hand
        several to several validators, and they hold the same groups."""
        self._known: dict[bytes, tuple[int, int]] = {}
        """Submissions that are in the pool or were consumed, and their (lineage, policy), while
        that is young enough: what is older can only be stale, and the log knows it."""
        self._swept: tuple[int, int, int] | None = None
        """When the pool was last freed of what is too old: as of which policy, lineage and revision
        of the run. Nothing in it grows too old before one of them changes."""

    # --- taking in ---------------------------------------------------------------------------

    def knows(self, digest: bytes) -> bool:
        """Whether a submission was taken in already, or soon will be."""
        return digest in self._known

    def expect(self, verdict: Verdict) -> None:
        """A submission is about to be copied here."""
        self._known[verdict.submission] = (verdict.lineage, verdict.policy)

    def is_second(self, verdict: Verdict) -> bool:
        """Whether another file was taken under the key of this one."""
        return self._taken.get(SubmissionKey.of(verdict), verdict.submission) != verdict.submission

    async def take_in(self, envelope: Envelope, verdict: Verdict) -> None:
        """Add a submission whose file lies here; durable on return."""
        if self.is_second(verdict):  # the other file came first
            await self._disk.remove(path_of(verdict.submission))
            await self._outcomes.stale([verdict])
            return
        self._taken[SubmissionKey.of(verdict)] = verdict.submission
        await self._store.keep_accepted(verdict, envelope)
        self._add(verdict)
        if verdict.lineage != self._progress.lineage:  # given up meanwhile
            await self.drop_stale()

    def _add(self, verdict: Verdict) -> None:
        manifest = self._progress.versions.manifest_of(verdict.step)
        labels = label_groups(verdict, manifest.environments)
        self._forecast.keep_rate.observe(labels)
        digest = verdict.submission
        self.pool.add(Accepted(digest, verdict, path_of(digest), labels, manifest.filters.fill))
        self.grew = self._world.now()
        if self._progress.too_old(verdict):  # since it was looked at last
            self._swept = None

    # --- after a restart ---------------------------------------------------------------------

    def remember_consumed(self, steps: Mapping[bytes, int]) -> int:
        """Submissions were consumed in these steps; how many are known now."""
        lineage = self._progress.lineage
        # No policy is newer than its step.
        self._known |= {digest: (lineage, step) for digest, step in steps.items()}
        return len(self._known)

    async def load(self) -> None:
        """Read what was not consumed before the restart, and the keys that are taken."""
        self._taken = self._store.taken_keys()
        kept = []
        for digest, verdict in self._store.accepted():
            if digest not in self._known and self._disk.exists(path_of(digest)):
                self._add(verdict)
                self.expect(verdict)
                kept.append(path_of(digest))
        for name in self._disk.list(ACCEPTED):  # left by an earlier life
            if f"{ACCEPTED}/{name}" not in kept:
                await self._disk.remove(f"{ACCEPTED}/{name}")

    async def settle_batch(self, consumed: Set[bytes]) -> None:
        """The child died over the batch in hand: it was trained on, or goes back to the pool."""
        batch, self.in_hand = self.in_hand, []
        for accepted in batch:
            if accepted.digest not in consumed:
                self.pool.add(accepted)
        self._swept = None
        await self.discard([each for each in batch if each.digest in consumed])

    # --- giving out --------------------------------------------------------------------------

    def take(self, groups: int) -> list[Accepted]:
        """The oldest submissions that count for `groups` groups together, or all, to train on."""
        before = self.pool.groups
        self.in_hand = self.pool.take(groups)
        self._progress.training_groups = max(groups, before - self.pool.groups)
        return self.in_hand

    async def consumed(self) -> None:
        """The batch in hand was trained on, and the log says so."""
        await self.discard(self.in_hand)
        self.in_hand = []

    async def leave_out(self, unreadable: Mapping[int, str]) -> None:
        """Drop what the child could not read from the batch in hand, by index with its reason, and
        return the rest to the pool: others make up for what is missing."""
        batch, self.in_hand = self.in_hand, []
        lost = [batch[index] for index in unreadable]
        for index, accepted in enumerate(batch):
            if index in unreadable:
                self._events.emit(
                    "trainer.unreadable",
                    submission=accepted.digest,
                    worker=accepted.verdict.worker,
                    groups=len(accepted.labels),
                    reason=unreadable[index],
                )
            else:
                self.pool.add(accepted)
        self._swept = None  # what is back has missed the last look
        self._progress.training_groups = 0
        await self._outcomes.lost([accepted.verdict for accepted in lost], "unreadable")
        await self.discard(lost)

    # --- giving up ---------------------------------------------------------------------------

    async def drop_stale(self) -> None:
        """Log and delete what has grown too old in the pool."""
        now = (self._progress.policy, self._progress.lineage, self._run.revision)
        if now == self._swept:
            return
        self._swept = now
        stale = self.pool.matching(self._progress.too_old)
        for accepted in stale:  # at once, so that no other task finds it and logs it too
            self.pool.remove(accepted.digest)
        if stale:
            await self._outcomes.stale([accepted.verdict for accepted in stale])
            await self.discard(stale)

    async def discard(self, submissions: list[Accepted]) -> None:
        """Delete submissions whose outcome the log has."""
        digests = [accepted.digest for accepted in submissions]
        for digest in digests:
            self.pool.remove(digest)
        await self._store.drop_accepted(digests)
        for digest in digests:
            await self._disk.remove(path_of(digest))
        await self._forget_old()
        self._progress.changed.touch()

    async def _forget_old(self) -> None:
        """Forget keys and submissions of policies that are too old: their rollouts are stale."""
        youngest = (self._progress.lineage, self._progress.oldest_policy())
        self._taken = {key: taken for key, taken in self._taken.items() if key[:2] >= youngest}
        self._known = {known: at for known, at in self._known.items() if at >= youngest}
        await self._store.drop_keys_before(*youngest)
