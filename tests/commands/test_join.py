"""`swarm join`: a link, a home, a running peer; and the same again."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from swarm.commands.join import HEAD, prepare, settings_of
from swarm.errors import UserError
from swarm.run.links import Link, make_link
from swarm.settings import load_settings
from swarm.wire.identity import Identity
from tests.commands.harness import NOBODY, bootstrap_peer, complaint, signed_manifest

OWNER, OTHER = Identity(bytes(32)), Identity(bytes([9]) * 32)
RUN = f"{OWNER.peer_id}/test"


def link(*bootstrap: str, run: str = RUN, role: str = "relay") -> str:
    return make_link(Link(run, bootstrap or (NOBODY,), role=role))


def test_the_settings_are_written_once_and_belong_to_the_person_then(tmp_path: Path) -> None:
    home = tmp_path / "home"
    joining = prepare(link(), home)
    joining.write()
    assert stat.S_IMODE(joining.path.stat().st_mode) == 0o600
    table = tomllib.loads(joining.path.read_text())
    assert table == {"role": ["relay"], "run": RUN, "bootstrap": [NOBODY], "home": "."}

    moved_to = NOBODY.replace("/tcp/1/", "/tcp/2/")
    moved = prepare(link(moved_to), home)
    moved.write()
    assert tomllib.loads(joining.path.read_text())["bootstrap"] == [moved_to]
    own = f"{HEAD}run = '{RUN}'\nuplink_mbps = 5\n"
    joining.path.write_text(own)
    joining.write()
    assert joining.path.read_text() == own
    settings = settings_of(joining, {"verbose": True})
    assert (settings.uplink_mbps, settings.bootstrap, settings.verbose) == (5, [NOBODY], True)


@pytest.mark.parametrize("name", ["\U0001f41d", "a\x7fb", "d\u00e9j\u00e0 vu", 'a"b'])
def test_a_home_of_any_name_is_read_again(name: str, tmp_path: Path) -> None:
    prepare(link(), tmp_path / name).write()
    again = prepare(link(), tmp_path / name)
    assert load_settings(again.path, {}).home_path == tmp_path / name


def test_a_home_is_of_one_run(tmp_path: Path) -> None:
    prepare(link(), tmp_path).write()
    with pytest.raises(UserError, match="choose another folder with --home"):
        prepare(link(run=f"{OTHER.peer_id}/test"), tmp_path)


def test_an_owner_is_pinned_by_the_link(tmp_path: Path) -> None:
    manifest = tmp_path / "run.manifest"
    manifest.write_bytes(signed_manifest(tmp_path / "model", OWNER).raw)
    with bootstrap_peer(tmp_path / "bootstrap", manifest) as address:
        home = tmp_path / "home"
        false = link(address, run=f"{OTHER.peer_id}/test")
        said = complaint("join", false, "--home", home)
        assert f"the run 'test' is another owner's here ({RUN}), not that of" in said
        assert not home.exists(), "nothing is written for a run that is not there"


@pytest.mark.slow
def test_a_link_starts_a_peer_and_starts_it_again(tmp_path: Path) -> None:
    manifest = tmp_path / "run.manifest"
    manifest.write_bytes(signed_manifest(tmp_path / "model", OWNER).raw)
    home = tmp_path / "home"
    with bootstrap_peer(tmp_path / "bootstrap", manifest) as address:
        command = [sys.executable, "-m", "swarm.commands.main", "join", link(address)]
        command += ["--home", str(home)]
        for _ in range(2):
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process:
                assert process.stderr is not None
                assert any("found the run test" in line for line in process.stderr)
                process.send_signal(signal.SIGINT)
                told, _ = process.communicate(timeout=60)
                assert f"owner      {OWNER.peer_id}, as the link says" in told
                assert "no trusted peer of the run answers now" in told
            assert process.returncode == 0
