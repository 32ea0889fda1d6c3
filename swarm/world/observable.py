"""A value whose changes tasks can wait for."""

from collections.abc import Callable
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Observable(Generic[T]):
    """Holds a value and wakes all waiting tasks when it changes. Never polls."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._changed = trio.Event()

    @property
    def value(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        self._value = value
        self.touch()

    def touch(self) -> None:
        """Wake waiting tasks after a change inside the held object."""
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def wait_until(self, holds: Callable[[T], bool]) -> T:
        """Wait until `holds` is true of the value, and return it. Callers set the deadline."""
        while not holds(self._value):
            await self._changed.wait()
        return self._value

    async def wait_change(self) -> T:
        """Wait for the next change, and return the new value."""
        await self._changed.wait()
        return self._value


STARVED_SECONDS = 30.0
"""Time without work after which a role reports the reason, and the interval of repetitions."""


async def complain(say: Callable[[float], None]) -> None:
    """Call `say` with the seconds waited so far, every `STARVED_SECONDS`, until cancelled."""
    began = trio.current_time()
    while True:
        await trio.sleep(STARVED_SECONDS)
        say(trio.current_time() - began)
