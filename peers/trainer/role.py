"""The trainer role: open steps, collect accepted submissions, train, publish.

Three tasks. *Collect* turns the validators' words into a durable pool of accepted submissions.
*Arrange* keeps the right step open. *Train* takes a batch from the pool, steps the optimiser in a
child process, and publishes the new policy: weights, optimiser, random states and the list of
consumed submissions are durable before anything is announced, so a crash at any instant loses
nothing and repeats nothing.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec
import trio

from peers.trainer.alarms import RECENT_STEPS, Alarm, Alarms
from peers.trainer.filters import (
    KeepRate,
    Verdicts,
    environment_rewards,
    groups_to_ask_for,
    judge_groups,
)
from peers.trainer.options import trainer_options
from swarm import defaults
from swarm.envelope import Dropped, Envelope, open_envelope
from swarm.errors import PeerError, SwarmError, UserError
from swarm.gossip.topics import RUN, WORK
from swarm.identity import PeerId
from swarm.ledger.entries import CheckpointPublished, Consumed, Entry, decode
from swarm.ledger.wire import open_ledger
from swarm.messages import Acknowledgement, Checkpoint, RunManifest, StepOrder, Verdict
from swarm.node.run_node import RunNode
from swarm.observable import STARVED_SECONDS, Observable
from swarm.run.bounds import check_batch
from swarm.run.manifest import content_digest, manifest_in
from swarm.transport import BlobReference, FetchError, Source
from swarm.world import Child, ChildDied
from swarm.world.restarts import Restarts

TRAIN_DEADLINE_SECONDS = 24 * 3600.0
START_DEADLINE_SECONDS = 600.0
"""For the child to import torch and, under `torchrun`, to meet all other ranks."""
EVALUATE_PROMPTS = 512
ACCEPTED = "accepted"
STATES = "trainer/states"
ANCHORS_KEPT = 3
"""States kept, further apart, for a rollback to go back to."""
ANCHORS_EVERY = 10
"""Steps between those, where a rollback may need them and nothing else is said."""
PAUSED_SECONDS = 600.0
"""A paused trainer repeats why so often."""
UNJUDGED_SECONDS = 60.0
"""An announced submission without a verdict is no longer counted on after this."""

FETCH_ATTEMPTS = 5
"""Failures after which an accepted submission is no longer counted on (but still asked for)."""
FETCH_PAUSE_SECONDS_MAX = 5.0
STEPS_REMEMBERED = 512
"""Steps whose version of the run is remembered: rollouts of the last `max_staleness` (at most 256)
may still be trained on, and a few more steps are open."""
LOG_ENTRIES_READ = 1000
"""Entries of the own log read at once, when the trainer starts."""
FINAL_WORD_SECONDS = 2.0
"""How long the last order is left to spread before the trainer leaves."""

JUDGED_MAX = 10_000
"""Judged submissions remembered, so that a late acknowledgement is not waited for."""


Number = tuple[int, int, int, int, str]
"""What a submission stands under: (lineage, policy, step, number, worker)."""


@dataclass
class _Announced:
    """A submission that a validator has, and that waits for its verdict."""

    groups: int
    heard: float


@dataclass(frozen=True)
class Accepted:
    """An accepted submission in the pool, its file on this disk."""

    digest: bytes
    verdict: Verdict
    path: str
    groups: list[Verdicts] = field(default_factory=list)
    """What the online filter says of each group."""
    fill: Literal["drop", "refill"] = "drop"
    """Of the filter."""

    @property
    def counted(self) -> int:
        """Groups that count towards a batch."""
        return self.groups.count("kept") if self.fill == "refill" else len(self.groups)

    @property
    def place(self) -> tuple[int, int, str]:
        """Order of consumption: oldest policy first, then by step, number and worker."""
        return (self.verdict.step, self.verdict.number, self.verdict.worker)


class Pool:
    """Accepted submissions that wait to be trained on; how many groups they count for is known at
    any time, since it is asked after each verdict."""

    def __init__(self, count: Callable[[Accepted], int]) -> None:
        """`count`: groups of one that count towards a batch."""
        self._count = count
        self._entries: dict[bytes, Accepted] = {}
        self.groups = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, accepted: Accepted) -> None:
        self.remove(accepted.digest)
        self._entries[accepted.digest] = accepted
        self.groups += self._count(accepted)

    def remove(self, digest: bytes) -> None:
        """Nothing happens if it is not there."""
        accepted = self._entries.pop(digest, None)
        if accepted is not None:
            self.groups -= self._count(accepted)

    def take(self, groups: int) -> list[Accepted]:
        """Remove the oldest that have so many groups together, or all."""
        taken: list[Accepted] = []
        left = self.groups - groups
        for accepted in self.oldest_first():
            if self.groups <= left:
                break
            taken.append(accepted)
            self.remove(accepted.digest)
        return taken

    def oldest_first(self) -> list[Accepted]:
        return sorted(self._entries.values(), key=lambda accepted: accepted.place)

    def those(self, matches: Callable[[Verdict], bool]) -> list[Accepted]:
        """Those whose verdict matches."""
        return [each for each in self._entries.values() if matches(each.verdict)]


class TrainerRole:
    """Trains. Must run on a peer whose key the manifest names as a trainer.

    Its options are those of `peers.trainer.options`.
    """

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)
    rank_module: ClassVar[str] = "peers.trainer.follower"

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._node = peer.node
        self._run = peer.run
        self._events = peer.node.events
        self._disk = peer.node.disk
        self._trusted = peer.trusted_part("trainer")
        self._database = self._disk.database("trainer.sqlite")
        self._options = trainer_options(peer.node.settings.options)
        check_batch(self._run.manifest, f"run {self._run.id}")
        self._alarms = Alarms(self._options.limits)
        self._rollbacks = 0
        """In this life."""
        self._paused = ""
        """Why no step is opened any more."""
        self._began_ms = peer.node.world.wall_time() * 1000
        self._ungraded: Counter[str] = Counter()
        """Submissions in a row, by validator, that its environment could not grade."""
        self._fed = 0.0
        """When the pool grew last, or a batch was begun to be waited for."""
        self._said = self._asked = 0.0
        """When it was said last that it did not, and when the order was revised for that."""
        self._idle = {"rollouts": 0.0, "checks": 0.0}
        """Seconds that this step's batch was waited for, by what was missing."""
        self._lineage = 0
        self._published: dict[int, tuple[bytes, int]] = {}
        """Manifest digest and size by policy."""
        self._logged_policies: set[int] = set()
        """Policies that stand in the log as published."""
        self._policy = Observable(-1)
        """Newest policy published."""
        self._pool = Pool(lambda accepted: accepted.counted)
        self._followed: dict[int, Envelope] = {}
        """The run manifest that each step of this lineage follows: the newest when it was opened,
        or when its batch was begun. The last `STEPS_REMEMBERED` steps."""
        self._taught: Envelope | None = None
        """The run manifest that the child learns by."""
        self._oldest = 0
        """The oldest policy of this lineage that was young enough: what was too old once stays so,
        whatever `max_staleness` becomes."""
        self._swept: tuple[int, int, int] | None = None
        """When the pool was last freed of what is too old: as of which policy, lineage and revision
        of the run. Nothing in it grows too old before one of them changes."""
        self._announced: dict[tuple[str, bytes], _Announced] = {}
        """Submissions that a validator has and none has judged yet, by worker and digest: nobody
        else's word on a file counts."""
        self._judged: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        """The last ones judged: their acknowledgement may come after the verdict."""
        self._numbers: dict[Number, bytes] = {}
        """Which file was taken under each number, while its policy is young enough: a worker may
        hand several to several validators, and they hold the same groups."""
        self._known: dict[bytes, tuple[int, int]] = {}
        """Submissions that are in the pool or were consumed, and their (lineage, policy), while
        that is young enough: what is older can only be stale, and the log knows it."""
        self._fetching: set[bytes] = set()
        self._exported = ""
        """Folder of the newest policy this life has exported."""
        self._training_groups = 0
        """Groups of the batch in training, which are not in the pool any more."""
        self._in_hand: list[Accepted] = []
        """That batch."""
        self._carried = False
        """Whether the log says what was left in the pool when the run was over."""
        self._restarts = Restarts(self._events, "trainer")
        self._begun = False
        """Whether the states on this disk are this life's to go on from."""
        self._ranks = 1
        """Processes that train together: the child, and others that it cannot start again."""
        self._keep_rate = KeepRate()
        self._judged_since_order = 0
        """Verdicts heard since the newest order or revision."""
        self._wasted_since_order = 0
        """Submissions since then that serve no batch: their workers' quota is spent."""
        self._left_out: Counter[str] = Counter()
        """Accepted groups that were not trained on in this life, by reason."""
        self._changed = Observable(0)
        self._order: StepOrder | None = None
        self._ordering = trio.Lock()
        """Held while an order is issued, and while the lineage changes."""
        self._send_verdict, self._verdicts = trio.open_memory_channel[Envelope](
            defaults.VERDICTS_HELD_MAX
        )
        self._missed: Observable[dict[tuple[str, str], int]] = Observable({})
        """Accepted work that there was no room to hear of while this trainer loaded: by validator
        and worker, from where in the validator's log."""
        peer.gossip.listen(Acknowledgement, self._on_acknowledgement)
        peer.gossip.listen(Verdict, self._on_verdict)
        peer.gossip.listen(RunManifest, lambda _: self._changed.touch())

    async def run(self) -> None:
        """Train until every step of the run is done."""
        await self._open_database()
        async with trio.open_nursery() as nursery:
            await self._restarts.run(lambda: self._live(nursery))
            nursery.cancel_scope.cancel()

    async def _live(self, nursery: trio.Nursery) -> None:
        """Train for as long as the child lives, from its newest durable state; all else goes on
        in `nursery`."""
        try:
            async with self._node.compute.child(
                "peers.trainer.service:open_service",
                name="trainer",
                start_deadline_seconds=START_DEADLINE_SECONDS,
            ) as learner:
                await self._start(learner)
                if self._order is None:
                    await self._load_pool()
                    await self._open_again()
                    nursery.start_soon(self._collect)
                    nursery.start_soon(self._hear_missed)
                    nursery.start_soon(self._arrange)
                    nursery.start_soon(self._forget_unjudged)
                await self._train(learner)
                await self._finish(learner)
        except ChildDied as error:
            if self._ranks > 1:
                raise SwarmError(f"{error}; torchrun starts all ranks together again") from error
            raise

    # --- starting and resuming ---------------------------------------------------------------

    async def _open_database(self) -> None:
        def create(connection: Any) -> None:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS accepted "
                "(digest BLOB PRIMARY KEY, verdict BLOB NOT NULL)"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS numbers (lineage INTEGER, policy INTEGER, "
                "step INTEGER, number INTEGER, worker TEXT, digest BLOB NOT NULL, "
                "PRIMARY KEY (lineage, policy, step, number, worker)) WITHOUT ROWID"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS orders (lineage INTEGER, step INTEGER, "
                "revision INTEGER, message BLOB NOT NULL, PRIMARY KEY (lineage, step))"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY, reward REAL NOT NULL, "
                "consumed BLOB NOT NULL)"
            )

        await self._database.transact(create)

    async def _start(self, learner: Child) -> None:
        """Begin the run from the base policy, or go on from the newest durable state."""
        states = self._states()
        options = self._options
        if states:
            if states[-1][0] != self._lineage:
                self._followed.clear()
            self._lineage = states[-1][0]
            self._remember_followed()
        self._taught = self._follow(states[-1][1] if states else 0)
        manifest = manifest_in(self._taught)
        arguments: dict[str, Any] = {
            **_lessons(manifest),
            "environments": manifest.environments,
            "seed": options.seed,
            "model": options.model,
            "sharding": options.sharding,
            "attention": options.attention,
        }
        if states and not self._node.settings.resume and not self._begun:
            raise UserError(
                f"this home has a trained state of step {states[-1][1]} already; "
                "start the trainer with --resume, or with another --home"
            )
        self._peer.status.doing = "loading"
        self._begun = True
        self._exported = ""
        self._published.clear()
        for lineage, step in self._peer.store.complete():
            held = self._peer.store.held((lineage, step))
            if held is not None and lineage == self._lineage:
                self._published[step] = (held.digest, held.manifest_bytes)
        recording = await learner.call(
            "record_to",
            {
                "tensorboard": options.tensorboard,
                "wandb": options.wandb,
                "run": self._run.id,
                "config": _plain(manifest.objective)
                | _plain(manifest.optimiser)
                | _plain(manifest.schedule),
                "peak_flops": options.peak_flops,
            },
            deadline_seconds=TRAIN_DEADLINE_SECONDS,
        )
        self._ranks = recording["ranks"]
        if states:
            await self._resume(learner, arguments, states[-1])
        else:
            if options.prepare_base:
                await self._prepare_base(learner, options.model, options.seed)
            await learner.call("start", arguments, deadline_seconds=TRAIN_DEADLINE_SECONDS)
            await self._begin_save(learner, 0)
            await self._finish_save(learner)
            await self._publish(learner, 0, reward=0.0)

    async def _prepare_base(self, learner: Child, folder: str, seed: int) -> None:
        self._peer.status.doing = "preparing the base policy"
        measured = await learner.call(
            "prepare_base",
            {"folder": folder, "seed": seed},
            deadline_seconds=TRAIN_DEADLINE_SECONDS,
        )
        self._events.emit("trainer.evaluated", moment="before", **measured)

    def _published_folders(self) -> dict[str, str]:
        """Policies of this lineage that are on this disk, by step."""
        return {
            str(step): str(self._disk.local_path(held.folder))
            for step in self._published
            if (held := self._peer.store.held((self._lineage, step))) is not None
        }

    async def _resume(
        self, learner: Child, arguments: dict[str, Any], newest: tuple[int, int]
    ) -> None:
        state = newest[1]
        resumed = await learner.call(
            "resume",
            {
                **arguments,
                "folder": str(self._disk.local_path(_state_path(newest))),
                "policies": self._published_folders(),
            },
            deadline_seconds=TRAIN_DEADLINE_SECONDS,
        )
        oldest = state - self._run.manifest.schedule.max_staleness
        logged: dict[bytes, int] = {}
        """At which step; of those only that may be offered again: the others are too old."""
        self._logged_policies.clear()
        for entry in self._own_entries():
            if isinstance(entry, CheckpointPublished):
                if entry.lineage == self._lineage:
                    self._logged_policies.add(entry.step)
            elif isinstance(entry, Consumed) and set(entry.outcomes) != {"carried"}:
                logged |= {entry.submission: entry.step} if entry.step >= oldest else {}
        consumed = {bytes.fromhex(digest) for digest in resumed["consumed"]}
        steps = dict.fromkeys(consumed, state) | logged  # no policy is newer than its step
        self._known |= {digest: (self._lineage, step) for digest, step in steps.items()}
        self._events.emit("trainer.resumed", step=state, consumed=len(self._known))
        rows = self._database.read(
            "SELECT reward, consumed FROM steps WHERE step = ? ORDER BY step", (state,)
        )
        reward = 0.0
        if rows:
            reward = rows[0][0]
            entries = msgspec.msgpack.decode(rows[0][1], type=list[Consumed])
            await self._log_missing([e for e in entries if e.submission not in logged])
        await self._take_back(consumed)
        await self._publish(learner, state, reward=reward)

    async def _take_back(self, consumed: set[bytes]) -> None:
        """Settle the batch over which the child died: trained on, or back in the pool."""
        batch, self._in_hand = self._in_hand, []
        for accepted in batch:
            if accepted.digest not in consumed:
                self._pool.add(accepted)
        self._swept = None
        await self._drop_consumed([each for each in batch if each.digest in consumed])

    def _own_entries(self) -> Iterator[Entry]:
        """This trainer's log, from its beginning."""
        log = self._trusted.log_of(self._peer.peer_id)
        assert log is not None
        for start in range(0, log.size(), LOG_ENTRIES_READ):
            for raw in log.entries(start, LOG_ENTRIES_READ):
                yield decode(raw)

    async def _log_missing(self, entries: list[Consumed]) -> None:
        """Log what was trained on just before this peer died, between state and log."""
        if entries:
            await self._trusted.append(list(entries))
            self._events.emit("trainer.log_completed", submissions=len(entries))

    def _states(self) -> list[tuple[int, int]]:
        """(lineage, step) of the training states on disk, whole ones only."""
        parts = [name.split("-") for name in self._disk.list(STATES)]
        return sorted(
            (int(part[0]), int(part[1]))
            for part in parts
            if len(part) == 2 and part[0].isdigit() and part[1].isdigit()
        )

    async def _load_pool(self) -> None:
        """Accepted submissions that were not consumed before the restart, and the numbers taken."""
        for *number, digest in self._database.read(
            "SELECT lineage, policy, step, number, worker, digest FROM numbers "
            "ORDER BY lineage, policy, step, number, worker"
        ):
            self._numbers[(number[0], number[1], number[2], number[3], number[4])] = digest
        kept = []
        for digest, raw in self._database.read(
            "SELECT digest, verdict FROM accepted ORDER BY digest"
        ):
            verdict = open_envelope(raw).message
            assert isinstance(verdict, Verdict)
            if digest not in self._known and self._disk.exists(_path(digest)):
                self._add_to_pool(digest, verdict)
                self._known[digest] = (verdict.lineage, verdict.policy)
                kept.append(_path(digest))
        for name in self._disk.list(ACCEPTED):  # what a life before did not come to remove
            if f"{ACCEPTED}/{name}" not in kept:
                await self._disk.remove(f"{ACCEPTED}/{name}")

    def _add_to_pool(self, digest: bytes, verdict: Verdict) -> None:
        manifest = self._manifest_of(verdict.step)
        groups = judge_groups(verdict, manifest.environments)
        self._keep_rate.observe(groups)
        self._pool.add(Accepted(digest, verdict, _path(digest), groups, manifest.filters.fill))
        self._fed = self._node.world.now()
        if self._too_old(verdict):  # since it was looked at last
            self._swept = None

    # --- collecting --------------------------------------------------------------------------

    def _on_acknowledgement(self, envelope: Envelope) -> None:
        message = envelope.message
        assert isinstance(message, Acknowledgement)
        key = (message.worker, message.submission)
        if key not in self._judged and message.lineage == self._lineage:
            self._announced.setdefault(key, _Announced(message.groups, self._node.world.now()))
            self._changed.touch()

    def _on_verdict(self, envelope: Envelope) -> None:
        verdict = envelope.message
        assert isinstance(verdict, Verdict)
        try:
            self._send_verdict.send_nowait(envelope)
        except trio.WouldBlock:
            if verdict.outcome == "accepted":
                if not self._missed.value:
                    self._events.emit("trainer.verdicts_missed", held=defaults.VERDICTS_HELD_MAX)
                self._miss(envelope.sender, verdict.worker, max(0, verdict.log_index))

    def _miss(self, validator: str, worker: str, index: int) -> None:
        earlier = self._missed.value.get((validator, worker), index)
        self._missed.value[validator, worker] = min(earlier, index)
        self._missed.touch()

    async def _hear_missed(self) -> None:
        """Read in the validators' logs what was missed."""
        while True:
            missed = await self._missed.wait_until(bool)
            (validator, worker), start = next(iter(missed.items()))
            del missed[validator, worker]
            try:
                await self._node.reach(PeerId(validator))
                async with open_ledger(self._node.transport, PeerId(validator)) as client:
                    page = await client.verdicts(worker, start)
                heard = [open_envelope(item.envelope) for item in page]
            except (PeerError, Dropped) as error:
                self._events.emit("ledger.mirror_failed", owner=validator, reason=str(error))
                self._miss(validator, worker, start)  # after the others
                await trio.sleep(defaults.LEDGER_RETRY_SECONDS)
                continue
            for envelope in heard:
                verdict = envelope.message
                if (
                    envelope.body.run == self._run.id
                    and isinstance(verdict, Verdict)
                    and verdict.outcome == "accepted"
                    and self._run.permits(envelope.sender, verdict) is None
                ):
                    await self._send_verdict.send(envelope)
            if page and page[-1].index >= start:
                self._miss(validator, worker, page[-1].index + 1)

    async def _collect(self) -> None:
        async with trio.open_nursery() as nursery:
            async for envelope in self._verdicts:
                verdict = envelope.message
                assert isinstance(verdict, Verdict)
                key = (verdict.worker, verdict.submission)
                self._judged[key] = None
                self._judged_since_order += 1
                self._wasted_since_order += verdict.outcome != "accepted"
                if len(self._judged) > JUDGED_MAX:
                    self._judged.popitem(last=False)
                reason = self._no_grades(envelope)
                if reason and not self._paused:
                    nursery.start_soon(self._pause, reason)
                if verdict.outcome == "accepted" and self._is_new(verdict):
                    self._known[verdict.submission] = (verdict.lineage, verdict.policy)
                    self._fetching.add(verdict.submission)
                    nursery.start_soon(self._take, envelope, verdict)
                else:
                    self._announced.pop(key, None)
                    self._changed.touch()

    def _is_new(self, verdict: Verdict) -> bool:
        """Whether nothing was done yet about an accepted submission."""
        digest = verdict.submission
        if digest in self._known or digest in self._fetching:
            return False
        return not (self._too_old(verdict) and self._trusted.used(digest))

    def _no_grades(self, envelope: Envelope) -> str:
        """Why a run must pause in which no validator can grade any more; empty: one still can.

        Their word of an earlier life of this trainer is no reason: a person has restarted it.
        """
        verdict = envelope.message
        assert isinstance(verdict, Verdict)
        if envelope.body.issued_ms < self._began_ms:
            return ""
        if verdict.failed == "environment":
            self._ungraded[envelope.sender] += 1
        elif verdict.outcome == "accepted":
            self._ungraded[envelope.sender] = 0
        validators = self._run.manifest.validator_ids()
        heard = [self._ungraded[each] for each in validators if each in self._ungraded]
        if not heard or min(heard) < defaults.UNGRADED_MAX:
            return ""
        return f"no validator can grade: {verdict.detail}"

    async def _take(self, envelope: Envelope, verdict: Verdict) -> None:
        try:
            await self._take_in(envelope, verdict)
        finally:
            self._fetching.discard(verdict.submission)

    async def _take_in(self, envelope: Envelope, verdict: Verdict) -> None:
        """Copy an accepted submission here, durably, and put it into the pool. One that cannot
        be had, or is heard of, only when it is too old is stale."""
        validator = PeerId(envelope.sender)
        key = (verdict.worker, verdict.submission)
        path = _path(verdict.submission)
        reference = BlobReference(verdict.submission, verdict.size_bytes)
        attempt = 0
        while True:
            if self._too_old(verdict) or self._is_second(verdict):
                await self._log_stale([verdict])
                self._announced.pop(key, None)
                self._changed.touch()
                return
            try:
                await self._node.reach(validator)
                record = self._node.record(validator)
                source = Source(validator, tuple(record.bulk_addresses) if record else ())
                sink = self._disk.sink(path, 0, verdict.size_bytes)
                piece = await self._node.transport.fetch(source, reference, sink)
                if not piece.verify(verdict.submission):
                    sink.abandon()
                    raise FetchError(f"{validator} sent other bytes than it judged")
                await sink.commit(piece)
                await self._disk.sync(path)
                break
            except PeerError as error:
                self._events.emit(
                    "trainer.fetch_failed", validator=validator, attempt=attempt, reason=str(error)
                )
                attempt += 1
                if attempt == FETCH_ATTEMPTS:  # others shall make up for it
                    self._announced.pop(key, None)
                    self._wasted_since_order += 1
                    self._changed.touch()
                await trio.sleep(min(FETCH_PAUSE_SECONDS_MAX, 0.2 * 2 ** min(attempt, 10)))
        number = _number(verdict)
        if self._is_second(verdict):  # the other one was quicker
            await self._disk.remove(path)
            await self._log_stale([verdict])
            return
        self._numbers[number] = verdict.submission

        def keep(connection: Any) -> None:
            connection.execute(
                "INSERT OR REPLACE INTO accepted (digest, verdict) VALUES (?, ?)",
                (verdict.submission, envelope.raw),
            )
            connection.execute(
                "INSERT OR IGNORE INTO numbers (lineage, policy, step, number, worker, digest) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (*number, verdict.submission),
            )

        await self._database.transact(keep)
        self._add_to_pool(verdict.submission, verdict)
        if verdict.lineage != self._lineage:  # given up meanwhile
            await self._drop_stale()
        self._announced.pop(key, None)
        self._changed.touch()

    async def _forget_unjudged(self) -> None:
        """Stop counting on submissions that no validator has judged for long."""
        while True:
            await trio.sleep(UNJUDGED_SECONDS / 10)
            now = self._node.world.now()
            late = [
                key
                for key, announced in self._announced.items()
                if now - announced.heard > UNJUDGED_SECONDS
            ]
            for key in late:
                del self._announced[key]
            if late:
                self._wasted_since_order += len(late)
                self._events.emit("trainer.unjudged_forgotten", submissions=len(late))
                self._changed.touch()

    # --- which version of the run a step follows ---------------------------------------------

    def _follow(self, step: int) -> Envelope:
        """The run manifest that a step follows, from now on in any case."""
        followed = self._followed.setdefault(step, self._run.manifest_envelope)
        while len(self._followed) > STEPS_REMEMBERED:
            del self._followed[min(self._followed)]
        return followed

    def _manifest_of(self, step: int) -> RunManifest:
        """The run manifest that a step follows; the newest, if it was not opened yet."""
        return manifest_in(self._followed.get(step, self._run.manifest_envelope))

    def _remember_followed(self) -> None:
        """What the orders of a life before say of that."""
        for (raw,) in self._database.read(
            "SELECT message FROM orders WHERE lineage = ? ORDER BY step DESC LIMIT ?",
            (self._lineage, STEPS_REMEMBERED),
        ):
            order = msgspec.msgpack.decode(raw, type=StepOrder)
            followed = self._run.version(order.run_digest)
            if followed is not None:
                self._followed[order.step] = followed

    async def _teach(self, learner: Child, followed: Envelope) -> None:
        """Have the child learn by this version of the run."""
        if followed is not self._taught:
            await learner.call(
                "follow", _lessons(manifest_in(followed)), deadline_seconds=TRAIN_DEADLINE_SECONDS
            )
            self._taught = followed

    # --- arranging steps ---------------------------------------------------------------------

    def _missing_groups(self, step: int) -> int:
        """Groups still to be made for the batches of every step up to `step`.

        With `fill = "refill"` a batch is what the filter keeps, so more are made than are missing.
        """
        last = min(step, self._run.manifest.schedule.steps - 1)
        needed = sum(
            self._manifest_of(each).schedule.groups_per_step
            for each in range(self._policy.value, last + 1)
        )
        there = self._training_groups + self._pool.groups
        keep_rate = self._keep_rate.value if self._refills(step) else 1.0
        return groups_to_ask_for(needed - there, keep_rate, self._coming())

    def _refills(self, step: int) -> bool:
        return self._manifest_of(step).filters.fill == "refill"

    def _coming(self) -> int:
        """Groups that are announced and not yet judged."""
        return sum(each.groups for each in self._announced.values())

    async def _open_again(self) -> None:
        """Open the first step, or, after a restart, the one that was open."""
        rows = self._database.read(
            "SELECT message FROM orders WHERE lineage = ? ORDER BY step DESC LIMIT 1",
            (self._lineage,),
        )
        if rows:
            held = msgspec.msgpack.decode(rows[0][0], type=StepOrder)
            await self._issue(held.step, self._missing_groups(held.step), held)
        else:
            first = self._policy.value  # 0, but for a lineage just begun
            await self._issue(first, self._missing_groups(first), None)

    async def _arrange(self) -> None:
        """Keep exactly one step open: the oldest whose batch is not on its way yet."""
        while True:
            async with self._ordering:
                issued = await self._issue_if_due()
            if not issued:
                await self._changed.wait_change()

    async def _issue_if_due(self) -> bool:
        """Issue the order that the state of things asks for; whether there was one."""
        order = self._order
        assert order is not None
        if order.final:
            return False
        if self._paused:
            if order.groups_wanted == 0:
                return False
            await self._issue(order.step, 0, order)
            return True
        missing = self._missing_groups(order.step)
        if not self._published:
            return False  # its child died as it began a new lineage
        following = order.step + 1
        spare = self._manifest_of(order.step).sampling.groups_per_submission
        refill = self._refills(order.step)
        wasted = self._wasted_since_order + (self._judged_since_order if refill else 0)
        if missing == 0 and self._may_open(following):
            await self._issue(following, self._missing_groups(following), None)
        elif (
            (missing == 0) != (order.groups_wanted == 0)
            or missing > order.groups_wanted + spare
            or (missing > 0 and self._coming() == 0 and wasted > 0)
        ):
            await self._issue(order.step, missing, order)
        else:
            return False
        return True

    def _may_open(self, step: int) -> bool:
        steps = self._run.manifest.schedule.steps
        return step < steps and self._policy_for(step) <= self._policy.value

    def _policy_for(self, step: int) -> int:
        """The policy that step's rollouts come from: a new lineage begins with its first, and none
        goes back to an older one than the step before, however asynchrony grows."""
        order = self._order
        before = order.policy if order is not None and order.lineage == self._lineage else 0
        asynchrony = self._manifest_of(step).schedule.asynchrony
        return max(min(self._published), step - asynchrony, before)

    async def _issue(self, step: int, missing: int, revised: StepOrder | None) -> None:
        """Sign and announce an order; durable first, so that a restart keeps its nonce."""
        policy = revised.policy if revised else self._policy_for(step)
        digest, size = self._published[policy]
        followed = self._follow(step)
        manifest = manifest_in(followed)
        await self._peer.versions.store()  # before one is named
        submissions = -(-missing // manifest.sampling.groups_per_submission)
        if revised and manifest.filters.fill == "refill":
            submissions = min(1, submissions)  # more of everybody, rather than much of the fastest
        self._judged_since_order = self._wasted_since_order = 0
        order = StepOrder(
            lineage=self._lineage,
            step=step,
            revision=revised.revision + 1 if revised else 0,
            policy=policy,
            manifest_digest=digest,
            manifest_bytes=size,
            nonce=revised.nonce if revised else self._node.world.secret_bytes(32),
            groups_wanted=missing,
            submissions_max=(revised.submissions_max if revised else 0) + submissions,
            run_version=manifest.version,
            run_digest=content_digest(followed),
        )
        await self._database.transact(
            lambda connection: connection.execute(
                "INSERT OR REPLACE INTO orders (lineage, step, revision, message) "
                "VALUES (?, ?, ?, ?)",
                (order.lineage, order.step, order.revision, msgspec.msgpack.encode(order)),
            )
        )
        self._order = order
        await self._peer.announce(order, defaults.STATE_LIFETIME_SECONDS)
        self._peer.status.step = step
        self._events.emit(
            "trainer.step_opened",
            step=step,
            policy=policy,
            groups_wanted=missing,
            revision=order.revision,
        )

    # --- training ----------------------------------------------------------------------------

    def _is_second(self, verdict: Verdict) -> bool:
        """Whether another file was taken under the number of this one."""
        first = self._numbers.get(_number(verdict), verdict.submission)
        return first != verdict.submission

    def _too_old(self, verdict: Verdict) -> bool:
        """Whether it may no longer be trained on; nor may what an evicted peer has made."""
        if verdict.lineage != self._lineage or self._run.evicted(verdict.worker) is not None:
            return True
        return verdict.policy < self._oldest_policy()

    def _oldest_policy(self) -> int:
        step = self._policy.value
        self._oldest = max(self._oldest, step - self._manifest_of(step).schedule.max_staleness)
        return self._oldest

    async def _train(self, learner: Child) -> None:
        while self._policy.value < self._run.manifest.schedule.steps:
            step = self._policy.value
            await self._teach(learner, self._follow(step))
            if not self._paused:
                self._peer.status.doing = f"waiting for rollouts of step {step}"
            began = self._node.world.now()
            self._idle = dict.fromkeys(self._idle, 0.0)
            while (batch := await self._next_batch()) is not None:
                self._peer.status.doing = f"training step {step}"
                started = self._node.world.now()
                result = await self._train_on(learner, step, batch)
                if "unreadable" not in result:
                    break
                await self._skip(batch, result["unreadable"])
            if batch is None:
                break
            for accepted in batch:
                self._left_out.update(group for group in accepted.groups if group != "kept")
            trained = self._node.world.now()
            consumed = [
                Consumed(step=step, submission=accepted.digest, outcomes=outcomes)
                for accepted, outcomes in zip(batch, result.pop("outcomes"), strict=True)
            ]
            await self._keep_consumed(step + 1, consumed, result["reward"])
            await self._begin_save(learner, step + 1)
            await self._export(learner, step + 1)  # while the state is written
            await self._finish_save(learner)
            await self._trusted.append(list(consumed))
            await self._publish(learner, step + 1, reward=result["reward"])
            self._restarts.succeeded()
            now = self._node.world.now()
            figures = {
                "submissions": len(batch),
                "seconds": now - started,
                "idle_seconds": sum(self._idle.values()),
                **{f"idle_{cause}_seconds": waited for cause, waited in self._idle.items()},
                "idle_weights_seconds": now - trained,
                "step_seconds": now - began,
                "keep_rate": self._keep_rate.value,
                **{f"left_out_{reason}": n for reason, n in sorted(self._left_out.items())},
                "staleness": step - min(accepted.verdict.policy for accepted in batch),
                "environment_rewards": environment_rewards(
                    [accepted.verdict for accepted in batch], self._manifest_of(step).environments
                ),
            }
            self._events.emit("trainer.step_trained", **{**result, **figures, "step": step})
            await learner.call(
                "record",
                {"step": step, "figures": {**result, **figures}},
                deadline_seconds=TRAIN_DEADLINE_SECONDS,
            )
            await self._drop_consumed(batch)
            self._in_hand = []
            await self._heed(learner, step, self._alarms.look(result))

    async def _train_on(self, learner: Child, step: int, batch: list[Accepted]) -> dict[str, Any]:
        """One step of the child (`TrainerService.train`)."""
        return await learner.call(
            "train",
            {
                "step": step,
                "submissions": [
                    {
                        "digest": accepted.digest.hex(),
                        "path": str(self._disk.local_path(accepted.path)),
                        "policy": accepted.verdict.policy,
                        "rewards": accepted.verdict.rewards,
                        "kept": [group == "kept" for group in accepted.groups],
                        "sampling": _plain(self._manifest_of(accepted.verdict.step).sampling),
                    }
                    for accepted in batch
                ],
            },
            deadline_seconds=TRAIN_DEADLINE_SECONDS,
        )

    async def _skip(self, batch: list[Accepted], unreadable: list[tuple[int, str]]) -> None:
        """Leave out of a batch what the child could not read; the rest goes back to the pool, and
        others make up for what is missing."""
        reasons = dict(unreadable)
        lost = [batch[index] for index in reasons]
        for index, accepted in enumerate(batch):
            if index in reasons:
                self._events.emit(
                    "trainer.unreadable",
                    submission=accepted.digest,
                    worker=accepted.verdict.worker,
                    groups=len(accepted.groups),
                    reason=reasons[index],
                )
            else:
                self._pool.add(accepted)
        self._in_hand = []
        self._swept = None  # what is back has missed the last look
        self._training_groups = 0
        await self._log_left_out([accepted.verdict for accepted in lost], "unreadable")
        await self._drop_consumed(lost)

    async def _next_batch(self) -> list[Accepted] | None:
        """The oldest submissions in the pool that make a whole batch, once there are enough; with
        `fill = "refill"`, after its deadline, whatever has anything to teach. None when a new
        version of the run has no such step any more."""
        manifest = self._manifest_of(self._policy.value)
        wanted = manifest.schedule.groups_per_step
        filters = manifest.filters
        patience = filters.refill_seconds if filters.fill == "refill" else math.inf
        self._fed = self._node.world.now()
        deadline = self._node.world.now() + patience
        while self._policy.value < self._run.manifest.schedule.steps:
            if self._paused:
                await trio.sleep_forever()
            await self._drop_stale()
            groups = self._pool.groups
            late = self._node.world.now() >= deadline
            if groups >= wanted or (late and groups > 0):
                batch = self._pool.take(wanted)
                groups -= self._pool.groups
                self._training_groups = max(wanted, groups)
                self._in_hand = batch
                return batch
            with trio.move_on_at(math.inf if late else deadline):
                await self._wait_for_rollouts(step=self._policy.value, missing=wanted - groups)
        return None

    async def _wait_for_rollouts(self, step: int, missing: int) -> None:
        """Until something changes; says whom it waits for when the pool has not grown for long."""
        began = self._node.world.now()
        unjudged = self._coming()
        cause = "checks" if unjudged >= missing else "rollouts"
        patience = min(STARVED_SECONDS, self._options.starved_seconds)
        try:
            with trio.move_on_at(max(self._fed, self._said) + patience) as waited:
                await self._changed.wait_change()
            if not waited.cancelled_caught:
                return
            now = self._said = self._node.world.now()
            present = self._trusted.registrar.present()
            role = "validator" if cause == "checks" else "inference"
            alive = [p.peer for p in present if p.standing == "live" and role in p.heartbeat.roles]
            word = "validator" if cause == "checks" else "inference peer"
            self._events.emit(
                "trainer.starved",
                step=step,
                groups_missing=missing,
                groups_unjudged=unjudged,
                seconds=now - self._fed,
                waiting_for=alive or f"any {word}: none is there",
            )
            due = max(self._fed, self._asked) + self._options.starved_seconds
            if cause == "rollouts" and alive and now > due - 1e-3:
                self._asked = now
                await self._ask_for_more()
        finally:  # the batch may be given its time's end meanwhile
            self._idle[cause] += self._node.world.now() - began

    async def _ask_for_more(self) -> None:
        """Revise the order: where work was lost on its way, the workers' quota is spent, and
        nobody would ever make up for it."""
        with trio.CancelScope(shield=True):
            async with self._ordering:
                order = self._order
                assert order is not None
                missing = self._missing_groups(order.step)
                if missing > 0 and not self._paused:
                    await self._issue(order.step, missing, order)

    async def _drop_stale(self) -> None:
        now = (self._policy.value, self._lineage, self._run.revision)
        if now == self._swept:
            return
        self._swept = now
        stale = self._pool.those(self._too_old)
        for accepted in stale:  # at once, so that nobody else finds it there and logs it too
            self._pool.remove(accepted.digest)
        if stale:
            await self._log_stale([accepted.verdict for accepted in stale])
            await self._drop_consumed(stale)

    async def _log_stale(self, verdicts: list[Verdict]) -> None:
        await self._log_left_out(verdicts, "stale")
        self._events.emit("trainer.stale_dropped", submissions=len(verdicts))

    async def _log_left_out(
        self, verdicts: list[Verdict], outcome: Literal["stale", "unreadable"]
    ) -> None:
        """Log what became of accepted submissions that no step has taken. Their workers' quota is
        spent all the same, so somebody is to be allowed more."""
        await self._trusted.append(
            [
                Consumed(
                    step=self._policy.value,
                    submission=verdict.submission,
                    outcomes=[outcome] * len(verdict.rewards),
                )
                for verdict in verdicts
            ]
        )
        self._left_out[outcome] += sum(len(verdict.rewards) for verdict in verdicts)
        self._wasted_since_order += len(verdicts)

    async def _keep_consumed(self, step: int, consumed: list[Consumed], reward: float) -> None:
        """Make durable what the log will say of the submissions in the state of `step`: written
        before that state, so that whoever resumes from it can complete the log."""
        await self._database.transact(
            lambda connection: connection.execute(
                "INSERT OR REPLACE INTO steps (step, reward, consumed) VALUES (?, ?, ?)",
                (step, reward, msgspec.msgpack.encode(consumed)),
            )
        )

    async def _begin_save(self, learner: Child, step: int) -> None:
        """Have the training state after `step` written, the consumed submissions inside it."""
        await learner.call(
            "begin_save",
            {"folder": str(self._disk.local_path(_state_path((self._lineage, step))))},
            deadline_seconds=TRAIN_DEADLINE_SECONDS,
        )

    async def _finish_save(self, learner: Child) -> None:
        """Wait until that state is durable: before it is, nothing may be announced."""
        await learner.call("finish_save", {}, deadline_seconds=TRAIN_DEADLINE_SECONDS)
        older = self._states()[: -self._options.states_kept]
        every = self._options.states_every
        if not every and self._options.alarm_action == "rollback":
            every = ANCHORS_EVERY
        anchors = [state for state in older if every and state[1] % every == 0][-ANCHORS_KEPT:]
        for state in older:
            if state not in anchors:
                await self._disk.remove(_state_path(state))

    async def _export(self, learner: Child, step: int) -> str:
        """Write policy `step`, unless that was done; its folder."""
        folder = f"trainer/export-{self._lineage}-{step}"
        if self._exported != folder:
            await self._disk.remove(folder)  # of a life before, perhaps of another batch
            await learner.call(
                "export",
                {"folder": str(self._disk.local_path(folder))},
                deadline_seconds=TRAIN_DEADLINE_SECONDS,
            )
            self._exported = folder
        return folder

    async def _publish(self, learner: Child, step: int, *, reward: float) -> None:
        """Make policy `step` a checkpoint, log it, announce it."""
        held = self._peer.store.held((self._lineage, step))
        if held is None or not held.complete:
            folder = await self._export(learner, step)
            held = await self._peer.policies.deltas.publish(
                folder, self._lineage, step, mirrors=self._options.mirrors
            )
        if step not in self._logged_policies:
            await self._trusted.append(
                [CheckpointPublished(lineage=self._lineage, step=step, manifest=held.digest)]
            )
            self._logged_policies.add(step)
        self._published[step] = (held.digest, held.manifest_bytes)
        self._training_groups = 0
        self._policy.set(step)
        self._peer.status.policy = step
        checkpoint = Checkpoint(
            lineage=self._lineage,
            step=step,
            manifest_digest=held.digest,
            manifest_bytes=held.manifest_bytes,
            total_bytes=held.manifest.total_bytes,
            reward=reward,
        )
        await self._peer.announce(checkpoint, defaults.STATE_LIFETIME_SECONDS)
        self._events.emit(
            "trainer.checkpoint_published",
            step=step,
            lineage=self._lineage,
            manifest=held.digest,
            bytes=held.manifest.total_bytes,
        )
        self._changed.touch()

    async def _drop_consumed(self, batch: list[Accepted]) -> None:
        digests = [accepted.digest for accepted in batch]
        for digest in digests:
            self._pool.remove(digest)
        await self._database.transact(
            lambda connection: connection.executemany(
                "DELETE FROM accepted WHERE digest = ?", [(digest,) for digest in digests]
            )
        )
        for digest in digests:
            await self._disk.remove(_path(digest))
        await self._forget_old()
        self._changed.touch()

    async def _forget_old(self) -> None:
        """Numbers and submissions of policies that are too old: what comes of them is stale."""
        youngest = (self._lineage, self._oldest_policy())
        self._numbers = {n: taken for n, taken in self._numbers.items() if n[:2] >= youngest}
        self._known = {known: at for known, at in self._known.items() if at >= youngest}
        await self._database.transact(
            lambda connection: connection.execute(
                "DELETE FROM numbers WHERE (lineage, policy) < (?, ?)", youngest
            )
        )

    # --- when it goes wrong ------------------------------------------------------------------

    async def _heed(self, learner: Child, step: int, alarms: list[Alarm]) -> None:
        """Do what the options say an alarm does."""
        for alarm in alarms:
            self._events.emit(
                "trainer.alarm",
                step=step,
                sign=alarm.name,
                figure=alarm.figure,
                limit=alarm.limit,
                sentence=alarm.sentence,
            )
        if not alarms or self._options.alarm_action == "report":
            return
        why = f"step {step}: {'; '.join(alarm.sentence for alarm in alarms)}"
        if self._options.alarm_action == "rollback":
            good = [state for state in self._states() if state[1] <= step + 1 - RECENT_STEPS]
            if good and self._rollbacks < self._options.rollbacks_max:
                await self._roll_back(learner, good[-1], why)
                return
        await self._pause(why)

    async def _pause(self, why: str) -> None:
        """Close the step and train no more, until a person restarts the trainer with --resume."""
        self._paused = why
        self._peer.status.doing = f"paused: {why}"[:200]
        self._changed.touch()
        while True:
            self._events.emit("trainer.paused", reason=why, go_on="restart it with --resume")
            await trio.sleep(PAUSED_SECONDS)

    async def _roll_back(self, learner: Child, state: tuple[int, int], why: str) -> None:
        """Go on from an older state in a new lineage, which inherits what was consumed: nothing
        is trained on twice, and what was made by the policies given up is stale."""
        self._rollbacks += 1
        self._peer.status.doing = f"rolling back to step {state[1]}"
        lineage, step = self._lineage + 1, state[1]
        async with self._ordering:
            order = self._order
            assert order is not None
            await self._issue(order.step, 0, order)  # nobody need work for it any more
            await learner.call(
                "roll_back",
                {
                    "folder": str(self._disk.local_path(_state_path(state))),
                    "policies": self._published_folders(),
                    "lineage": lineage,
                },
                deadline_seconds=TRAIN_DEADLINE_SECONDS,
            )
            self._lineage = lineage
            self._followed.clear()
            self._published.clear()
            self._logged_policies.clear()
            self._announced.clear()
            self._alarms = Alarms(self._options.limits)
            await self._drop_stale()  # the whole pool: it is of another lineage
            await self._begin_save(learner, step)
            await self._finish_save(learner)
            self._events.emit("trainer.rolled_back", step=step, lineage=lineage, reason=why)
            await self._publish(learner, step, reward=0.0)
            self._oldest = 0
            await self._issue(step, self._missing_groups(step), None)

    # --- ending ------------------------------------------------------------------------------

    async def _finish(self, learner: Child) -> None:
        """Say that the run is over, and measure what was learnt. What is left was carried for
        steps that never come."""
        if self._pool and not self._carried:
            self._carried = True
            await self._trusted.append(
                [
                    Consumed(
                        step=self._policy.value,
                        submission=accepted.digest,
                        outcomes=["carried"] * len(accepted.groups),
                    )
                    for accepted in self._pool.oldest_first()
                ]
            )
        async with self._ordering:
            order = self._order
            assert order is not None
            self._order = final = msgspec.structs.replace(
                order, revision=order.revision + 1, groups_wanted=0, final=True
            )
            await self._peer.announce(final, defaults.MANIFEST_LIFETIME_SECONDS)
        held = self._peer.store.held((self._lineage, self._policy.value))
        assert held is not None
        if self._options.evaluate:
            self._peer.status.doing = "evaluating"
            measured = await learner.call(
                "evaluate",
                {
                    "folder": str(self._disk.local_path(held.folder)),
                    "prompts": EVALUATE_PROMPTS,
                    "split": "held_out",
                },
                deadline_seconds=TRAIN_DEADLINE_SECONDS,
            )
            self._events.emit("trainer.evaluated", moment="after", **measured)
        self._peer.status.doing = "run over"
        self._events.emit(
            "trainer.run_complete",
            steps=self._policy.value,
            folder=str(self._disk.local_path(held.folder)),
        )
        await learner.call("end", {}, deadline_seconds=TRAIN_DEADLINE_SECONDS)
        await trio.sleep(FINAL_WORD_SECONDS)


def _state_path(state: tuple[int, int]) -> str:
    """Of (lineage, step)."""
    return f"{STATES}/{state[0]}-{state[1]}"


def _number(verdict: Verdict) -> Number:
    return (verdict.lineage, verdict.policy, verdict.step, verdict.number, verdict.worker)


def _path(digest: bytes) -> str:
    return f"{ACCEPTED}/{digest.hex()}.parquet"


LESSONS = ("objective", "optimiser", "schedule", "sampling")
"""Tables of a run manifest that the child learns by."""


def _lessons(manifest: RunManifest) -> dict[str, Any]:
    """What a run manifest says to the child that learns."""
    return {name: _plain(getattr(manifest, name)) for name in LESSONS}


def _plain(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
