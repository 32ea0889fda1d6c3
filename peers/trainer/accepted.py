"""Accepted submissions on this disk: the pool, the batch taken from it, their files, and what
becomes of them in the log."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from peers.trainer.forecast import Forecast
from peers.trainer.pool import Accepted, Pool, SubmissionKey, label_groups, label_old
from peers.trainer.precedence import Refusals
from peers.trainer.progress import Progress
from peers.trainer.state_values import StateValues
from peers.trainer.store import TrainerStore
from swarm.ledger.entries import CheckpointPublished, Consumed, Entry, Outcome, decode
from swarm.node.run_node import RunNode
from swarm.node.trusted import TrustedPart
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Verdict

ACCEPTED = "accepted"
"""Folder of the accepted submissions' files."""


KEPT = "kept"
"""Folder of the consumed submissions of a run that learns nothing: they are what it is for."""

LOG_ENTRIES_READ = 1000
"""Entries of its own log that a starting trainer reads at once."""


def path_of(digest: bytes) -> str:
    """Path of an accepted submission's rollouts in canonical form."""
    return f"{ACCEPTED}/{digest.hex()}.rollouts"


@dataclass(eq=False)
class AcceptedSubmissions:
    """Stores each accepted submission once, and hands them out in batches."""

    peer: RunNode
    store: TrainerStore
    pool: Pool = field(default_factory=Pool)
    in_hand: list[Accepted] = field(default_factory=list)
    """The batch in training."""
    _unsaved: dict[int, list[Accepted]] = field(default_factory=dict)
    """Batches that no durable state includes yet, by step: a crash repeats them, so files stay."""
    grew: float = 0.0
    """When the newest submission was added."""
    _aside: dict[bytes, Accepted | None] = field(default_factory=dict)
    """Submissions, by digest, of the steps that a resumed trainer repeats; None: not found yet."""
    _taken: dict[SubmissionKey, bytes] = field(default_factory=dict)
    """Digest of the file taken under each key, kept until its policy is too old. A worker may send
    different files of the same groups to different validators."""
    _known: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """(lineage, policy) of submissions pooled or consumed, till too old and logged."""
    _swept: tuple[int, int, int] | None = None
    """Policy, lineage and run revision at which stale submissions were last dropped from the pool.
    No submission becomes stale before one of them changes."""

    def __post_init__(self) -> None:
        peer = self.peer
        self.progress, self.forecast = Progress(peer.run), Forecast()
        self.log = TrainerLog(peer, peer.trusted_part("trainer"), self.progress, self.forecast)
        self._disk = peer.node.disk
        self._events = peer.node.events
        self.state_values = StateValues(peer, self.progress)
        self.refusals = Refusals(peer, self.log.trusted, self.progress)

    # --- taking in ---------------------------------------------------------------------------

    def knows(self, digest: bytes) -> bool:
        """Whether a submission was taken in already, or soon will be."""
        return digest in self._known

    def expect(self, verdict: Verdict) -> None:
        """Note that a submission is about to be copied here."""
        self._known[verdict.submission] = (verdict.lineage, verdict.policy)

    def is_second(self, verdict: Verdict) -> bool:
        """Whether another file was already taken under this verdict's key."""
        return self._taken.get(SubmissionKey.of(verdict), verdict.submission) != verdict.submission

    def is_unfit(self, verdict: Verdict) -> bool:
        """Whether an accepted submission may not be trained on (any more)."""
        return self.progress.too_old(verdict) or self.refusals.bind(verdict)

    def hear(self, envelope: Envelope) -> None:
        """Take note of any verdict: a refusal by one validator may bind all of them."""
        if self.refusals.hear(envelope):
            self._swept = None
            self.progress.changed.touch()

    async def take_in(self, envelope: Envelope, verdict: Verdict) -> None:
        """Add a submission whose file is on this disk; durable on return."""
        if self.is_second(verdict) or self.refusals.bind(verdict):
            await self._disk.remove(path_of(verdict.submission))
            await self.log.stale([verdict])
            return
        self._taken[SubmissionKey.of(verdict)] = verdict.submission
        await self.store.keep_accepted(verdict, envelope)
        self._add(verdict)
        if verdict.quarantined:  # other groups must fill their gap
            self.forecast.waste(1)
        if verdict.lineage != self.progress.lineage:  # rolled back meanwhile
            await self.drop_stale()

    def _add(self, verdict: Verdict) -> None:
        manifest = self.progress.versions.manifest_of(verdict.step)
        labels = label_groups(
            verdict, manifest.environments, learns=manifest.objective.needs_spread
        )
        self.forecast.keep_rate.observe(labels)
        digest = verdict.submission
        accepted = Accepted(digest, verdict, path_of(digest), labels, manifest.filters.fill)
        self.state_values.observe(verdict)
        self._put(self._aged(accepted))
        self.grew = self.peer.node.world.now()
        if self.is_unfit(verdict):  # became unfit since the last check
            self._swept = None

    def _aged(self, accepted: Accepted) -> Accepted:
        """The submission as the present step sees it."""
        verdict = accepted.verdict
        environments = self.progress.versions.manifest_of(verdict.step).environments
        return replace(
            accepted, labels=label_old(accepted.labels, verdict, environments, self.progress.step)
        )

    def _put(self, accepted: Accepted) -> None:
        """Add a submission to the pool, or to those of the steps to repeat."""
        if accepted.digest in self._aside:
            self._aside[accepted.digest] = accepted
        else:
            self.pool.add(accepted)

    # --- after a restart ---------------------------------------------------------------------

    def remember_consumed(self, steps: Mapping[bytes, int]) -> int:
        """Remember what each of `steps` consumed before the restart; return how many are known."""
        lineage = self.progress.lineage
        # The step stands for the policy: no policy is newer than the step that consumes it.
        self._known |= {digest: (lineage, step) for digest, step in steps.items()}
        return len(self._known)

    async def load(self) -> None:
        """Read the submissions not consumed before the restart, and the keys that are taken."""
        self._taken = self.store.taken_keys()
        kept, gone, missing = [], [], 0
        used: list[Verdict] = []
        for digest, verdict in self.store.accepted():
            consumed = digest in self._known
            if verdict is not None and consumed and self._is_kept(verdict):
                used.append(verdict)
                continue
            if verdict is None or consumed or not self._disk.exists(path_of(digest)):
                gone.append(digest)
                missing += not consumed
                continue
            self._add(verdict)
            self.expect(verdict)
            kept.append(path_of(digest))
        await self.store.drop_accepted(gone)
        await self._keep(used)
        if missing:  # each is copied again if its validator still announces it
            self._events.emit("trainer.rollouts_missing", submissions=missing)
        for name in self._disk.list(ACCEPTED):  # left by an earlier process
            if f"{ACCEPTED}/{name}" not in kept:
                await self._disk.remove(f"{ACCEPTED}/{name}")

    async def settle_batches(self, consumed: Set[bytes]) -> None:
        """Of batches held by the dead child, delete what is `consumed`, and pool the rest again."""
        batches = [*self._unsaved.values(), self.in_hand]
        held = [accepted for batch in batches for accepted in batch]
        self._unsaved, self.in_hand = {}, []
        for accepted in held:
            if accepted.digest not in consumed:
                self._put(accepted)
        self._swept = None
        await self._retire([each for each in held if each.digest in consumed])

    def set_aside(self, digests: Set[bytes]) -> None:
        """Keep these submissions out of the pool: the trainer repeats the steps that took them."""
        self._aside = dict.fromkeys(sorted(digests))

    def take_again(self, digests: Sequence[bytes]) -> list[Accepted] | None:
        """Take a batch that was trained on before a crash; None if a submission is missing."""
        found = [self._aside.get(digest) for digest in digests]
        batch = [self._aged(accepted) for accepted in found if accepted is not None]
        if len(batch) < len(found):
            return None
        for digest in digests:
            del self._aside[digest]
        self.in_hand = batch
        return batch

    async def give_back(self, logged: Callable[[bytes], bool]) -> None:
        """Return to the pool what was set aside and not repeated; what a log holds is deleted."""
        left = [each for each in [*self._aside.values(), *self.in_hand] if each is not None]
        self._aside, self.in_hand = {}, []
        for accepted in left:
            if not logged(accepted.digest):
                self.pool.add(accepted)
        self._swept = None
        await self.discard([accepted for accepted in left if logged(accepted.digest)])

    # --- giving out --------------------------------------------------------------------------

    def take(self, groups: int) -> list[Accepted]:
        """Take the oldest submissions that together count for `groups` groups, or all of them."""
        before = self.pool.groups
        self.in_hand = self.pool.take(groups)
        self.progress.training_groups = max(groups, before - self.pool.groups)
        return self.in_hand

    def trained(self, step: int) -> None:
        """Note that `step` has trained on the batch in hand."""
        self._unsaved[step] = self.in_hand
        self.in_hand = []

    async def saved(self, step: int) -> None:
        """Retire the batches of steps before `step`, now in its durable state and in the log."""
        done = [number for number in self._unsaved if number < step]
        await self._retire([accepted for number in done for accepted in self._unsaved.pop(number)])
        await self.store.drop_batches_before(self.progress.lineage, step - 1)

    async def forget_unsaved(self) -> None:
        """Delete the batches of an abandoned lineage, which are in the log."""
        batches, self._unsaved = list(self._unsaved.values()), {}
        await self.discard([accepted for batch in batches for accepted in batch])

    async def leave_out(self, unreadable: Mapping[int, str]) -> None:
        """Drop what the child could not read (reasons by index); the pool takes the rest back."""
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
        self._swept = None  # the returned submissions missed the last check
        self.progress.training_groups = 0
        await self.log.lost([accepted.verdict for accepted in lost], "unreadable")
        await self.discard(lost)

    # --- giving up ---------------------------------------------------------------------------

    async def drop_stale(self) -> None:
        """Log and delete the pool's submissions that may no longer be trained on."""
        # Again if one arrived, or the run moved on, while the others were being logged.
        while (now := (self.progress.step, self.progress.lineage, self.peer.run.revision)) != (
            self._swept
        ):
            self._swept = now
            for accepted in self.pool.oldest_first():
                self.pool.add(self._aged(accepted))
            stale = self.pool.matching(self.is_unfit)
            for accepted in stale:  # before the first await, so that no other task logs it too
                self.pool.remove(accepted.digest)
                self.state_values.withdraw(accepted.digest)
            if stale:
                await self.log.stale([accepted.verdict for accepted in stale])
                await self.discard(stale)

    async def _retire(self, consumed: list[Accepted]) -> None:
        """Delete consumed submissions, or keep them if their run learns nothing."""
        kept = [each.verdict for each in consumed if self._is_kept(each.verdict)]
        await self._keep(kept)
        digests = {verdict.submission for verdict in kept}
        await self.discard([each for each in consumed if each.digest not in digests])

    def _is_kept(self, verdict: Verdict) -> bool:
        return not self.progress.versions.manifest_of(verdict.step).objective.learns

    async def _keep(self, verdicts: Sequence[Verdict]) -> None:
        """Move the files and verdicts of consumed submissions to those that stay."""
        for verdict in verdicts:
            name = path_of(verdict.submission)
            if self._disk.exists(name):  # or it was moved before a crash
                await self._disk.rename(name, name.replace(ACCEPTED, KEPT, 1))
        await self.store.keep_consumed([verdict.submission for verdict in verdicts])

    async def discard(self, submissions: list[Accepted]) -> None:
        """Delete submissions whose outcome is logged."""
        digests = [accepted.digest for accepted in submissions]
        for digest in digests:
            self.pool.remove(digest)
        await self.store.drop_accepted(digests)
        for digest in digests:
            await self._disk.remove(path_of(digest))
        await self._forget_old()
        self.progress.changed.touch()

    async def _forget_old(self) -> None:
        """Forget keys and submissions of policies that are too old: their rollouts are stale.

        A submission is remembered until a log has its outcome: that of a step is logged only after
        the next policy is durable, and a verdict heard again must not make it stale before that."""
        youngest = (self.progress.lineage, self.progress.oldest_policy())
        self._taken = {key: taken for key, taken in self._taken.items() if key[:2] >= youngest}
        self._known = {
            known: at
            for known, at in self._known.items()
            if at >= youngest or not self.log.settled(known)
        }
        await self.store.drop_keys_before(*youngest)
        self.refusals.forget_before(*youngest)


