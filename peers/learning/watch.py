"""A rank's watch over the other ranks: torch's collectives would keep waiting for a dead rank.

A thread in every rank reports every second that the rank is alive. It ends its process when another
rank falls silent or ends by an error."""

import atexit
import os
import socket
import sys
import threading
import time
from typing import NoReturn

from peers.learning.ranks import dist
from peers.learning.rendezvous import Rendezvous

ALIVE_SECONDS = 1.0
"""Time between a rank's signs of life."""

SILENT_SECONDS = 30.0
"""A rank silent for this long counts as dead, and the others stop. `docs/training.md` promises a
minute; this leaves half of it for the rest."""


class Watch:
    """Reports that this rank is alive, and ends its process when another rank dies."""

    def __init__(self, meeting: Rendezvous) -> None:
        self._launch = launch = meeting.launch
        self._store = meeting.connect()
        self._lock = threading.Lock()
        self._left = False
        self._culprit = ""
        self._found = threading.Event()
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._name = f"rank {launch.rank} of {launch.world} ({socket.gethostname()}, {os.getpid()})"
        self._round = time.monotonic()
        """When the store last answered."""
        atexit.register(self.leave, "its process ended")
        for work in (self._run, self._guard):
            threading.Thread(target=work, name="ranks", daemon=True).start()

    def culprit(self) -> str:
        """Wait for the rank that broke a collective to be found, and name it; empty if none is."""
        self._found.wait(SILENT_SECONDS + 5 * ALIVE_SECONDS)
        return self._culprit

    def leave(self, why: str) -> None:
        """Report that this rank ends; `why` is empty for a normal end."""
        with self._lock:
            if not self._left:
                self._left = True
                try:
                    self._store.set(f"alive/{self._launch.rank}", f"gone {self._name}: {why}")
                except (RuntimeError, dist.DistStoreError) as error:
                    print(f"{self._name}: {error}", file=sys.stderr, flush=True)

    def end(self, why: str) -> NoReturn:
        """End this process, loudly."""
        print(f"{self._name} stops: {why}", file=sys.stderr, flush=True)
        self.leave(why)
        os._exit(1)

    def _run(self) -> None:
        count = 0
        while not self._left:
            count += 1
            try:
                with self._lock:
                    if self._left:
                        return
                    self._store.set(f"alive/{self._launch.rank}", f"{count} {self._name}")
                self._look()
                self._round = time.monotonic()
            except (RuntimeError, dist.DistStoreError) as error:
                if not self._left:
                    self.end(f"the rendezvous store is gone ({str(error).splitlines()[0]})")
            if self._culprit:
                # First let a call that a broken collective has ended report its own error.
                self._found.set()
                time.sleep(5 * ALIVE_SECONDS)
                self.end(self._culprit)
            time.sleep(ALIVE_SECONDS)

    def _guard(self) -> None:
        """End this process when the store's machine is gone: calls to the store then hang."""
        while not self._left:
            time.sleep(ALIVE_SECONDS)
            if time.monotonic() - self._round > SILENT_SECONDS + 10 * ALIVE_SECONDS:
                words = f"the rendezvous store has not answered for {SILENT_SECONDS:g} s"
                print(f"{self._name} stops: {words}", file=sys.stderr, flush=True)
                os._exit(1)

    def _look(self) -> None:
        """Find a rank that is silent or has ended."""
        now = time.monotonic()
        for rank in range(self._launch.world):
            key = f"alive/{rank}"
            if rank == self._launch.rank or not self._store.check([key]):
                continue
            words = bytes(self._store.get(key))
            if words.startswith(b"gone "):
                name, _, why = words[5:].decode("utf-8", "replace").partition(": ")
                if why:
                    self._culprit = f"{name} ended: {why}"
                continue
            said, since = self._heard.get(rank, (b"", now))
            if words != said:
                self._heard[rank] = (words, now)
            elif now - since > SILENT_SECONDS:
                name = words.decode("utf-8", "replace").partition(" ")[2]
                self._culprit = f"{name} has not been heard of for {SILENT_SECONDS:g} s"
