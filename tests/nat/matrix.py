"""The matrix: a peer at each kind of site meets a peer at every other."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from swarm.settings import PeerSettings
from swarm.wire.envelope import seal
from swarm.wire.identity import PeerId
from tests.nat.topology import BULK_PORT, PORT, Kind, Site, internet
from tests.network.harness import identity, manifest

SERVER = Kind("server", ip6=True, is_open=True)
"""Where bootstrap peers and relays run: IPv4 and IPv6, no NAT."""

WORKING = ("direct", "reversed", "punched", "relayed")
"""Paths of cells in which weights were fetched and work was delivered."""

UNSOLVED: dict[tuple[str, str], str] = {}
"""Cells that do not work, with the reason."""

READY_SECONDS = 180.0
"""Limit on the start of a process, on a busy machine."""

SETTLED_SECONDS = 90.0
"""Limit on a peer's way to an address that others can use."""


ATTEMPTS_MAX = 2
"""As in a run, where the next source is asked, and this one again."""

RECORD_SECONDS = 12.0
"""Until the peer's record in the DHT has its newest addresses."""


@dataclass
class Peer:
    """One process of the matrix."""

    name: str
    site: Site
    process: trio.Process
    events: list[dict[str, Any]]
    answers: dict[int, trio.Event]
    results: dict[int, dict[str, Any]]
    ready: trio.Event
    numbers: Iterator[int]
    id: PeerId

    async def ask(self, what: str, **parameters: Any) -> dict[str, Any]:
        """Let the process do something; returns its answer."""
        number = next(self.numbers)
        self.answers[number] = trio.Event()
        line = json.dumps({"id": number, "do": what, "with": parameters})
        assert self.process.stdin is not None
        await self.process.stdin.send_all(line.encode() + b"\n")
        with trio.fail_after(READY_SECONDS * 2):
            await self.answers[number].wait()
        return self.results.pop(number)

    async def listen(self) -> None:
        """Sort what the process says."""
        buffer = b""
        assert self.process.stdout is not None
        async for chunk in self.process.stdout:
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if "ready" in said:
                    self.ready.set()
                elif "answer" in said:
                    self.results[said["answer"]] = said
                    self.answers.pop(said.pop("answer")).set()
                else:
                    self.events.append(said)


