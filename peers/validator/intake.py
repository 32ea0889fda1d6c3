"""The intake: opens and closes this validator for pushes."""

from __future__ import annotations

import trio

from peers.validator.cases import Outcome
from peers.validator.inbox import Inbox
from swarm.node.run_node import RunNode
from swarm.node.trusted import UNGRADED, UNGRADED_MAX

UNGRADED_PAUSE_SECONDS = 60.0
"""Length of the pause of a validator whose environment fails; then it accepts pushes again."""


class Intake:
    """Accepts pushes, but pauses when too many submissions in a row could not be graded.

    During the pause, workers turn to validators whose environment may work.
    """

    def __init__(self, peer: RunNode, inbox: Inbox) -> None:
        self._peer = peer
        self._inbox = inbox
        self._ungraded = 0
        """Number of honest submissions in a row that the environment could not grade."""

    def open(self) -> None:
        self._peer.blobs.inbox = self._inbox

    def close(self) -> None:
        self._peer.blobs.inbox = None

    def note(self, outcome: Outcome, nursery: trio.Nursery) -> None:
        """Take note of an outcome; `nursery` runs the task that ends a pause."""
        if outcome.failed in UNGRADED:
            self._ungraded += 1
            if self._ungraded >= UNGRADED_MAX:
                self._pause(outcome.detail, nursery)
        elif outcome.word == "accepted":
            self._ungraded = 0

    def _pause(self, reason: str, nursery: trio.Nursery) -> None:
        self._peer.status.doing = f"cannot grade: {reason}"[:200]
        if self._peer.blobs.inbox is None:  # paused already; earlier submissions are still judged
            return
        self._peer.node.events.emit(
            "validator.cannot_grade",
            submissions=self._ungraded,
            reason=reason,
            seconds=UNGRADED_PAUSE_SECONDS,
        )
        self.close()
        nursery.start_soon(self._reopen)

    async def _reopen(self) -> None:
        await trio.sleep(UNGRADED_PAUSE_SECONDS)
        self.open()
