"""`swarm checkpoint fetch --bootstrap`: fetch a run's newest policy from peers, on real sockets."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from swarm.errors import DeadlineError, leaf_errors
from swarm.gossip.topics import RUN, WORK
from swarm.look.newest_policy import from_peers
from swarm.node.local import open_node
from swarm.node.node import Node
from swarm.node.run_node import RunNode
from swarm.run.manifest import load_manifest
from swarm.run.run import Run
from swarm.settings import PeerSettings
from swarm.shardcast import limits
from swarm.transport import OpenBlob, Refused
from swarm.wire.envelope import STATE_LIFETIME_SECONDS
from swarm.wire.identity import Identity, PeerId, load_or_create
from swarm.wire.messages import Checkpoint
from tests.commands.harness import NOBODY, complaint, signed_manifest
from tests.shardcast.harness import announcement

SEED = 7
PIECES = 24


class Trainer:
    """A run's trainer that has published a policy and is also the bootstrap peer."""

    def __init__(self, node: Node, part: RunNode, folder: Path) -> None:
        self.node = node
        self.part = part
        self.folder = folder
        """Folder of the published policy."""
        self.served: list[bytes] = []
        """Names of the requested blobs, in order."""
        self.on_serve: Callable[[], None] = lambda: None
        self._open = part.blobs.open
        part.blobs.open = self._count  # type: ignore[method-assign]

    def _count(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        self.served.append(digest)
        self.on_serve()
        return self._open(client, digest)

    @property
    def address(self) -> str:
        return self.node.transport.addresses()[0]


@asynccontextmanager
async def trainer(tmp_path: Path) -> AsyncIterator[Trainer]:
    home, policy = tmp_path / "trainer", tmp_path / "policy"
    home.mkdir(mode=0o700)
    (home / "identity.key").touch(mode=0o600)
    (home / "identity.key").write_text(bytes([SEED] * 32).hex())
    envelope = signed_manifest(policy, Identity(bytes(32)), "fetched", seed=SEED)
    (tmp_path / "run.manifest").write_bytes(envelope.raw)
    size = PIECES * limits.PIECE_BYTES_MIN
    (policy / "model.safetensors").write_bytes(random.Random(0).randbytes(size))
    settings = PeerSettings(
        role=["trainer"],
        listen=["/ip4/127.0.0.1/tcp/0"],
        home=str(home),
        manifest=[str(tmp_path / "run.manifest")],
        uplink_mbps=40,
    )
    async with open_node(settings, events_sink=lambda event: None) as node:
        part = RunNode(node, Run(load_manifest(tmp_path / "run.manifest")), (RUN, WORK))
        async with part.joined():
            for path in policy.iterdir():
                await node.disk.write(f"made/{path.name}", path.read_bytes())
            held = await part.store.publish("made", 0, 4)
            checkpoint: Checkpoint = announcement(held)
            await part.announce(checkpoint, STATE_LIFETIME_SECONDS)
            yield Trainer(node, part, policy)


async def fetch(
    one: Trainer, out: Path, *arguments: str, dies_by: signal.Signals | None = None, at: int = 0
) -> subprocess.CompletedProcess[bytes]:
    """Run the command and end it by a signal after `at` requested blobs; serves no more."""
    command = [
        sys.executable,
        "-c",
        "from swarm.commands.main import main; main()",
        "checkpoint",
        "fetch",
    ]
    command += ["--bootstrap", one.address, "--out", str(out), *arguments]
    start = partial(
        trio.run_process, command, capture_stdout=True, capture_stderr=True, check=False
    )
    one.served.clear()
    async with trio.open_nursery() as nursery:
        ended: list[subprocess.CompletedProcess[bytes]] = []
        processes: list[trio.Process] = []

        async def run(task_status: trio.TaskStatus[trio.Process]) -> None:
            ended.append(await start(task_status=task_status))

        def watch() -> None:
            if dies_by is None or len(one.served) < at:
                return
            if len(one.served) == at:
                os.kill(processes[0].pid, dies_by)
            raise Refused(503, "busy")

        one.on_serve = watch
        processes.append(await nursery.start(run))
    return ended[0]


def same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_a_digest_pins_the_policy(tmp_path: Path) -> None:
    with trio.fail_after(60):
        async with trainer(tmp_path) as one:
            checkpoint = one.part.newest_checkpoint()
            assert checkpoint is not None
            newest = checkpoint.reference.digest.hex()
            other = await fetch(one, tmp_path / "out", "--digest", "ab" * 32)
            assert other.returncode == 2 and not (tmp_path / "out").exists()
            said = other.stderr.decode()
            assert f"is 4 with manifest {newest[:12]}…, not --digest abababababab…" in said
            assert said.count("\n") == 1
            pinned = await fetch(one, tmp_path / "out", "--digest", newest)
            assert pinned.returncode == 0, pinned.stderr
            assert same(one.folder, tmp_path / "out")


@pytest.mark.slow
def test_a_slow_disk_is_not_held_against_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pieces have arrived, but making them durable takes longer than the rest of --deadline."""
    clock = MockClock(rate=1)
    fsync = os.fsync
    synced: list[Path] = []

    def slow(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path == tmp_path / "out.partial/checkpoints/0-4/model.safetensors":
            trio.from_thread.run_sync(clock.jump, 60.0)
            synced.append(path)
        fsync(descriptor)

    async def main() -> None:
        async with trainer(tmp_path) as one:
            monkeypatch.setattr(os, "fsync", slow)
            held = await from_peers(tmp_path / "out", [one.address], deadline=50.0)
            assert held.key == (0, 4)
            assert same(one.folder, tmp_path / "out")

    trio.run(main, clock=clock)
    assert len(synced) == 1


@pytest.mark.slow
def test_pieces_that_do_not_come_are_held_against_their_sources(tmp_path: Path) -> None:
    clock = MockClock(rate=1)

    async def main() -> None:
        async with trainer(tmp_path) as one:

            def busy() -> None:
                if len(one.served) > 1:  # the first request was refused
                    clock.jump(10.0)
                raise Refused(503, "has no time")

            one.on_serve = busy
            with pytest.raises(BaseExceptionGroup) as raised:
                await from_peers(tmp_path / "out", [one.address], deadline=10.0)
            (error,) = leaf_errors(raised.value)
            assert isinstance(error, DeadlineError)
            trainer_id = Identity(bytes([SEED] * 32)).peer_id
            # The fetch has the time that joining left.
            late = rf"checkpoint 0/4 was not fetched within (9|10) s \({trainer_id}: "
            assert re.search(late, str(error))

    trio.run(main, clock=clock)


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_interrupted_and_killed_it_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with trio.fail_after(180):
        async with trainer(tmp_path) as one:
            stopped = await fetch(one, out, dies_by=signal.SIGINT, at=12)
            assert stopped.returncode == 130 and stopped.stderr == b"stopped\n"
            assert not out.exists()
            identity = load_or_create(tmp_path / "out.partial/identity.key").peer_id
            killed = await fetch(one, out, dies_by=signal.SIGKILL, at=10)
            assert killed.returncode == -signal.SIGKILL and not out.exists()
            again = load_or_create(tmp_path / "out.partial/identity.key").peer_id
            assert again == identity
            done = await fetch(one, out, "--json")
            assert done.returncode == 0, done.stderr
            # Pieces on disk, all but the 8 in flight each time, are not requested again.
            assert 1 <= len(one.served) < PIECES
            told = json.loads(done.stdout)
            assert (told["run"], told["step"]) == (one.part.run.id, 4)
            assert told["manifest"] == one.part.newest_checkpoint().reference.digest.hex()  # type: ignore[union-attr]
            assert same(one.folder, out) and not (tmp_path / "out.partial").exists()

            wrong = await fetch(one, tmp_path / "other", "--run", "another")
            assert wrong.returncode == 2 and wrong.stdout == b""
            assert wrong.stderr.decode() == (
                "error: the bootstrap peer knows no run named 'another'; it knows: "
                f"{one.part.run.id}\n"
            )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--bootstrap", "here"], "'here'"),
        (["--bootstrap", "/ip4/127.0.0.1/tcp/1"], "/ip4/127.0.0.1/tcp/1"),
        (["--bootstrap", NOBODY], "no bootstrap peer can be reached: /ip4/127.0.0.1/tcp/1/p2p/"),
        (["--bootstrap", NOBODY, "http://127.0.0.1:1"], "give either a mirror's address"),
    ],
)
def test_wrong_addresses_are_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    assert sentence in complaint("checkpoint", "fetch", *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    said = complaint("checkpoint", "fetch", "--bootstrap", NOBODY, "--out", tmp_path)
    assert "exists and is not an empty folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