class Swarm:
    """The processes of one network."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self._folder = folder
        self._nursery = nursery
        self._manifest = folder / "run.manifest"
        owner = identity(1)
        message = manifest([identity(2)], [identity(3)])
        run = f"{owner.peer_id}/{message.name}"
        self._manifest.write_bytes(
            seal(
                owner, message, run=run, sequence=1, wall_time=time.time(), lifetime_seconds=1e6
            ).raw
        )
        self.entrances: list[str] = []

    async def start(self, name: str, site: Site, **settings: Any) -> Peer:
        """Start a peer at a site and wait until it has joined."""
        home = self._folder / name.replace(" ", "-").replace(",", "")
        given = PeerSettings(
            **{
                "role": ["observer"],
                "home": str(home),
                "bootstrap": self.entrances,
                "listen": [f"/ip{4 if site.kind.ip4 else 6}/{_any(site)}/tcp/{PORT}"],
                "bulk_port": BULK_PORT,
                "manifest": [] if self.entrances else [str(self._manifest)],
                **settings,
            }
        )
        command = ["ip", "netns", "exec", site.host, sys.executable, "-m", "tests.nat.host"]
        with (self._folder / f"{home.name}.log").open("wb") as log:
            process = await trio.lowlevel.open_process(
                [*command, str(home), name, given.model_dump_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        peer = Peer(name, site, process, [], {}, {}, trio.Event(), itertools.count(), PeerId(""))
        self._nursery.start_soon(self._attend, peer)
        with trio.fail_after(READY_SECONDS):
            await peer.ready.wait()
        peer.id = PeerId((await peer.ask("look"))["peer"])
        return peer

    async def _attend(self, peer: Peer) -> None:
        try:
            await peer.listen()
        finally:
            peer.process.kill()
            with trio.CancelScope(shield=True):
                await peer.process.wait()


def _any(site: Site) -> str:
    return "0.0.0.0" if site.kind.ip4 else "::"


@asynccontextmanager
async def swarm(kinds: Sequence[Kind], folder: Path) -> AsyncIterator[list[Peer]]:
    """Peers at sites of these kinds, in one network with a bootstrap peer and a relay."""
    with internet([SERVER, SERVER, *kinds]) as sites:
        async with trio.open_nursery() as nursery:
            network = Swarm(folder, nursery)
            entrances: list[str] = []
            for name, site in zip(("bootstrap", "relay"), sites, strict=False):
                listen = [f"/ip4/0.0.0.0/tcp/{port}" for port in (PORT, 443)]
                listen += [f"/ip6/{site.addresses[1]}/tcp/{PORT}"]
                network.entrances = list(entrances)
                peer = await network.start(name, site, role=[name], listen=listen)
                own = [f"/ip4/{site.addresses[0]}/tcp/{port}" for port in (PORT, 443)]
                own.append(f"/ip6/{site.addresses[1]}/tcp/{PORT}")
                entrances += [f"{address}/p2p/{peer.id}" for address in own]
            network.entrances = entrances
            peers: list[Peer] = []

            async def start(number: int, site: Site) -> None:
                peers.append(await network.start(f"{number} {site.kind.name}", site))

            for first in range(2, len(sites), 4):  # few at once: each start takes CPU time
                async with trio.open_nursery() as starting:
                    for number in range(first, min(first + 4, len(sites))):
                        starting.start_soon(start, number, sites[number])
            await _settled(peers)
            yield sorted(peers, key=lambda peer: peer.site.number)
            nursery.cancel_scope.cancel()


async def _settled(peers: Sequence[Peer]) -> None:
    """Wait until each peer knows how others reach it, and has a relay if it wants one."""
    with trio.move_on_after(SETTLED_SECONDS):
        for peer in peers:
            await peer.ask("settle")
    await trio.sleep(RECORD_SECONDS)


async def cell(here: Peer, there: Peer) -> dict[str, Any]:
    """Let one peer, not connected to another before, meet it."""
    found: dict[str, Any] = {}
    for attempt in range(1, ATTEMPTS_MAX + 1):
        for one, other in ((here, there), (there, here)):
            await one.ask("part", peer=other.id)
        found = await here.ask("meet", peer=there.id, name=there.name)
        found["attempts"] = attempt
        if "path" in found:
            break
    path = found.get("path", "none")
    if path == "punched" and here.site.kind.is_open:
        path = "reversed"  # the other side could simply connect
    return {**found, "here": here.site.kind.name, "there": there.site.kind.name, "path": path}


async def matrix(kinds: Sequence[Kind], folder: Path) -> list[dict[str, Any]]:
    """Every kind meets every kind, in rounds in which each peer is in one cell."""
    cells: list[dict[str, Any]] = []
    async with swarm([*kinds, *kinds], folder) as peers:
        left, right = peers[: len(kinds)], peers[len(kinds) :]
        for peer in peers:
            looked = await peer.ask("look")
            print(peer.name, looked, file=sys.stderr)
            for event in peer.events[:12]:
                print("   ", event, file=sys.stderr)

        async def meet(here: Peer, there: Peer) -> None:
            found = await cell(here, there)
            print(found, file=sys.stderr)
            cells.append(found)

        for shift in range(len(kinds)):
            async with trio.open_nursery() as nursery:
                for index, here in enumerate(left):
                    nursery.start_soon(meet, here, right[(index + shift) % len(kinds)])
    return cells


def table(kinds: Sequence[Kind], cells: Sequence[dict[str, Any]]) -> str:
    """The matrix in Markdown: rows connect to columns."""
    found = {(each["here"], each["there"]): each["path"] for each in cells}
    names = [kind.name for kind in kinds]
    lines = ["| from \\ to | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for here in names:
        row = [found.get((here, there), "").replace("none", "unsolved") for there in names]
        lines.append(f"| **{here}** | " + " | ".join(row) + " |")
    return "\n".join(lines)
