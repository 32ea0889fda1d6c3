"""Whether a peer is well: a file that a running peer keeps fresh, and its reader.

The peer touches the file from its event loop. A loop that hangs, a dead process and a disk that
takes no more writes therefore look alike to the reader: the file grows old."""

import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import trio

from swarm.errors import DECODE_ERRORS, SwarmError
from swarm.events import Event
from swarm.node.node import Node
from swarm.run.admission import TRUSTED_ROLES
from swarm.settings import BOOTSTRAP

HEALTH = "health.json"
"""File in a peer's home. Its time of modification is the peer's last sign of life."""

BEAT_SECONDS = 5.0
"""Seconds between two signs of life."""

SILENT_SECONDS = 30.0
"""Age from which the peer is not well. It leaves room for a busy machine and for one late beat."""


class Unwell(SwarmError):
    """The peer is dead, hangs, or is not ready."""


class Health(msgspec.Struct, frozen=True):
    """What a peer says of itself."""

    peer: str
    roles: list[str]
    run: str | None = None
    """Id of the run that it has found."""
    ready: bool = False
    """Whether it takes part in the run, admitted or trusted; a bootstrap peer needs none."""


class Pulse:
    """Event sink that keeps the file of one peer fresh."""

    def __init__(self, home: Path, peer: str, roles: Sequence[str]) -> None:
        self._file = home / HEALTH
        self._health = Health(peer, list(roles), ready=set(roles) == {BOOTSTRAP})
        self._written: Health | None = None
        self._ended = False
        # Nobody admits a trusted peer: it reports its status once it takes part.
        self._joined = "peer.status" if TRUSTED_ROLES.intersection(roles) else "membership.admitted"

    def __call__(self, event: Event) -> None:
        replace = msgspec.structs.replace
        if event.name == "peer.run_found":
            self._health = replace(self._health, run=event.fields["run"])
        elif event.name == self._joined and not self._health.ready:
            self._health = replace(self._health, ready=True)
        elif event.name == "membership.lease_lost":
            self._health = replace(self._health, ready=False)

    @property
    def ready(self) -> bool:
        """Whether the peer takes part in its run."""
        return self._health.ready

    async def beat(self) -> None:
        """Give a sign of life every `BEAT_SECONDS`, until cancelled."""
        while True:
            await trio.sleep(BEAT_SECONDS)
            # In a thread: a disk that hangs must not stop the network. The file grows old instead.
            await trio.to_thread.run_sync(self.touch, abandon_on_cancel=True)

    def touch(self) -> None:
        """Give one sign of life."""
        health = self._health
        with suppress(OSError):  # a full disk is reported by what needs it
            if health == self._written:
                now = time.time()  # this machine's clock, also on a network file system
                os.utime(self._file, (now, now))
            else:
                partial = self._file.with_suffix(".partial")
                partial.write_bytes(msgspec.json.encode(health))
                partial.replace(self._file)
                self._written = health
                if self._ended:  # in between: a beat's thread may outlast it
                    self.end()
            _tell_systemd()

    def end(self) -> None:
        """Remove the file: the peer has left."""
        self._ended = True
        with suppress(OSError):
            self._file.unlink()


def _tell_systemd() -> None:
    """Reset the watchdog of systemd, if the peer is a service with one (`man sd_notify`)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as watchdog:
            watchdog.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
            watchdog.send(b"WATCHDOG=1")


@asynccontextmanager
async def beating(node: Node) -> AsyncIterator[Pulse]:
    """Give signs of life inside the block."""
    pulse = Pulse(node.settings.home_path, node.peer_id, node.settings.role)
    node.events.add_sink(pulse)
    pulse.touch()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pulse.beat)
            yield pulse
            nursery.cancel_scope.cancel()
    finally:
        pulse.end()


def examine(home: Path, *, ready: bool) -> tuple[Health, float]:
    """Return what the peer with this home says of itself, and the seconds since.

    Raises `Unwell` without a sign of life for `SILENT_SECONDS` or, with `ready`, without a run."""
    try:
        age = time.time() - (home / HEALTH).stat().st_mtime
        health = msgspec.json.decode((home / HEALTH).read_bytes(), type=Health)
    except (OSError, *DECODE_ERRORS) as error:
        raise Unwell(
            f"no peer runs with --home {home}; start it, or name the home of one that runs"
        ) from error
    if abs(age) > SILENT_SECONDS:  # below 0: the clock was set back
        raise Unwell(
            f"the peer with --home {home} gave no sign of life for {abs(age):.0f} s; it hangs, was "
            "killed, or cannot write there; start it again"
        )
    if ready and not health.ready:
        raise Unwell(f"the peer with --home {home} takes no part in a run yet; see its log")
    return health, max(0.0, age)
