"""Agreement of the trusted peers' clocks in a run."""

import statistics
from collections.abc import Sequence

from swarm.events import Events
from swarm.run.run import Run
from swarm.wire.envelope import CLOCK_SKEW_SECONDS_MAX, TRUSTED_STATE_LATE_SECONDS_MAX, Envelope
from swarm.wire.identity import PeerId
from swarm.world import World


class TrustedClock:
    """Decides which clock this peer uses.

    If the clocks of most trusted peers agree, a peer whose own clock differs from theirs by more
    than `CLOCK_SKEW_SECONDS_MAX` corrects it. A trusted peer's own clock counts as one vote. Two
    trusted peers that differ therefore both keep their clocks, since nothing shows which is right.

    This peer reports the trusted peers whose clocks differ. What they sign lasts longer."""

    def __init__(self, run: Run, world: World, events: Events, peer_id: PeerId) -> None:
        self._run = run
        self._world = world
        self._events = events
        self._peer_id = peer_id
        self._ahead: dict[str, float] = {}
        """Seconds that trusted peers' clocks are ahead, from their greetings."""

    def compare(self, peer: PeerId, seconds_ahead: float) -> None:
        """Learn from a neighbour's greeting how many seconds its clock is ahead."""
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
        """Learn a trusted peer's clock from its presence digests."""
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
    """Return the median of the clocks that agree if they are more than half of all, else None."""

    def beside(voice: float) -> list[float]:
        return [v for v in voices if abs(v - voice) <= CLOCK_SKEW_SECONDS_MAX]

    most = max((beside(voice) for voice in voices), key=len, default=[])
    return statistics.median(most) if 2 * len(most) > len(voices) else None
