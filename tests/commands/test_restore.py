"""`swarm trainer restore`: what it takes for a published policy, and where it refuses."""

from __future__ import annotations

import json
import os
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import trio
from msgspec.structs import replace
from safetensors.torch import save_file

from peers.engines.demo import make_policy
from peers.engines.model import read_weights
from peers.trainer.restore import copy_verified, put_in_place
from swarm.errors import UserError
from swarm.node.joining import LAST_BOOTSTRAP
from swarm.node.local import LOOPBACK, open_node
from swarm.run.manifest import manifest_in
from swarm.run.update import sign_manifest
from swarm.settings import PeerSettings
from swarm.shardcast.manifest import CheckpointManifest, build, digest_of
from swarm.wire.identity import Identity, load_or_create
from swarm.wire.manifest import TrustedKey
from swarm.world.disk import LocalDisk
from tests.commands.harness import NOBODY, bootstrap_peer, complaint, signed_manifest

RUN = "me/run"
SOON = {"restore": ("--deadline", "2"), "takeover": ()}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of policy 3 of lineage 1, with its manifest, as in a peer's home."""
    folder = tmp_path_factory.mktemp("published")
    make_policy(folder / "policy", seed=0)
    named = partial(build, LocalDisk(folder), "policy", run=RUN, lineage=1, step=3)
    (folder / "policy/.manifest").write_bytes(trio.run(named).encode())
    return folder / "policy"


def copied(folder: Path, out: Path, run: str = RUN, logged: bool = True) -> CheckpointManifest:
    manifest = folder / ".manifest"
    digests = {digest_of(manifest.read_bytes())} if logged and manifest.exists() else set()

    async def main() -> CheckpointManifest:
        return await copy_verified(out, folder, run, digests, lambda done, total: None)

    return trio.run(main)


def test_a_published_folder_replaces_what_was_put_there_before(
    published: Path, tmp_path: Path
) -> None:
    (tmp_path / "restored/0-9").mkdir(parents=True)
    (tmp_path / "restored.new").mkdir()
    manifest = copied(published, tmp_path / "restored.new")
    put_in_place(tmp_path / "restored.new", tmp_path / "restored", manifest)
    assert [path.name for path in (tmp_path / "restored").iterdir()] == ["1-3"]
    for path in published.iterdir():
        assert (tmp_path / "restored/1-3" / path.name).read_bytes() == path.read_bytes()


