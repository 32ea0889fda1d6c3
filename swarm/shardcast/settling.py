"""Durability of large received checkpoints, in the background while they are in use."""

from __future__ import annotations

from typing import Protocol

import trio

from swarm.errors import SwarmError
from swarm.events import Events
from swarm.shardcast.held import Held, Key
from swarm.shardcast.recovery import COMPLETE_NAME
from swarm.world import Disk


class Pinning(Protocol):
    """The part of the store that settling needs."""

    disk: Disk

    def pin(self, key: Key) -> None: ...

    def unpin(self, key: Key) -> None: ...


class Settler:
    """Fsyncs received checkpoints and marks them, so that no start hashes them again."""

    def __init__(self, store: Pinning, events: Events) -> None:
        self._store = store
        self._events = events
        self._waiting: dict[Key, Held] = {}
        self._added = trio.Event()

    def add(self, held: Held) -> None:
        self._waiting[held.key] = held
        self._added.set()

    def forget(self, key: Key) -> None:
        self._waiting.pop(key, None)

    async def run(self) -> None:
        """Settle each added checkpoint, until cancelled."""
        while True:
            await self._added.wait()
            await self.settle()

    async def settle(self) -> None:
        """Settle the checkpoints added so far.

        A disk error is reported as an event; the next start then hashes the checkpoint.
        """
        self._added = trio.Event()
        while self._waiting:
            key, held = next(iter(self._waiting.items()))
            self._store.pin(key)
            try:
                await self._store.disk.sync(held.folder)
                if key in self._waiting:  # not withdrawn meanwhile
                    await self._store.disk.write(f"{held.folder}/{COMPLETE_NAME}", b"")
            except (OSError, SwarmError) as error:
                self._events.emit("shardcast.not_synced", step=held.key[1], reason=str(error))
            finally:
                self._store.unpin(key)
                self._waiting.pop(key, None)
