"""A peer's sign of life, and the command that reads it."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
import trio

from swarm.events import Event
from swarm.look.health import HEALTH, SILENT_SECONDS, Pulse, Unwell, beating, examine
from swarm.node.local import open_node
from swarm.settings import PeerSettings
from swarm.wire.identity import Identity
from tests.commands.harness import Outcome, complaint, swarm

PEER = Identity(bytes(32)).peer_id


def event(name: str, **fields: object) -> Event:
    return Event(name, 0.0, PEER, fields)


def aged(home: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(home / HEALTH, (then, then))


def test_a_peer_is_well_while_it_beats_and_ready_in_its_run(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path, PEER, ["inference"])
    pulse.touch()
    found, _ = examine(tmp_path, ready=False)
    assert (found.peer, found.run, found.ready) == (PEER, None, False)
    with pytest.raises(Unwell, match="takes no part in a run yet"):
        examine(tmp_path, ready=True)

    pulse(event("peer.run_found", run=f"{PEER}/first"))
    pulse(event("peer.status"))
    pulse.touch()
    with pytest.raises(Unwell, match="takes no part in a run yet"):
        examine(tmp_path, ready=True)
    pulse(event("membership.admitted", by=PEER))
    pulse.touch()
    assert examine(tmp_path, ready=True)[0].run == f"{PEER}/first"
    pulse(event("membership.lease_lost"))
    pulse.touch()
    assert not examine(tmp_path, ready=False)[0].ready
    pulse(event("membership.admitted", by=PEER))
    pulse.touch()

    aged(tmp_path, SILENT_SECONDS + 5)
    with pytest.raises(Unwell, match="no sign of life for 35 s"):
        examine(tmp_path, ready=False)
    pulse.touch()
    assert examine(tmp_path, ready=True)[1] < SILENT_SECONDS


def test_a_trusted_peer_is_ready_without_an_admission(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path, PEER, ["validator"])
    pulse(event("peer.status"))
    pulse.touch()
    assert examine(tmp_path, ready=True)[0].ready


def test_a_clock_that_was_set_back_does_not_keep_a_dead_peer_alive(tmp_path: Path) -> None:
    Pulse(tmp_path, PEER, ["bootstrap"]).touch()
    aged(tmp_path, -3600)
    with pytest.raises(Unwell, match="no sign of life"):
        examine(tmp_path, ready=True)


def test_a_disk_that_takes_nothing_does_not_end_the_peer(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "gone", PEER, ["relay"])
    pulse.touch()
    pulse.end()


def test_a_sign_of_life_that_is_late_leaves_no_file_behind(tmp_path: Path) -> None:
    """The thread of the last one may still write while the peer leaves."""
    pulse = Pulse(tmp_path, PEER, ["validator"])
    pulse.touch()
    pulse(event("peer.status"))
    pulse.end()
    pulse.touch()
    assert not list(tmp_path.iterdir())


def test_each_sign_of_life_resets_the_watchdog_of_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    pulse = Pulse(tmp_path, PEER, ["relay"])
    pulse.touch()  # nobody listens: no error
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        for _ in range(2):
            pulse.touch()
            assert systemd.recv(64) == b"WATCHDOG=1"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"peer": 1}', b"[" * 100_000])
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / HEALTH).write_bytes(content)
    assert complaint("health", "--home", tmp_path).startswith(
        f"no peer runs with --home {tmp_path}"
    )


@pytest.mark.wall_clock
async def test_the_command_tells_of_a_peer_on_this_machine_until_its_end(tmp_path: Path) -> None:
    async def health(*options: str) -> Outcome:
        return await trio.to_thread.run_sync(swarm, "health", "--home", str(home), *options)

    home = tmp_path / "home"
    settings = PeerSettings(role=["bootstrap"], listen=["/ip4/127.0.0.1/tcp/0"], home=str(home))

    async with open_node(settings, events_sink=lambda event: None) as node:
        assert (await health()).status == 1
        async with beating(node):
            found = await health("--ready")
            assert found.status == 0, found.errors
            assert found.output.startswith(f"bootstrap {node.peer_id}: ready, ")
            told = json.loads((await health("--json")).output)
            assert (told["roles"], told["ready"]) == (["bootstrap"], True)
        assert (await health()).status == 1