def test_what_no_trainer_has_published_is_refused(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "restored.new"
    with pytest.raises(UserError, match=r"no log of a trainer of run me/run .* lists it"):
        copied(published, out, logged=False)
    with pytest.raises(UserError, match=r"is a policy of run me/run, not of me/other"):
        copied(published, out, run="me/other")
    damaged = tmp_path / "damaged"
    shutil.copytree(published, damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    with pytest.raises(UserError, match=r"is damaged: .*model\.safetensors"):
        copied(damaged, out)
    (damaged / ".manifest").unlink()
    with pytest.raises(UserError, match=r"has no manifest; give a checkpoint folder"):
        copied(damaged, out)
    assert not out.exists()


def test_only_what_the_manifest_lists_is_copied(published: Path, tmp_path: Path) -> None:
    """A stranger's file might replace weights that a trainer has signed. Nor is a disk filled from
    a device, or a folder read for ever."""
    folder = tmp_path / "from a worker"
    shutil.copytree(published, folder)
    weights = read_weights(folder)
    name = next(iter(weights))
    save_file({name: torch.ones_like(weights[name])}, folder / "z.safetensors")
    (folder / "zeros").symlink_to("/dev/zero")
    (folder / "again").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    with (folder / "sparse").open("wb") as file:
        file.truncate(2**40)
    copied(folder, tmp_path / "restored.new")
    assert torch.equal(read_weights(tmp_path / "restored.new")[name], weights[name])
    names = [path.name for path in (tmp_path / "restored.new").iterdir()]
    assert sorted(names) == sorted(path.name for path in published.iterdir())


def test_the_copy_of_an_interrupted_restore_is_no_source(published: Path, tmp_path: Path) -> None:
    """The command empties that folder first."""
    out = tmp_path / "restored.new"
    shutil.copytree(published, out)
    with pytest.raises(UserError, match=r"is where an interrupted restore put its copy"):
        copied(out, out)
    assert (out / "model.safetensors").exists()


def test_a_restore_that_is_interrupted_leaves_nothing(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "restored.new"
    begun: list[bool] = []

    async def main() -> None:
        with trio.CancelScope() as scope:

            def stop(done: int, total: int | None) -> None:
                begun.append(out.exists())
                scope.cancel()

            digests = {digest_of((published / ".manifest").read_bytes())}
            await copy_verified(out, published, RUN, digests, stop)

    trio.run(main)
    assert begun[0] and not out.exists()


def test_a_home_that_needs_no_policy_gets_none(tmp_path: Path) -> None:
    words = ("trainer", "restore", "--home", tmp_path, "--bootstrap", NOBODY)
    assert "has no identity.key; give the trainer's home" in complaint(*words)
    load_or_create(tmp_path / "identity.key")
    (tmp_path / "trainer/states/0-7").mkdir(parents=True)
    assert "start the trainer with --resume, which loses nothing" in complaint(*words)
    (tmp_path / "trainer/states").rename(tmp_path / "trainer/inherited")
    assert "start the trainer with --resume, which loses nothing" in complaint(*words)
    (tmp_path / "format").write_text('{"format": 99}')
    assert "has format 99, and this build" in complaint(*words)
    (tmp_path / "format").unlink()
    shutil.rmtree(tmp_path / "trainer")
    (tmp_path / "process.lock").mkdir()
    assert f"--home {tmp_path} cannot be used (Is a directory" in complaint(*words)


@pytest.mark.parametrize("addresses", [b"", b"\xff\xff"])
def test_a_damaged_list_of_bootstrap_peers_is_none(addresses: bytes, tmp_path: Path) -> None:
    load_or_create(tmp_path / "identity.key")
    (tmp_path / LAST_BOOTSTRAP).write_bytes(addresses)
    for command in ("restore", "takeover"):
        said = complaint("trainer", command, "--home", tmp_path)
        assert f"give --bootstrap MULTIADDR (no peer has joined one from {tmp_path}" in said


@pytest.mark.slow
def test_a_strangers_run_that_names_this_peer_is_not_taken_for_its_own(tmp_path: Path) -> None:
    """Its policy would be trained on in the run that this home belongs to."""
    home = tmp_path / "standby"
    me = load_or_create(home / "identity.key").peer_id
    mine = Identity(bytes([8]) * 32).peer_id
    (home / "pinned-runs.json").write_text(json.dumps({"run": mine}))
    stranger = Identity(bytes([7]) * 32)
    manifest = manifest_in(signed_manifest(tmp_path, stranger, "other"))
    named = replace(manifest, standbys=[TrustedKey(peer=me)])
    path = tmp_path / "run.manifest"
    path.write_bytes(sign_manifest(stranger, named, time.time()).raw)
    with bootstrap_peer(tmp_path / "bootstrap", path) as multiaddr:
        for command in ("restore", "takeover"):
            words = ("trainer", command, "--home", home, "--bootstrap", multiaddr)
            shown = f"shows run {stranger.peer_id}/other, and this home has joined {mine}/run"
            assert shown in complaint(*words)
            assert shown in complaint(*words, "--run", "other")
            meant = complaint(*words, "--run", f"{stranger.peer_id}/other", *SOON[command])
            assert "no other trusted peer" in meant or "no peer of run" in meant
        (home / "pinned-runs.json").write_text('{"run": 7')
        assert "pinned-runs.json in --home is damaged" in complaint(*words)


@pytest.mark.slow
def test_a_version_that_the_home_knows_is_not_forgotten(tmp_path: Path) -> None:
    """The bootstrap peer shows the one before, in which this peer was a standby."""
    home, owner = tmp_path / "standby", Identity(bytes([7]) * 32)
    me = load_or_create(home / "identity.key").peer_id
    manifest = manifest_in(signed_manifest(tmp_path, owner))
    first = replace(manifest, standbys=[TrustedKey(peer=me)])
    versions = [first, replace(manifest, version=2)]
    old, new = (sign_manifest(owner, each, time.time()) for each in versions)
    (tmp_path / "run.manifest").write_bytes(old.raw)

    async def run_before() -> None:
        settings = PeerSettings(role=["trainer"], home=str(home), listen=list(LOOPBACK))
        async with open_node(settings, events_sink=lambda event: None) as node:
            await node.store_versions(f"{owner.peer_id}/test", [old, new])

    trio.run(run_before)
    with bootstrap_peer(tmp_path / "bootstrap", tmp_path / "run.manifest") as multiaddr:
        for command in ("restore", "takeover"):
            words = ("trainer", command, "--home", home, "--bootstrap", multiaddr)
            said = complaint(*words, *SOON[command])
            assert "its owner must list that id in the manifest's standbys first" in said
