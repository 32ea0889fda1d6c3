"""Alarms of a run, from what anyone can see of it: the dashboard's snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from swarm.look.alarms.board import Board
from swarm.look.dashboard.snapshot import Snapshot
from swarm.settings import AlarmSettings

STEPS = 10
"""Judged steps whose mean reward is compared with that of the best as many."""

REWARD_SHARE_MIN = 0.5

BEST_REWARD_MIN = 0.1
"""A best reward below this is too low to compare with."""

REFUSED_SHARE_MAX = 0.2

SUBMISSIONS_MIN = 50
"""Verdicts of the last steps, fewer of which say nothing about a share."""

BEHIND = 3
"""Policies by which a worker may be behind: step orders name one that is some steps old anyway."""

BEHIND_SHARE = 1 / 3

HEARD_SECONDS = 20.0
"""Age that a worker's word may have here: heartbeats come every 10 s, by way of a trusted peer. In
a run of quick steps the newest policy is far ahead of what it can know."""

SIGN_SECONDS = 60.0
"""Interval at which a state that lasts counts as a sign."""


class FromRun:
    """Reads each snapshot, and counts signs on a board."""

    def __init__(self, board: Board, settings: AlarmSettings) -> None:
        self._board = board
        self._settings = settings
        self._step: int | None = None
        self._step_since = 0.0
        self._newest: deque[tuple[float, int]] = deque()
        """When each policy was first seen as the newest, and it; the first is `HEARD_SECONDS` old
        once this has looked on for so long."""
        self._signed: dict[str, float] = {}
        """When each sign that lasts was counted last, by alarm."""

    def read(self, snapshot: Snapshot, now: float) -> None:
        """Take the newest snapshot; `now` in seconds that only grow."""
        for name, sentence in snapshot.head.signs.items():
            self._board.sign(name, sentence)
        self._pace(snapshot, now)
        self._rewards([each.reward for _, each in sorted(snapshot.steps.items())])
        self._refusals(snapshot)
        self._peers(snapshot, now)
        self._board.settle()

    def _pace(self, snapshot: Snapshot, now: float) -> None:
        head = snapshot.head
        if head.step != self._step or head.state == "over" or head.step is None:
            if self._step is not None:
                self._board.well("no_step")
            self._step, self._step_since = head.step, now
        elif now - self._step_since >= self._settings.no_step_seconds:
            minutes = (now - self._step_since) / 60
            words = f"step {head.step} has been open for {minutes:.0f} min"
            self._board.sign("no_step", f"{words}: {head.trainer}", head.chain)

    def _rewards(self, rewards: Sequence[float | None]) -> None:
        known = [each for each in rewards if each is not None]
        means = [
            sum(known[start : start + STEPS]) / STEPS for start in range(len(known) - STEPS + 1)
        ]
        best = max(means, default=0.0)
        # Only quiet clears it: the mean of each step may be on another side of the limit.
        if best >= BEST_REWARD_MIN and means[-1] < REWARD_SHARE_MIN * best:
            self._board.sign(
                "reward_falls",
                f"the mean reward of the last {STEPS} steps is {means[-1]:.3f}; it was "
                f"{best:.3f} at its best",
            )

    def _refusals(self, snapshot: Snapshot) -> None:
        last = [each for _, each in sorted(snapshot.steps.items())][-STEPS:]
        refused = sum(each.refused for each in last)
        judged = refused + sum(each.accepted + each.quarantined for each in last)
        if judged >= SUBMISSIONS_MIN and refused > REFUSED_SHARE_MAX * judged:
            self._board.sign(
                "refusals_rise",
                f"{refused:,} of {judged:,} submissions of the last {len(last)} steps are refused",
            )

    def _lasts(self, name: str, sentence: str, now: float) -> None:
        """Count a sign at most once per `SIGN_SECONDS`: one look alone says little.

        An empty sentence means that all is well.
        """
        if not sentence:
            self._board.well(name)
        elif now - self._signed.get(name, float("-inf")) >= SIGN_SECONDS:
            self._signed[name] = now
            self._board.sign(name, sentence)

    def _peers(self, snapshot: Snapshot, now: float) -> None:
        silent = [
            peer for peer, row in snapshot.peers.items() if row.trusted and row.state == "gone"
        ]
        named = ", ".join(f"…{peer[-8:]}" for peer in silent[:4])
        if "trusted_silent" not in snapshot.head.signs:  # else none answers: the rows are old
            self._lasts("trusted_silent", f"trusted peers are gone: {named}" if silent else "", now)
        newest = self._known_policy(snapshot.head.policy, now)
        workers = [
            row
            for row in snapshot.peers.values()
            if "inference" in row.roles and row.state == "live"
        ]
        behind = [row for row in workers if newest is not None and row.policy < newest - BEHIND]
        stalled = bool(workers) and len(behind) > BEHIND_SHARE * len(workers)
        words = f"{len(behind)} of {len(workers)} workers are more than {BEHIND} policies behind"
        self._lasts("broadcast_stalled", f"{words} policy {newest}" if stalled else "", now)

    def _known_policy(self, newest: int | None, now: float) -> int | None:
        """The newest policy that every heartbeat can know of; None until this has seen one."""
        if newest is not None and (not self._newest or self._newest[-1][1] != newest):
            self._newest.append((now, newest))
        while len(self._newest) > 1 and self._newest[1][0] <= now - HEARD_SECONDS:
            self._newest.popleft()
        if not self._newest or self._newest[0][0] > now - HEARD_SECONDS:
            return None
        return self._newest[0][1]
