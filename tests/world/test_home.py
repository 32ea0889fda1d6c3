"""A home is private, git ignores it, and one process at a time uses it."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.wire.identity import load_or_create
from swarm.world.home import make_home, sole_user
from tests.commands.harness import NOBODY, complaint, swarm

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from swarm.world.home import sole_user
with sole_user(Path(sys.argv[1]), "trainer"):
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_home_is_private_and_ignored_by_git(tmp_path: Path) -> None:
    load_or_create(tmp_path / "lab/trainer/identity.key")
    home = tmp_path / "lab/trainer"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert (home / ".gitignore").read_text() == "*\n"


def test_a_folder_with_something_in_it_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    make_home(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_second_process_is_told_who_holds_the_home(tmp_path: Path) -> None:
    peer = ("peer", "--home", tmp_path, "--bootstrap", NOBODY)
    with sole_user(tmp_path, "trainer"):
        said = complaint(*peer)
    held = r"--home (.*) is in use by process (\d+) \(trainer, since \d{4}-\d\d-\d\d \d\d:\d\d:"
    found = re.match(held, said)
    assert found is not None and found.groups() == (str(tmp_path), str(os.getpid())), said
    with sole_user(tmp_path, "a role with a shorter name"), pytest.raises(UserError) as caught:
        sole_user(tmp_path, "relay").__enter__()
    assert "(a role with a shorter name, since" in str(caught.value)


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    """Not even through a child of its own that lives on."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(UserError, match=f"in use by process {holder.pid} "):
                sole_user(tmp_path, "trainer").__enter__()
            holder.kill()
            holder.wait()
            with sole_user(tmp_path, "trainer"):
                os.kill(child, 0)
        finally:
            os.kill(child, 9)


def test_a_key_where_nothing_can_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = complaint("id", "--home", tmp_path / "file" / "home")
    assert said.endswith("identity.key cannot be made (Not a directory); choose another folder")


def test_an_owner_key_is_in_the_default_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.commands.test_commands import create

    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    given = create(tmp_path)
    flag = given.index("--owner-key")
    del given[flag : flag + 2]
    assert f"owner key: {tmp_path}/me/.swarm/owner.key" in swarm(*given).output
