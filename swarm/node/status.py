"""A peer's report of its own state."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.observable import Observable


@dataclass
class Status:
    """Fields of this peer's heartbeats. Its roles update them, and each update touches `changed`.

    Policy and step are -1 until known.
    """

    policy: int = -1
    step: int = -1
    doing: str = "starting"
    tokens_per_second: float = 0.0
    changed: Observable[None] = field(default_factory=lambda: Observable(None))

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if "changed" in self.__dict__:
            self.changed.touch()
