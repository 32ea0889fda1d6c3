"""Processes of the demo: real, tiny ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from peers.demo.processes import (
    DEATHS_IN_A_ROW_MAX,
    PRELOAD_PEERS,
    Process,
    ProcessFailed,
    end,
    keep_alive,
    reach,
    start_fork_server,
)
from swarm.world.child import CHILD_ENVIRONMENT

DEADLINE_SECONDS = 30.0


class Recorder:
    """A watcher that writes down what it is told and wakes whoever waits for a count."""

    def __init__(self, wanted: Callable[[], bool] = lambda: True) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.deaths: list[tuple[str, int]] = []
        self.ended: list[str] = []
        self.heard = trio.Event()
        self._wanted = wanted

    def said(self, name: str, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        self.heard.set()
        self.heard = trio.Event()

    def died(self, name: str, status: int) -> None:
        self.deaths.append((name, status))

    def finished(self, name: str) -> None:
        self.ended.append(name)

    def restart_wanted(self, name: str) -> bool:
        return self._wanted()

    async def wait_events(self, count: int) -> None:
        while len(self.events) < count:
            await self.heard.wait()


def python(code: str, **more: Any) -> Process:
    return Process("worker", lambda restart: [sys.executable, "-c", code, str(restart)], **more)


def in_time(main: Callable[[], Any]) -> None:
    async def with_deadline() -> None:
        with trio.fail_after(DEADLINE_SECONDS):
            await main()

    trio.run(with_deadline)


RUNNER = in_time


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie whose parent is gone waits for init to reap it: it runs no more.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_process_that_ends_well_is_not_restarted(tmp_path: Path) -> None:
    log, recorder = tmp_path / "log", Recorder()
    code = "import sys; print('{\"event\": \"one\"}'); print('plain'); print('no', file=sys.stderr)"
    process = python(code, log=log)
    await keep_alive(process, recorder)
    assert sorted(process.last_lines) == ["no", "plain"]
    assert process.pid is None
    assert recorder.events == [{"event": "one"}]
    assert recorder.deaths == [] and recorder.ended == ["worker"]
    assert sorted(log.read_text().splitlines()) == ["no", "plain", '{"event": "one"}']


async def test_a_killed_process_is_restarted_and_told_so() -> None:
    recorder = Recorder()
    code = (
        "import json, os, sys\n"
        "print(json.dumps({'restart': sys.argv[1], 'pid': os.getpid()}), flush=True)\n"
        "import time; time.sleep(0 if sys.argv[1] == 'True' else 600)"
    )
    process = python(code)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_alive, process, recorder)
        await recorder.wait_events(1)
        assert process.pid == recorder.events[0]["pid"]
        os.kill(recorder.events[0]["pid"], signal.SIGKILL)
    assert [event["restart"] for event in recorder.events] == ["False", "True"]
    assert recorder.deaths == [("worker", -signal.SIGKILL)]
    assert recorder.ended == ["worker"]


async def test_a_process_that_dies_again_and_again_ends_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("peers.demo.processes.BACKOFF_SECONDS", 0.0)

    recorder = Recorder()
    with pytest.raises(ProcessFailed, match=r"worker died 5 times.*status 3(.|\n)*out of luck"):
        await keep_alive(python("print('out of luck'); raise SystemExit(3)"), recorder)
    assert recorder.deaths == [("worker", 3)] * (DEATHS_IN_A_ROW_MAX - 1)


@pytest.mark.parametrize("stubborn", [False, True])
async def test_cancelling_leaves_no_process_behind(
    stubborn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the process nor one that it started, even if they ignore SIGTERM."""
    monkeypatch.setattr("peers.demo.processes.TERMINATE_SECONDS", 0.2)

    recorder = Recorder()
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if stubborn else ""
    code = (
        f"import json, os, signal, subprocess, sys, time; {ignore}"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(json.dumps({'pids': [os.getpid(), inner.pid]}), flush=True); time.sleep(600)"
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_alive, python(code), recorder)
        await recorder.wait_events(1)
        pids = recorder.events[0]["pids"]
        assert all(alive(pid) for pid in pids)
        nursery.cancel_scope.cancel()
    for pid in pids:
        while alive(pid):  # killed; the kernel is about to take it away
            await trio.lowlevel.checkpoint()


async def test_long_and_broken_lines_are_bounded() -> None:
    recorder = Recorder()
    process = python("print('x' * 1_000_000); print('{broken'); print('[1]')")
    await keep_alive(process, recorder)
    assert recorder.events == []
    assert [len(line) for line in process.last_lines] == [400, 7, 3]


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "fork.sock"
    command = [sys.executable, "-m", "swarm.world.fork_server", "--socket", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:  # it is not awaited
        yield path
        server.kill()


def forked(code: str, folder: Path, fork_server: Path) -> Process:
    (folder / "a_program.py").write_text(code)

    def command(restart: bool) -> list[str]:
        return [sys.executable, "-m", "a_program", str(restart)]

    return Process("worker", command, fork_server=fork_server, environment={"A_NAME": "a value"})


async def test_a_forked_program_runs_as_a_command_does(
    tmp_path: Path, fork_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its arguments, environment, outputs and signals; and it is restarted after a death."""
    monkeypatch.chdir(tmp_path)

    recorder = Recorder()
    code = (
        "import json, os, signal, sys\n"
        "assert __name__ == '__main__'\n"
        "interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "leads = os.getsid(0) == os.getpid()\n"
        "print(json.dumps({'restart': sys.argv[1:], 'variable': os.environ['A_NAME'],\n"
        "    'folder': os.getcwd(), 'interrupts': interrupts, 'leads': leads}))\n"
        "if sys.argv[1] == 'False': sys.exit('out of luck')\n"
    )
    process = forked(code, tmp_path, fork_server)
    await keep_alive(process, recorder)
    alike = {"variable": "a value", "folder": str(tmp_path), "interrupts": True, "leads": True}
    assert recorder.events == [{"restart": [each], **alike} for each in ("False", "True")]
    assert recorder.deaths == [("worker", 1)] and recorder.ended == ["worker"]
    assert "out of luck" in process.last_lines


async def test_a_missing_fork_server_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.demo.processes.FORK_SERVER_SECONDS_MAX", 0.05)

    process = forked("", tmp_path, tmp_path / "none")
    with pytest.raises(ProcessFailed, match=r"worker cannot be started .*none"):
        await keep_alive(process, Recorder())


async def test_a_fork_server_that_was_started_early_is_kept_alive_or_ended(tmp_path: Path) -> None:
    recorder = Recorder()
    process = start_fork_server("early", tmp_path, ["json"])
    assert process.started is not None
    pid = process.started[0].pid()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_alive, process, recorder)
        (await reach(tmp_path / "early")).close()
        assert process.pid == pid and process.started is None
        nursery.cancel_scope.cancel()
    assert not alive(pid)
    unused = start_fork_server("unused", tmp_path, [])
    assert unused.started is not None
    pid = unused.started[0].pid()
    end(unused)
    end(unused)
    assert not alive(pid) and unused.started is None


@pytest.mark.slow
def test_the_peers_fork_server_imports_no_torch_and_starts_no_thread() -> None:
    code = (
        "import importlib, os, sys\n"
        f"for name in {PRELOAD_PEERS!r}: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules\n"
        "assert len(os.listdir('/proc/self/task')) == 1\n"
    )
    environment = {**os.environ, **CHILD_ENVIRONMENT}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
