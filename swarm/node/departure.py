"""Leaving in good order: a peer that is asked to leave finishes what is nearly done."""

from __future__ import annotations

import trio


class Departure:
    """A request to leave. Roles with a method `leave` finish their work first."""

    def __init__(self) -> None:
        self.asked = trio.Event()
        self.finishes = False
        """Whether a role would finish work first."""

    def ask(self) -> bool:
        """Ask the roles to leave; returns whether one finishes its work first. Called again, it
        returns False: then the work is to be abandoned."""
        if not self.finishes or self.asked.is_set():
            return False
        self.asked.set()
        return True
