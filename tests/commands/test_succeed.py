"""`swarm run succeed` against a running bootstrap peer: the run gets an owner who was named."""

from __future__ import annotations

import time
from pathlib import Path

from msgspec.structs import replace

from swarm.run.manifest import load_manifest, manifest_in
from swarm.run.update import sign_manifest
from swarm.wire.identity import Identity, load_or_create
from swarm.wire.manifest import VERSION_MAX, RunManifest
from swarm.wire.succession import ownership_of
from tests.commands.harness import bootstrap_peer, complaint, signed_manifest, swarm

OWNER = Identity(bytes([7]) * 32)


def a_run(folder: Path) -> tuple[RunManifest, Path]:
    """A run that names the key in `successor.key`, and its signed manifest."""
    successor, path = load_or_create(folder / "successor.key"), folder / "run.manifest"
    manifest = manifest_in(signed_manifest(folder, OWNER))
    named = replace(manifest, successors=[successor.peer_id])
    path.write_bytes(sign_manifest(OWNER, named, time.time()).raw)
    return named, path


def test_a_successor_becomes_the_owner_of_a_running_run(tmp_path: Path) -> None:
    named, path = a_run(tmp_path)
    (successor,) = named.successors
    first = path.read_bytes()
    with bootstrap_peer(tmp_path / "home", path) as multiaddr:

        def succeed(key: str) -> tuple[str | Path, ...]:
            words = ("run", "succeed", path, "--owner-key", tmp_path / key)
            return (*words, "--bootstrap", multiaddr)

        load_or_create(tmp_path / "another.key")
        assert "is neither the owner" in complaint(*succeed("another.key"))
        assert path.read_bytes() == first

        done = swarm(*succeed("successor.key"))
        assert done.status == 0, done.errors
        assert f"owner {OWNER.peer_id} → {successor}; the run's id stays" in done.output
        assert f"bootstrap peer {multiaddr.rpartition('/')[2]} has it" in done.output
        assert ownership_of(load_manifest(path)).owner == successor

        # With the file of before, the command meets the new owner's version in the network.
        path.write_bytes(first)
        assert "owns run" in complaint(*succeed("successor.key"))


def test_an_old_version_in_the_network_is_not_brought_back(tmp_path: Path) -> None:
    """A bootstrap peer hands it out, with a validator that the owner has replaced since."""
    first, path = a_run(tmp_path)
    old = path.rename(tmp_path / "old.manifest")
    second = replace(first, version=2, checkpoints_kept=7)
    path.write_bytes(sign_manifest(OWNER, second, time.time()).raw)
    with bootstrap_peer(tmp_path / "home", old) as multiaddr:
        words = ("run", "succeed", path, "--owner-key", tmp_path / "successor.key")
        done = swarm(*words, "--bootstrap", multiaddr)
    assert done.status == 0 and "version 2 → 3" in done.output, done.errors
    assert manifest_in(load_manifest(path)).checkpoints_kept == 7


def test_a_thief_who_signs_the_highest_version_does_not_keep_the_run(tmp_path: Path) -> None:
    first, path = a_run(tmp_path)
    stolen = tmp_path / "stolen.manifest"
    last = replace(first, version=VERSION_MAX)
    stolen.write_bytes(sign_manifest(OWNER, last, time.time()).raw)
    with bootstrap_peer(tmp_path / "home", stolen) as multiaddr:
        network = ("--owner-key", tmp_path / "successor.key", "--bootstrap", multiaddr)
        before = stolen.read_bytes()
        assert "the highest there can be" in complaint("run", "succeed", stolen, *network)
        assert stolen.read_bytes() == before
        done = swarm("run", "succeed", path, *network)
        assert done.status == 0 and "version 1 → 2" in done.output, done.errors
        path.write_bytes(stolen.read_bytes())
        assert "owns run" in complaint("run", "succeed", path, *network)
