"""The durable queue of cases: acknowledged submissions, judged in each worker's order."""

from __future__ import annotations

import msgspec
import trio

from peers.validator.cases import Case
from peers.validator.checks.base import first_failure
from peers.validator.checks.standing import TURN, Turn
from peers.validator.docket import Docket
from peers.validator.inbox import Inbox, Key
from swarm.envelope import Dropped, open_envelope
from swarm.errors import DECODE_ERRORS
from swarm.events import Events
from swarm.jobs.validation import Report
from swarm.messages import StepOrder, Submission
from swarm.run.run import Run
from swarm.world import Database

TURN_VALIDATORS_MAX = 3
"""Number of validators in a row that may be silent about submission n - 1 while submission n
waits for it; each costs the time until the worker asks the next."""

CASES_MAX = 10_000
"""Most cases in the queue; the workers' quotas keep it far shorter."""


class CaseQueue:
    """Cases that were acknowledged and have no verdict."""

    def __init__(
        self, run: Run, database: Database, docket: Docket, inbox: Inbox, events: Events
    ) -> None:
        self._run = run
        self._database = database
        self._docket = docket
        self._inbox = inbox
        self._events = events
        self._waiting: dict[Key, Case] = {}
        self._queue, self._cases = trio.open_memory_channel[Case](CASES_MAX)

    def __len__(self) -> int:
        return len(self._waiting)

    def find(self, key: Key) -> Case | None:
        """The case of an acknowledged submission that has no verdict yet."""
        return self._waiting.get(key)

    def cases(self) -> list[Case]:
        return list(self._waiting.values())

    async def open(self) -> None:
        """Restore the cases acknowledged before a restart.

        Drops cases that are judged, whose file is missing, or whose row cannot be decoded.
        """
        await self._database.transact(
            lambda connection: connection.execute(
                "CREATE TABLE IF NOT EXISTS unjudged "
                "(worker TEXT NOT NULL, digest BLOB NOT NULL, announced BLOB NOT NULL, "
                "arranged BLOB NOT NULL, PRIMARY KEY (worker, digest))"
            )
        )
        dropped: list[str] = []
        for worker, digest, announced, arranged in self._database.read(
            "SELECT worker, digest, announced, arranged FROM unjudged ORDER BY worker, digest"
        ):
            key = (worker, digest)
            try:
                case = _restored(announced, arranged)
            except (ValueError, Dropped, *DECODE_ERRORS) as error:
                dropped.append(str(error))
                await self.remove(key)
                continue
            if self._docket.is_judged_here(key) or not self._inbox.exists(key):
                await self.remove(key)
            else:
                self._admit(case)
                self._docket.take_order(case.order)
        if dropped:
            self._events.emit("validator.cases_dropped", cases=len(dropped), reason=dropped[0])

    async def add(self, case: Case) -> None:
        """Store a case durably, so that its worker can rely on a verdict."""
        self._admit(case)
        await self._database.transact(
            lambda connection: connection.execute(
                "INSERT OR REPLACE INTO unjudged (worker, digest, announced, arranged) "
                "VALUES (?, ?, ?, ?)",
                (*case.key, case.announced.raw, msgspec.msgpack.encode(case.order)),
            )
        )

    def _admit(self, case: Case) -> None:
        self._waiting[case.key] = case
        self._docket.fill(case.slot, case.submission.digest)
        self._inbox.hold(case.key, case.submission.size_bytes)

    async def remove(self, key: Key) -> None:
        """Remove a settled case; does nothing if it does not exist."""
        self._waiting.pop(key, None)
        await self._database.transact(
            lambda connection: connection.execute(
                "DELETE FROM unjudged WHERE worker = ? AND digest = ?", key
            )
        )

    async def line_up(self, case: Case) -> Report | None:
        """Queue a case once the preceding submission is settled.

        Returns a report if the preceding submission is not settled before the deadline.
        """
        before = case.slot.before

        def may_proceed() -> bool:
            return (
                self._docket.is_settled(before)
                or self._docket.accepted_elsewhere(case.key) is not None
            )

        number = case.submission.number
        if number > 0:
            limits = self._run.manifest.limits
            patience = (limits.acknowledgement_seconds + limits.verdict_seconds) * min(
                TURN_VALIDATORS_MAX, len(self._run.manifest.validator_ids())
            )
            arrived = True
            while not may_proceed() and arrived:
                # A preceding submission that waits for its verdict here is late, not missing.
                digest = self._docket.submission_in(before)
                arrived = digest is not None and (case.worker, digest) in self._waiting
                with trio.move_on_after(patience) as waited:
                    await self._docket.changed.wait_until(lambda _: may_proceed())
                arrived = arrived or not waited.cancelled_caught
            never_came = first_failure(TURN, Turn(number, may_proceed()))
            if never_came is not None:
                return never_came
        await self._queue.send(case)
        return None

    async def next(self) -> Case:
        """Wait for the next case whose turn has come."""
        return await self._cases.receive()


def _restored(announced: bytes, arranged: bytes) -> Case:
    """Decode the case in a row.

    Raises `Dropped`, `ValueError` or `DECODE_ERRORS` for a row of an incompatible version of Swarm.
    """
    envelope = open_envelope(announced)
    if not isinstance(envelope.message, Submission):
        raise ValueError(f"a {type(envelope.message).__name__} instead of an announcement")
    order = msgspec.msgpack.decode(arranged, type=StepOrder)
    return Case(envelope, envelope.message, order)
