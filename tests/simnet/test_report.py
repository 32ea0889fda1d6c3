"""What a person sees of a simulation: progress, report, plot, and one sentence for mistakes."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from rich.console import Console
from typer.testing import CliRunner

from simnet.cli import command
from simnet.clock import Deadlock, run_virtual
from simnet.report import print_report
from simnet.simulate import simulate

SMALL = 3_000_000


def printed(report: dict[str, Any]) -> str:
    """Wide: how fast it went, in one digit or three, must not decide where a line is broken."""
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    print_report(report, "python -m simnet run x", console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def broadcast(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A small broadcast, watched and drawn."""
    path = tmp_path_factory.mktemp("plots") / "broadcast.svg"
    report = simulate(
        "broadcast", peers=12, seed=3, model_bytes=SMALL, shows_progress=True, plot_path=path
    )
    return report, path


def test_the_report_says_what_came_of_it(broadcast: tuple[dict[str, Any], Path]) -> None:
    report, _ = broadcast
    text = printed(report)
    assert "broadcast  12 peers, seed 3  nothing violated" in text
    assert report["trace_hash"] in text
    assert "10 of 10" in text  # all who fetch have policy 0
    for words in ("inference", "validator", "waiting", "pieces", "DHT lookups"):
        assert words in text


def test_a_violation_is_shown_with_its_replay(broadcast: tuple[dict[str, Any], Path]) -> None:
    report = {**broadcast[0], "violations": ["at 1.000 s: something"]}
    text = printed(report)
    assert "1 violation" in text
    assert "VIOLATION at 1.000 s: something\nreplay: python -m simnet run x\n" in text


def test_bytes_received_are_bytes_sent(broadcast: tuple[dict[str, Any], Path]) -> None:
    roles = broadcast[0]["network"]["roles"]
    sent = sum(role["pieces_sent_bytes"] for role in roles.values())
    received = sum(role["pieces_received_bytes"] for role in roles.values())
    assert sent == received >= 10 * SMALL
    for role in ("trainer", "validator", "inference"):
        assert sum(roles[role]["time_shares"].values()) == pytest.approx(1.0, abs=1e-3)


def test_the_plot_shows_the_broadcast(broadcast: tuple[dict[str, Any], Path]) -> None:
    drawn = broadcast[1].read_text()
    assert drawn.startswith("<?xml")
    assert drawn.count('id="axes_') == 1


def test_looking_on_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("simnet.report.LINE_SECONDS", 0.0)
    watched = simulate("join", peers=10, shows_progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3
    assert all(" virtual  " in line and "× real time" in line for line in lines)
    assert simulate("join", peers=10)["trace_hash"] == watched["trace_hash"]


@pytest.mark.slow
def test_the_published_run_is_shown_beside_the_simulated_one() -> None:
    report = simulate("intellect-2", peers=12, seed=1, model_bytes=60_000_000)
    assert report["violations"] == []
    assert report["figures"]["steps_trained"] == 6
    rows = {row["figure"]: row for row in report["figures"]["beside_the_published_run"]}
    assert rows["broadcast_minutes"]["published_short"] == 14.0
    # The workers' downlinks bound it: 62 GB at 500 to 750 Mb/s.
    assert 11.0 < rows["broadcast_minutes"]["simulated_short"] < 25.0
    assert 8.0 < rows["first_submission_minutes"]["simulated_short"] < 14.0
    assert (
        rows["full_batch_minutes"]["simulated_long"] > rows["full_batch_minutes"]["simulated_short"]
    )
    assert 0.0 <= rows["trainer_idle_share"]["simulated_short"] < 0.5


# --- ending early ---


@pytest.mark.slow
def test_ctrl_c_ends_it_without_a_traceback() -> None:
    program = (
        "import os, signal, threading\n"
        "from simnet.cli import command\n"
        "threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "command()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "run", "join", "--peers", "200"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_deadlock_says_where_everybody_waits() -> None:
    async def main() -> None:
        async def forgotten() -> None:
            await trio.Event().wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(forgotten, name="the forgotten one")

    with pytest.raises(Deadlock) as caught:
        run_virtual(main, seed=1)
    assert "the main task (main, simnet/test_report.py:" in str(caught.value)
    assert "the forgotten one (forgotten, simnet/test_report.py:" in str(caught.value)


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["jion"], "unknown scenario 'jion'; there are: "),
        (["join", "--peers", "3"], "join needs at least 10 peers, not 3"),
        (["join", "--model-gb", "0"], "a model has between 0.001 and 100000 GB, not 0"),
        (["join", "--json", "/"], "--json / is a folder; name a file"),
        (["join", "--json", "/no/such/x"], "cannot be written: there is no folder /no/such"),
        (["join", "--plot", "x.gif"], "plot x.gif must end with .png or .svg or .pdf"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_run(
    arguments: list[str], sentence: str
) -> None:
    result = CliRunner().invoke(command, ["run", *arguments])
    assert result.exit_code == 2
    assert sentence in result.output
    assert result.output.startswith("error: ")
    assert len(result.output.splitlines()) == 1
