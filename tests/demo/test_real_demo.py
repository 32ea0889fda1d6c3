"""The demo itself, with real processes: they are killed, or the whole of it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from peers.demo.warmup import prepare_base
from peers.engines.adapter_config import is_adapter
from swarm.ledger.entries import Consumed, Judged, decode
from swarm.ledger.log import Log
from swarm.wire.identity import load_or_create
from swarm.world.disk import LocalDisk
from swarm.world.home import LOCK
from tests.demo.chat_model import TEMPLATE

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 400.0


@contextmanager
def a_demo(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A running demo; it is stopped if it still runs at the end."""
    with subprocess.Popen(
        [
            *(sys.executable, "-c", "from swarm.commands.main import main; main()"),
            *("demo", "--plain", "--out", str(folder), *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        try:
            yield demo
        finally:
            demo.terminate()


def lines_of(demo: subprocess.Popen[str]) -> Iterator[str]:
    """What a demo prints; one that takes far too long is stopped."""
    assert demo.stdout is not None
    overdue = threading.Timer(DEADLINE_SECONDS, demo.terminate)
    overdue.start()
    try:
        for line in demo.stdout:  # noqa: UP028 (`yield from` would close it with the generator)
            yield line
    finally:
        overdue.cancel()


def processes_of(folder: Path) -> dict[int, set[str]]:
    """The files of peers in `folder` that live processes have open, by process id.

    A forked peer has the command line of its fork server.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            files = set()
            with suppress(OSError):  # it has ended, or closed a file
                for descriptor in (entry / "fd").iterdir():
                    files.add(str(descriptor.readlink()))
            inside = {file for file in files if file.startswith(f"{folder / 'peers'}/")}
            if inside:
                found[int(entry.name)] = inside
    return found


def kill(folder: Path, name: str) -> None:
    lock = str(folder / "peers" / name / LOCK)
    (pid,) = (pid for pid, files in processes_of(folder).items() if lock in files)
    os.kill(pid, signal.SIGKILL)


def entries_of(home: Path) -> list[object]:
    """Everything a trusted peer logged."""
    database = LocalDisk(home).database("ledger.sqlite")
    try:
        log = Log(database, load_or_create(home / "identity.key").peer_id)
        entries: list[object] = []
        while len(entries) < log.size():
            entries += [decode(raw) for raw in log.entries(len(entries), 256)]
        return entries
    finally:
        database.close()


def test_any_single_process_may_be_killed(tmp_path: Path) -> None:
    """The run goes on to its end, trains on accepted submissions only, and on none twice."""
    victims = {5: "relay-1", 10: "inference-2", 15: "validator", 22: "trainer"}
    printed = []
    with a_demo(tmp_path / "demo", "--steps", "40") as demo:
        for line in lines_of(demo):
            printed.append(line)
            if line.startswith("step "):
                victim = victims.pop(int(line.split()[1].partition("/")[0]), None)
                if victim is not None:
                    kill(tmp_path / "demo", victim)
        assert demo.wait(timeout=10) == 0, "".join(printed)
    assert victims == {}
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["steps"] == 40
    assert set(summary["restarts"]) >= {"relay-1", "inference-2", "validator", "trainer"}
    assert summary["evicted"] == {}
    assert processes_of(tmp_path / "demo") == {}

    peers = tmp_path / "demo" / "peers"
    accepted = Counter(
        entry.submission
        for entry in entries_of(peers / "validator")
        if isinstance(entry, Judged) and entry.outcome == "accepted"
    )
    trained = [
        (entry.step, entry.submission)
        for entry in entries_of(peers / "trainer")
        if isinstance(entry, Consumed) and not {"stale", "carried"} & set(entry.outcomes)
    ]
    assert {step for step, _ in trained} == set(range(40))
    assert {submission for _, submission in trained} <= set(accepted)
    steps_of: dict[bytes, set[int]] = {}
    for step, submission in trained:
        steps_of.setdefault(submission, set()).add(step)
    assert all(len(steps) == 1 for steps in steps_of.values())


@pytest.mark.parametrize("moment", ["at once", "while it trains"])
def test_ctrl_c_leaves_nothing_behind_within_5_seconds(tmp_path: Path, moment: str) -> None:
    sign = "to join" if moment == "at once" else "step 3/"
    with a_demo(tmp_path / "demo", "--steps", "200") as demo:
        for line in lines_of(demo):
            if line.startswith(sign):
                break
        assert processes_of(tmp_path / "demo")
        began = time.monotonic()
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=20)
        seconds = time.monotonic() - began
    assert demo.returncode == 130, output
    assert seconds <= 5.0
    assert output.rstrip().endswith("stopped")
    assert "Traceback" not in output
    assert processes_of(tmp_path / "demo") == {}


def test_a_model_that_is_given_learns_in_a_chat_and_int8_is_caught(tmp_path: Path) -> None:
    """Nobody honest is refused; the policy is a whole model; answers are shown throughout."""
    model = tmp_path / "model"
    prepare_base(model, 0)  # it is right in a fifth of the tasks, and so needs no warm-up
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    flags = ("--model", str(model), "--peers", "2", "--steps", "6", "--cheat", "int8")
    with a_demo(tmp_path / "demo", *flags) as demo:
        printed = list(lines_of(demo))
        assert demo.wait(timeout=10) == 0, "".join(printed)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["steps"] == 6
    assert set(summary["evicted"]) == {"inference-2"}, "".join(printed)
    assert not any(line.startswith("inference-1 step") for line in printed), "".join(printed)
    assert {len(summary["answers"][moment]) for moment in ("before", "after")} == {4}
    policy = tmp_path / "demo" / "policy"
    assert (policy / "model.safetensors").exists() and not is_adapter(policy)
    assert any(line.startswith("before: ") for line in printed)
    assert any(line.startswith("after: ") for line in printed)
