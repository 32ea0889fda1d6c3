"""A peer's report of its own state."""

from dataclasses import dataclass, field
from math import inf

from swarm.world.observable import Observable

IDLE_SECONDS = 30.0
"""Time without generation (a replica: without inner steps) after which a peer's rate counts as 0:
less is the pause between two steps."""

LATE_TIMES = 3.0
"""A generation that lasts this many times the last one, and `IDLE_SECONDS`, hangs."""


@dataclass
class Status:
    """Fields of this peer's heartbeats. Its roles update them, and each update touches `changed`.

    Policy and step are -1 until known."""

    policy: int = -1
    step: int = -1
    doing: str = "starting"
    tokens_per_second: float = 0.0
    """Rate of the last generation."""
    idle_since: float | None = None
    """When the last generation ended, in seconds of the node's clock; None during one."""
    late_from: float = inf
    """When the generation that has begun last counts as one that hangs."""
    changed: Observable[None] = field(default_factory=lambda: Observable(None))

    def begins(self, now: float, last_seconds: float) -> None:
        """Note that generation begins; `last_seconds`: how long the last one took."""
        self.idle_since = None
        self.late_from = now + max(IDLE_SECONDS, LATE_TIMES * last_seconds)

    def rate(self, now: float) -> float:
        """Tokens per second, for others to read.

        0 once nothing has been generated for a while, or a generation takes far too long."""
        idle = self.idle_since is not None and now - self.idle_since > IDLE_SECONDS
        late = self.idle_since is None and now > self.late_from
        return 0.0 if idle or late else self.tokens_per_second

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        # When it generates changes nothing by itself.
        if "changed" in self.__dict__ and name not in ("idle_since", "late_from"):
            self.changed.touch()
