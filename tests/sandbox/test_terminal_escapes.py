"""Commands that try to leave a terminal: by its tools, its files, or what they leave behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from peers.environments.terminal.problem import Problem, Said, say
from peers.sandbox import Limits, why_none
from peers.sandbox.program import SHOWN_FOLDERS, Tree
from swarm.errors import UserError
from tests.sandbox.test_escapes import running_with

pytestmark = pytest.mark.skipif(bool(why_none()), reason=f"no sandbox here: {why_none()}")

BOUNDS = Limits(
    seconds=20.0, cpu_seconds=2.0, output_bytes=20_000, files_bytes=1 << 20, processes=16
)
PROBLEM = Problem(instruction="", files={"/app/own.txt": "own\n"})


def said(command: str, limits: Limits = BOUNDS) -> Said:
    return say(PROBLEM, PROBLEM.tree, command, limits)


def text(command: str) -> str:
    return said(command).readable(10_000)


@pytest.mark.parametrize(
    "command",
    [
        "exec 3<>/dev/tcp/127.0.0.1/80",
        "python3 -c 'import socket; socket.socket()'",
        "python3 -c 'import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)'",
        "cat /proc/self/environ",
        "ls /proc/1",
        "cat /etc/shadow",
        "ls /sys",
        "cat /app/link; ln -s /etc/shadow link; cat link",
        "cat ../../../../etc/shadow",
        "echo x > /usr/bin/ls",
        "rm /usr/bin/ls",
        "echo x > /opt/python/bin/python3",
        "echo x > /etc/passwd",
        "mkdir /new",
        "mount -t tmpfs none /app",
        "unshare -r true",
        "chroot /app /bin/true",
        "python3 -c 'import ctypes; l = ctypes.CDLL(None); exit(l.ptrace(0, 0, 0, 0) != 0)'",
        "python3 -c 'import os; os.setuid(0)'",
        "su -c true",
        "mknod dev b 8 0",
        "python3 -c 'import os; os.pidfd_open(1)'",
    ],
)
def test_what_is_not_there_or_not_allowed_fails(command: str) -> None:
    found = said(command)
    assert found.code != 0 and not found.ended, found


def test_the_users_files_keys_and_variables_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner.key").write_text("secret-81")
    monkeypatch.setenv("SECRET_KEY", "secret-81")
    home = Path.home()
    shown = text(
        f"cat {tmp_path}/owner.key; ls -A {home} {Path(__file__).parent}; env; export; id -u; ls /"
    )
    assert "secret-81" not in shown and ".bashrc" not in shown and Path(__file__).name not in shown
    assert shown.splitlines()[-1] == "usr" and "app" in shown.splitlines()


def test_a_fork_bomb_a_full_disk_and_a_flood_end_with_their_command() -> None:
    bomb = said(":(){ :|:& };: 2>/dev/null; sleep 60 # bomb-92b", Limits(seconds=2.0, processes=16))
    assert bomb.ended == "it took too long" and running_with("bomb-92b") == []
    full = said("head -c 9000000 /dev/zero > big; for n in $(seq 5000); do : > n$n; done")
    assert full.code != 0 or full.ended
    flood = said("cat /dev/zero")
    assert flood.ended == "it wrote too much" and len(flood.output) <= BOUNDS.output_bytes
    memory = said("python3 -c 'x = bytearray(1 << 34)'")
    assert "MemoryError" in memory.readable(10_000) or memory.ended


def test_nothing_runs_on_after_its_command() -> None:
    begun = time.monotonic()
    found = said(
        "(setsid nohup bash -c 'sleep 600; :' late-92b &); bash -c 'sleep 500; :' late-92b & "
        "disown; echo end"
    )
    assert found.output == b"end\n" and time.monotonic() - begun < BOUNDS.seconds
    assert running_with("late-92b") == []


def test_the_supervisor_is_out_of_reach() -> None:
    shown = text(
        "kill -9 1; kill -STOP 1; kill -9 -1 2>/dev/null || true; trap '' TERM; echo $PPID; "
        "for n in $(seq 3 60); do echo '{\"code\": 0}' >&$n; done 2>/dev/null; exit 7"
    )
    assert shown.endswith("[exit code 7]") or "its shell was killed" in shown


def test_files_are_read_without_following_what_they_lead_to() -> None:
    found = said(
        "ln -s /etc/passwd one; ln -s /app two; mkfifo pipe; mkdir -p d/e; echo x > d/e/f; "
        "chmod 0 d/e/f d/e d; ln own.txt hard; touch $'bad\\nname' $'bad\\xffname'; "
        'python3 -c "import socket; s = socket.socketpair()"; truncate -s 100 sparse; '
        "p=d2; for n in $(seq 80); do p=$p/d; done; mkdir -p $p; touch $p/deep"
    )
    tree = found.tree
    assert tree.links == {"/app/one": "/etc/passwd", "/app/two": "/app"}
    names = {name for name in tree.files if name.startswith("/app/")}
    assert names == {"/app/own.txt", "/app/hard", "/app/d/e/f", "/app/sparse"}
    assert tree.modes["/app/d"] == tree.modes["/app/d/e/f"] == 0
    again = say(PROBLEM, tree, "cat one | head -c 6; cat two/own.txt; chmod 700 d; ls d", BOUNDS)
    assert again.readable(100) == "nobodyown\ne"


def test_no_tree_stands_in_a_folder_that_is_shown() -> None:
    for name in (*(f"/{each}/x" for each in SHOWN_FOLDERS), "/", "x", "//app/x", "/app/../etc/x"):
        with pytest.raises(UserError, match="own folders"):
            Tree({name: b""})