@dataclass(eq=False)
class TrainerLog:
    """Logs policies, and submissions consumed, carried, stale, unreadable; durable on return."""

    peer: RunNode
    trusted: TrustedPart
    progress: Progress
    forecast: Forecast
    left_out: Counter[str] = field(default_factory=Counter)
    """Accepted groups that this process did not train on, by reason."""

    def entries(self, owner: PeerId) -> Iterator[Entry]:
        """All entries of `owner`'s log that are not pruned, oldest first."""
        log = self.trusted.log_of(owner)
        assert log is not None
        for start in range(log.start(), log.size(), LOG_ENTRIES_READ):
            for raw in log.entries(start, LOG_ENTRIES_READ):
                yield decode(raw)

    async def policies(self) -> dict[tuple[int, int], bytes]:
        """Digests of the policies that trusted peers' logs list as published, by (lineage, step)"""
        await self.trusted.restored()
        manifest = self.peer.run.manifest
        await self.trusted.catch_up([*manifest.trainer_ids(), *manifest.standby_ids()])
        return {
            (entry.lineage, entry.step): entry.manifest
            for owner in self.peer.run.manifest.trusted_ids()
            for entry in self.entries(PeerId(owner))
            if isinstance(entry, CheckpointPublished)
        }

    def settled(self, submission: bytes) -> bool:
        """Whether a log holds a submission's final outcome; `carried` is not final."""
        return self.trusted.tables.is_used(submission)

    async def consumed(self, entries: Sequence[Consumed]) -> None:
        """Log the submissions that a step has trained on, unless a log holds them already."""
        await self.trusted.append([e for e in entries if not self.settled(e.submission)])

    async def complete(self, missing: Sequence[Consumed]) -> None:
        """Log submissions trained on before a crash that came after the state, before the log."""
        if missing:
            await self.consumed(missing)
            self.peer.node.events.emit("trainer.log_completed", submissions=len(missing))

    async def carried(self, submissions: Sequence[Accepted]) -> None:
        """Log the submissions that the pool still holds when the run ends."""
        await self._log([accepted.verdict for accepted in submissions], "carried")

    async def stale(self, verdicts: Sequence[Verdict]) -> None:
        """Log submissions that may no longer be trained on, mostly because they are too old."""
        await self.lost(verdicts, "stale")
        self.peer.node.events.emit("trainer.stale_dropped", submissions=len(verdicts))

    async def lost(
        self, verdicts: Sequence[Verdict], outcome: Literal["stale", "unreadable"]
    ) -> None:
        """Log submissions of no step: they spent quota, so the next order must allow more."""
        await self._log([each for each in verdicts if not self.settled(each.submission)], outcome)
        self.left_out[outcome] += sum(len(verdict.rewards) for verdict in verdicts)
        lineage = self.progress.lineage  # the orders of an older one are closed
        self.forecast.waste(sum(verdict.lineage >= lineage for verdict in verdicts))

    def filtered(self, batch: Sequence[Accepted]) -> None:
        """Count the groups of a batch that the online filter leaves out."""
        for accepted in batch:
            self.left_out.update(label for label in accepted.labels if label != "kept")

    async def _log(self, verdicts: Sequence[Verdict], outcome: Outcome) -> None:
        step = self.progress.step
        await self.trusted.append(
            [
                Consumed(
                    step=step, submission=each.submission, outcomes=[outcome] * len(each.rewards)
                )
                for each in verdicts
            ]
        )
