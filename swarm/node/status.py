"""A peer's report of its own state."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.observable import Observable

IDLE_SECONDS = 30.0
"""Time without generation after which a worker's rate counts as 0: less is the pause between two
steps."""


@dataclass
class Status:
    """Fields of this peer's heartbeats. Its roles update them, and each update touches `changed`.

    Policy and step are -1 until known.
    """

    policy: int = -1
    step: int = -1
    doing: str = "starting"
    tokens_per_second: float = 0.0
    """Rate of the last generation."""
    idle_since: float | None = None
    """When the last generation ended, in seconds of the node's clock; None during one."""
    changed: Observable[None] = field(default_factory=lambda: Observable(None))

    def rate(self, now: float) -> float:
        """Tokens per second, for others to read: 0 once nothing has been generated for a while."""
        idle = self.idle_since is not None and now - self.idle_since > IDLE_SECONDS
        return 0.0 if idle else self.tokens_per_second

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if "changed" in self.__dict__ and name != "idle_since":  # which changes nothing by itself
            self.changed.touch()
