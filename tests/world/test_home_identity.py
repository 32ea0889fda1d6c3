"""A home keeps its identity: moved, or without its key, it is never silently another peer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from swarm.commands.join import prepare, settings_of
from swarm.errors import UserError
from swarm.run.links import Link, make_link
from swarm.settings import load_settings
from swarm.wire.identity import Identity, home_identity, load_or_create
from swarm.world.home import open_format
from tests.commands.harness import NOBODY, bootstrap_peer, complaint, signed_manifest, swarm

OWNER = Identity(bytes(32))
RUN = f"{OWNER.peer_id}/test"
LINK = make_link(Link(RUN, (NOBODY,), role="relay"))


def joined(home: Path) -> str:
    """A home as `swarm join` leaves it; returns the id of its peer."""
    prepare(LINK, home).write()
    return home_identity(home).peer_id


def test_a_moved_home_is_the_same_peer(tmp_path: Path) -> None:
    peer = joined(tmp_path / "old")
    new = (tmp_path / "old").rename(tmp_path / "new")
    settings = load_settings(new / "peer.toml", {})
    assert settings.home_path == new
    assert home_identity(settings.home_path).peer_id == peer
    assert not (tmp_path / "old").exists()


def test_a_link_is_used_again_from_a_moved_home(tmp_path: Path) -> None:
    peer = joined(tmp_path / "old")
    new = (tmp_path / "old").rename(tmp_path / "new")
    with (new / "peer.toml").open("a") as file:
        file.write("uplink_mbps = 5\n")
    settings = settings_of(prepare(LINK, new), {})
    assert (settings.home_path, settings.uplink_mbps) == (new, 5)
    assert home_identity(settings.home_path).peer_id == peer


def test_a_home_that_lost_its_key_makes_no_other(tmp_path: Path) -> None:
    peer = joined(tmp_path)
    (tmp_path / "identity.key").unlink()
    said = complaint("peer", "--home", tmp_path, "--bootstrap", NOBODY)
    assert f"{tmp_path} is the home of {peer}, and its identity.key is missing" in said
    assert "put that key back" in said and f"swarm id --home {tmp_path} --change" in said
    assert not (tmp_path / "identity.key").exists()
    assert peer in complaint("id", "--home", tmp_path)
    changed = swarm("id", "--home", tmp_path, "--change")
    assert changed.status == 0 and peer not in changed.output
    assert home_identity(tmp_path).peer_id == changed.output.strip()


def test_a_home_with_the_key_of_another_peer(tmp_path: Path) -> None:
    peer, other = joined(tmp_path / "a"), joined(tmp_path / "b")
    shutil.copy2(tmp_path / "b/identity.key", tmp_path / "a/identity.key")
    with pytest.raises(UserError, match=f"is the home of {peer}, and its .* is that of {other}"):
        home_identity(tmp_path / "a")
    assert swarm("id", "--home", tmp_path / "a", "--change").output.strip() == other
    assert home_identity(tmp_path / "a").peer_id == other


def test_a_home_of_an_older_build_without_its_key(tmp_path: Path) -> None:
    """It does not say who its peer was, but it had one."""
    (tmp_path / "peer.sqlite").touch()
    with pytest.raises(UserError, match="the home of a peer, and its identity"):
        home_identity(tmp_path)
    load_or_create(tmp_path / "identity.key")
    peer = home_identity(tmp_path).peer_id
    (tmp_path / "identity.key").unlink()
    with pytest.raises(UserError, match=peer):
        home_identity(tmp_path)


def test_commands_that_read_a_home_make_no_key_in_it(tmp_path: Path) -> None:
    open_format(tmp_path)
    (tmp_path / "ledger.sqlite").touch()
    (tmp_path / "peer.sqlite").touch()
    complaint("ledger", "export", "--from", tmp_path, "--out", tmp_path / "out.jsonl")
    looked = swarm("doctor", "--role", "relay", "--home", tmp_path)
    assert looked.status == 1 and "PROBLEM: " in looked.output
    assert "is the home of a peer, and its identity.key is missing" in looked.output
    assert not (tmp_path / "identity.key").exists()


def test_a_first_start_says_who_the_peer_is(tmp_path: Path) -> None:
    manifest = tmp_path / "run.manifest"
    manifest.write_bytes(signed_manifest(tmp_path / "model", OWNER).raw)
    home = tmp_path / "bootstrap"
    with bootstrap_peer(home, manifest):
        assert (home / "identity.pub").read_text().strip() == home_identity(home).peer_id
