"""A fault of the program is one sentence, with the traceback in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from swarm.errors import PeerError, UserError
from swarm.terminal.crash import FILES_KEPT, Crash, crashes_reported
from swarm.terminal.exit import exits
from swarm.terminal.untrusted import printable


async def nested(depth: int, error: BaseException) -> None:
    async with trio.open_nursery() as nursery:
        if depth:
            nursery.start_soon(nested, depth - 1, error)
        else:
            raise error


def test_the_innermost_cause_is_said_and_the_rest_is_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(Crash) as caught, crashes_reported(tmp_path / "home"):
        trio.run(nested, 30, KeyError("12D3KooW"))
    said = str(caught.value)
    assert said.startswith("a fault of the program: KeyError: '12D3KooW' (")
    assert len(said.splitlines()) == 1 and "please report it" in said
    (path,) = (tmp_path / "home").glob("crash-*.txt")
    assert str(path) in said
    whole = path.read_text()
    assert whole.count("ExceptionGroup") >= 30 and "KeyError: '12D3KooW'" in whole


def test_the_line_of_our_own_is_named(tmp_path: Path) -> None:
    """Not the library's, in which the error was raised."""
    said = r"TypeError: .* \(swarm/terminal/untrusted.py, line \d+, in printable\)"
    with pytest.raises(Crash, match=said), crashes_reported(tmp_path):
        printable(7)  # type: ignore[arg-type]


def test_another_package_and_its_line_are_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "lab-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[swarm.roles]\nhear = lab_role:Hear\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    role: dict[str, Any] = {"__name__": "lab_role"}
    exec(compile("def hear(order):\n    return order.step\n", "/lab/role.py", "exec"), role)
    said = (
        r"^a fault of the package lab: AttributeError: .*, in command; raised in role.py, line 2, "
        r"in hear\); .*, tell its makers; the peer may be started again$"
    )
    with pytest.raises(Crash, match=said), crashes_reported(tmp_path):
        exits(role["hear"])(7)


@pytest.mark.parametrize(
    "error", [UserError("a mistake"), PeerError("a peer"), KeyboardInterrupt(), OSError(28, "full")]
)
def test_what_is_foreseen_passes(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(BaseExceptionGroup), crashes_reported(tmp_path):
        trio.run(nested, 2, error)
    assert not list(tmp_path.iterdir())


def test_few_files_are_kept_and_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"crash-2026010{number}-000000.txt").write_text("old")
    with pytest.raises(Crash, match="RuntimeError"), crashes_reported(tmp_path):
        raise RuntimeError
    assert len(list(tmp_path.iterdir())) == FILES_KEPT
    (tmp_path / "file").write_text("")
    said = r"RuntimeError.*could not be written to .*file"
    with pytest.raises(Crash, match=said), crashes_reported(tmp_path / "file"):
        raise RuntimeError
