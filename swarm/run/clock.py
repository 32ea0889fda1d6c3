"""Whose clock counts in a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from swarm.envelope import CLOCK_SKEW_SECONDS_MAX, TRUSTED_STATE_LATE_SECONDS_MAX, Envelope
from swarm.events import Events
from swarm.identity import PeerId
from swarm.run.run import Run
from swarm.world import World


class TrustedClock:
    """Decides whose clock counts.

    Where most of the trusted peers' clocks agree, theirs does, and a peer whose own is off by more
    than `CLOCK_SKEW_SECONDS_MAX` counts with theirs. A trusted peer has one voice among them, so
    that of two which differ each keeps its own: nobody could say who is right. Then it is said
    which clocks differ, and what such a peer signs is given that much longer to expire.
    """

    def __init__(self, run: Run, world: World, events: Events, peer_id: PeerId) -> None:
        self._run = run
        self._world = world
        self._events = events
        self._peer_id = peer_id
        self._ahead: dict[str, float] = {}
        """Of trusted peers that greeted this one: seconds that their clocks are ahead."""

    def check_own(self, signed_seconds: float) -> None:
        """Say so if the clock is behind what certainly lies behind it: the last sequence number
        of this peer, and when the owner signed the manifest."""
        wall = self._world.wall_time()
        issued = self._run.manifest_envelope.body.issued_ms / 1000
        for what, moment in (("itself", signed_seconds), ("manifest", issued)):
            if moment - wall > CLOCK_SKEW_SECONDS_MAX:
                self._events.emit(f"membership.clock_behind_{what}", seconds=moment - wall)

    def compare(self, peer: PeerId, seconds_ahead: float) -> None:
        """Hear how far ahead of ours a neighbour's clock was when it greeted us."""
        trusted = self._run.manifest.trusted_ids()
        if peer not in trusted:
            return
        self._ahead[peer] = seconds_ahead
        voices = [self._ahead[other] for other in trusted if other in self._ahead]
        if self._peer_id in trusted:
            voices.append(0.0)
        agreed = _agreed(voices)
        if agreed is not None and abs(agreed) > CLOCK_SKEW_SECONDS_MAX:
            self._events.emit("membership.clock_corrected", seconds=agreed)
            self._world.correct_clock(agreed)
            self._ahead = {other: ahead - agreed for other, ahead in self._ahead.items()}
        for other in sorted(self._ahead):
            self._allow_for(other, self._ahead[other])

    def on_presence(self, envelope: Envelope) -> None:
        """Learn of a trusted peer's clock from what it says every few seconds."""
        if envelope.sender != self._peer_id:
            ahead = envelope.body.issued_ms / 1000 - self._world.wall_time()
            self._allow_for(envelope.sender, ahead)

    def _allow_for(self, peer: str, ahead: float) -> None:
        known = self._run.clocks_off
        if abs(ahead) <= CLOCK_SKEW_SECONDS_MAX:
            known.pop(peer, None)
            return
        off = min(abs(ahead), TRUSTED_STATE_LATE_SECONDS_MAX)
        if abs(off - known.get(peer, 0.0)) > CLOCK_SKEW_SECONDS_MAX:
            self._events.emit("membership.clocks_differ", remote=peer, seconds=ahead)
        known[peer] = off


def _agreed(voices: Sequence[float]) -> float | None:
    """What more than half of these clocks say, if they do."""

    def beside(voice: float) -> list[float]:
        return [v for v in voices if abs(v - voice) <= CLOCK_SKEW_SECONDS_MAX]

    most = max((beside(voice) for voice in voices), key=len, default=[])
    return statistics.median(most) if 2 * len(most) > len(voices) else None
