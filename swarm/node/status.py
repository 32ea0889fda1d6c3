"""What a peer says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.observable import Observable


@dataclass
class Status:
    """What this peer says of itself in its heartbeats; the roles keep it up to date."""

    policy: int = -1
    step: int = -1
    doing: str = "starting"
    tokens_per_second: float = 0.0
    changed: Observable[None] = field(default_factory=lambda: Observable(None))

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if "changed" in self.__dict__:
            self.changed.touch()
