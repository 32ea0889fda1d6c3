"""Leaving in good order: a peer that is asked to leave finishes what is nearly done."""

from __future__ import annotations

import trio


class Departure:
    """A request to leave. Roles with a method `leave` finish their work first; then the peer says
    goodbye."""

    def __init__(self) -> None:
        self.asked = trio.Event()
        self.listens = False
        """Whether roles are at work, which end by themselves when they are asked to."""

    def ask(self) -> bool:
        """Ask the roles to leave; returns whether they do. Called again, it returns False: then the
        work is to be abandoned."""
        if not self.listens or self.asked.is_set():
            return False
        self.asked.set()
        return True
