"""What a page asks for by itself: nothing of it is computed for a page that only looks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import trio

from swarm.errors import PeerError
from swarm.ledger.state import Totals
from swarm.look.dashboard.watch import Watcher
from swarm.look.onlooker import record_of
from swarm.terminal.untrusted import printable

SECONDS_MAX = 75.0
"""Deadline of one answer."""

KEPT_SECONDS = 10.0
"""Time for which an answer is given again: a page that asks on and on costs nothing."""

WAITING_MAX = 16
"""Questions that wait for the one that is being answered: each holds a connection."""

KEPT_MAX = 64
"""Answers kept, the newest."""


class RecordShown(msgspec.Struct, frozen=True):
    """One peer's record in all logs that could be read (`swarm.ledger.state.Totals`)."""

    accepted: int
    refused: int
    quarantined: int
    groups: int
    verified: int
    held: int
    final: int
    void: int
    eviction: str
    """The reason of the eviction in force; empty without one."""
    problems: list[str]


@dataclass
class Kept:
    """Answers to recent questions. One question is answered at a time, the others wait."""

    _answers: OrderedDict[str, tuple[float, bytes]] = field(default_factory=OrderedDict)
    """When each was given, and it."""
    _answering: trio.Lock = field(default_factory=trio.Lock)

    async def get(self, question: str, answer: Callable[[], Awaitable[bytes]]) -> bytes:
        """The answer, at most `KEPT_SECONDS` old.

        Raises `PeerError` past the deadline, and at once if too many wait.
        """
        if self._answering.statistics().tasks_waiting >= WAITING_MAX:
            raise PeerError(f"{WAITING_MAX} questions are waiting, the most; ask again later")
        try:
            with trio.fail_after(SECONDS_MAX):
                async with self._answering:
                    held = self._answers.get(question)
                    if held is None or trio.current_time() > held[0] + KEPT_SECONDS:
                        held = (trio.current_time(), await answer())
                        self._answers[question] = held
                        while len(self._answers) > KEPT_MAX:
                            self._answers.popitem(last=False)
                    return held[1]
        except trio.TooSlowError:
            raise PeerError(f"no answer came within {SECONDS_MAX:g} s; ask again") from None


async def record(watcher: Watcher, peer: str) -> bytes:
    """One peer's record as JSON; raises `PeerError`."""
    found = await record_of(watcher.node, watcher.run, peer)
    totals = found.state.totals.get(peer, Totals())
    shown = RecordShown(
        accepted=totals.accepted,
        refused=totals.refused,
        quarantined=totals.quarantined,
        groups=totals.groups,
        verified=totals.verified,
        held=totals.held,
        final=totals.final,
        void=totals.void,
        eviction=printable(found.eviction.reason) if found.eviction else "",
        problems=[printable(each) for each in found.problems],
    )
    return msgspec.json.encode(shown)
