"""Trainers that average by hivemind, as processes on loopback: `make test-hivemind`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from peers.engines.demo import make_policy

HOME = Path("build/backends").absolute()
"""Where `make test-hivemind` installs it."""

SECONDS = 240.0
"""Longest wait for the next line of a trainer."""

TEXT = "\n".join(f"the {n % 10} small birds sing {n * 3 % 10} songs." for n in range(200))


class Trainer:
    """A `swarm train` of its own process group."""

    def __init__(self, folder: Path, number: int, *arguments: str) -> None:
        command = [sys.executable, "-c", "from swarm.commands.main import main; main()", "train"]
        command += ["--model", str(folder / "base"), "--data", str(folder / "birds.txt")]
        command += ["--out", str(folder / f"trainer-{number}"), "--trainer", str(number)]
        command += ["--inner-steps", "2", "--batch", "4", "--sequence-tokens", "33", "--json"]
        command += ["--backends", str(HOME), "--learning-rate", "1e-3", *arguments]
        self.events: list[dict[str, Any]] = []
        self._lines: Queue[str] = Queue()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def until(self, name: str, **fields: Any) -> dict[str, Any]:
        """The next event of a name and with these fields."""
        while True:
            try:
                line = self._lines.get(timeout=SECONDS)
            except Empty:
                raise AssertionError(f"no {name} within {SECONDS:g} s: {self.events}") from None
            assert line, f"the trainer ended before {name}: {self.events}"
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == name and fields.items() <= self.events[-1].items():
                return self.events[-1]

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)
        self._reader.join(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.hivemind
def test_trainers_average_die_and_join_late(tmp_path: Path) -> None:
    make_policy(tmp_path / "base", seed=3)
    (tmp_path / "birds.txt").write_text(TEXT)
    common = ["--backend", "hivemind", "--trainers", "2", "--outer-learning-rate", "0.7"]
    common += ["--outer-momentum", "0.9", "--wait", "120", "--steps", "400", "--validation", "4"]
    with ExitStack() as stack:
        join: list[str] = []

        def start(number: int, *arguments: str) -> Trainer:
            trainer = Trainer(tmp_path, number, *common, *join, *arguments)
            stack.callback(trainer.kill)
            return trainer

        first = start(1)
        join += ["--join", first.until("reachable")["at"]]
        second = start(2)
        first.until("trained", trainers=2)
        second.until("trained", trainers=2)
        second.kill()
        alone = first.until("trained", trainers=1)
        third = start(2, "--resume")  # in the place of the one that died, from its last round
        joined = third.until("joined", received=True)
        assert joined["step"] >= alone["step"]
        first.until("trained", trainers=2)
        after = third.until("trained", trainers=2)
        first.until("validated", step=after["step"])
        third.until("validated", step=after["step"])
        first.kill()
        third.kill()
    losses = [
        {each["step"]: each["loss"] for each in trainer.events if each["event"] == "validated"}
        for trainer in (first, third)
    ]
    common_steps = [step for step in losses[0] if step in losses[1] and step > joined["step"]]
    assert common_steps
    for step in common_steps:  # of outer states, so equal unless the replicas differ
        assert losses[0][step] == pytest.approx(losses[1][step], abs=1e-5)
