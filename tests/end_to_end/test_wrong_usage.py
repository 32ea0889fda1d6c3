"""A guest that cannot take part prints one sentence and has an exit status other than 0."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from peers.demo.setup import free_ports
from swarm.transport import Stream
from swarm.transport.libp2p import open_libp2p
from swarm.wire.identity import Identity
from swarm.world.disk import LocalDisk
from swarm.world.machine import Machine
from tests.end_to_end.harness import START_SECONDS, Person, Swarm, swarm

pytestmark = pytest.mark.wall_clock

CHECKPOINT_SHARE = 100_000
"""Largest size of a home in bytes, too small for the tiny policy (0.9 MB)."""
TOLD_SECONDS = 30.0


def sentence(person: Person) -> str:
    """Return the one error sentence of an ended process, which follows its ordinary progress."""
    assert not person.output
    assert "Traceback" not in "\n".join(person.complaints)
    *progress, last = person.complaints
    assert last.startswith("error: "), person.complaints
    assert not [line for line in progress if line.startswith("error: ")]
    return last


def guest(peers: Swarm, folder: Path, *arguments: str) -> Person:
    folder.mkdir()
    bootstrap = ("--bootstrap", peers["bootstrap"].multiaddr)
    return peers.person("guest", "--role", "inference", *bootstrap, *arguments, home=folder)


@pytest.mark.slow
async def test_guests_who_cannot_take_part(tmp_path: Path, base: Path, fork_server: Path) -> None:
    names = ["bootstrap", "trainer", "validator"]
    async with swarm(tmp_path / "swarm", base, fork_server, names=names, steps=9) as peers:
        await peers.start()
        await peers["trainer"].says("trainer.step_opened", seconds=START_SECONDS)
        config = tmp_path / "small.toml"
        config.write_text(f"quota_bytes = {CHECKPOINT_SHARE}\n")
        lost = guest(peers, tmp_path / "lost", "--run", "nosuch")
        cramped = guest(peers, tmp_path / "cramped", "--config", str(config))
        false = guest(peers, tmp_path / "false", "--role", "validator")
        odd = guest(peers, tmp_path / "odd", "--engine", "warp")

        assert await lost.ended(TOLD_SECONDS) == 2
        said = sentence(lost)
        assert "no run named 'nosuch'" in said and f"it knows: {peers.run}" in said

        assert await false.ended(TOLD_SECONDS) == 2
        said = sentence(false)
        assert "does not name peer" in said and "as a validator; its owner must add" in said

        assert await odd.ended(TOLD_SECONDS) == 2
        assert "engine 'warp' is unknown; there are: native, vllm" in sentence(odd)
        assert not list((tmp_path / "odd").rglob("*.safetensors")), "fetched for nothing"

        assert await cramped.ended(TOLD_SECONDS) == 2
        said = sentence(cramped)
        print(said)
        assert "disk" in said or "quota" in said
        assert not cramped.left_behind


async def test_a_network_of_another_protocol_version(tmp_path: Path) -> None:
    """A bootstrap peer of a future version answers, but speaks other protocols."""

    async def answer(stream: Stream) -> None:
        await stream.receive()
        await stream.end()

    port, bulk_port = free_ports(2)
    future = Identity(bytes([9]) * 32)
    async with open_libp2p(
        future,
        listen=[f"/ip4/127.0.0.1/tcp/{port}"],
        bulk_port=bulk_port,
        world=Machine(),
        disk=LocalDisk(tmp_path / "future"),
    ) as transport:
        transport.serve("/swarm/runs/3.0.0", answer)
        async with trio.open_nursery() as nursery:
            person = Person(
                "guest",
                [sys.executable, "-m", "swarm.peer", "--bootstrap", transport.addresses()[0]],
                {"HOME": str(tmp_path)},
            )
            person.start(nursery)
            assert await person.ended(TOLD_SECONDS) == 2
            said = sentence(person)
            print(said)
            assert "version" in said and future.peer_id in said
            nursery.cancel_scope.cancel()
