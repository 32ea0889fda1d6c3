"""Commands of other packages, found by entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENTRY_POINTS = """[swarm.commands]
greet = lab_commands:greet
ledger.weigh = lab_commands:weigh
broken = lab_absent:command
trips = lab_commands:trips
constant = lab_commands:PATH
wrong = no module!
relative = ..lab:command
"""
MODULE = '''
import pathlib
PATH = 3
pathlib.Path(__file__).with_name("imported").touch()

def greet(name: str) -> None:
    """Greet somebody of the lab."""
    print(f"hello {name}")

def trips() -> None:
    raise KeyError("a table")

def weigh() -> None:
    """Weigh the ledger."""
    print("two pounds")
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "lab_commands.py").write_text(MODULE)
    info = tmp_path / "lab-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: lab\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def swarm(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarm.commands.main", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "100"},
    )


def test_help_shows_a_command_of_another_package_without_importing_it(site: Path) -> None:
    page = swarm(site, "--help").stdout
    assert "greet" in page and "Greet somebody of the lab." in page
    assert "cannot be loaded: there is no module lab_absent" in page
    assert not (site / "imported").exists()


def test_a_command_of_another_package_runs(site: Path) -> None:
    assert swarm(site, "greet", "Ada").stdout == "hello Ada\n"
    assert swarm(site, "ledger", "weigh").stdout == "two pounds\n"


def test_a_fault_of_another_package_says_whose_it_is(site: Path) -> None:
    done = swarm(site, "trips")
    assert done.returncode == 1
    assert done.stderr.endswith("a fault of the package lab, not of Swarm: tell its makers\n")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", "No module named 'lab_absent'"),
        ("constant", "lab_commands:PATH is no function"),
        ("wrong", "'NoneType' object has no attribute 'group'"),
        ("relative", "the 'package' argument is required to perform a relative import for '..lab'"),
    ],
)
def test_a_command_that_cannot_be_loaded_says_whose_it_is(site: Path, name: str, why: str) -> None:
    done = swarm(site, name)
    assert done.returncode == 2
    assert done.stderr == f"error: the command {name} of lab cannot be loaded: {why}\n"
