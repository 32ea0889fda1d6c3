"""Trainers that average by hivemind, as processes on loopback: `make test-hivemind`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import msgspec
import pytest
import torch
import trio

from peers.engines.demo import make_policy
from peers.engines.installed import why_unusable
from peers.outer.alone.averaging import START_SECONDS, open_backend
from peers.outer.backends.installed import RECIPES, SERVICES
from peers.outer.learning.contribution import Contribution, write_values
from swarm.jobs.averaging import AverageRound, AveragingService, AveragingSetup, Exchanged, Meet
from swarm.world import ChildDied, ChildUserError, client
from swarm.world.compute import LocalCompute

HOME = Path("build/backends").absolute()
"""Where `make test-hivemind` installs it."""

PROBLEM = why_unusable(RECIPES["hivemind"], HOME)
pytestmark = [
    pytest.mark.wall_clock,
    pytest.mark.hivemind,
    pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM)),
]

SECONDS = 240.0
"""Longest wait for the next line of a trainer, or for an average."""

SHAPES = {"weight": (1000, 1000)}
STATE_BYTES = 8 * 1_000_000
DYING = "tests.end_to_end.dying_average"

TEXT = "\n".join(f"the {n % 10} small birds sing {n * 3 % 10} songs." for n in range(200))


class Trainer:
    """A `swarm train` of its own process group."""

    def __init__(self, folder: Path, number: int, *arguments: str) -> None:
        command = [sys.executable, "-c", "from swarm.commands.main import main; main()", "train"]
        command += ["--model", str(folder / "base"), "--data", str(folder / "birds.txt")]
        command += ["--out", str(folder / f"trainer-{number}"), "--index", str(number)]
        command += ["--inner-steps", "2", "--batch", "4", "--sequence-tokens", "33", "--json"]
        command += ["--home", str(HOME), "--learning-rate", "1e-3", *arguments]
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


def test_trainers_average_die_and_join_late(tmp_path: Path) -> None:
    make_policy(tmp_path / "base", seed=3)
    (tmp_path / "birds.txt").write_text(TEXT)
    common = ["--backend", "hivemind", "--trainers", "2", "--outer-learning-rate", "0.7"]
    common += ["--key-file", str(tmp_path / "averaging.key")]
    common += ["--outer-momentum", "0.9", "--wait", "120", "--steps", "400"]
    common += ["--set", "validation_sequences=4"]
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


class Averager:
    """One trainer's child, and the files that it exchanges."""

    def __init__(self, folder: Path, setup: AveragingSetup, number: int, service: str) -> None:
        self._folder, self.number, self._service = folder, number, service
        library = open_backend("hivemind", setup, HOME, folder / "averaging.key", number)
        self.setup = msgspec.structs.replace(library.setup, shapes=SHAPES, state_bytes=STATE_BYTES)
        self._interpreter = str(library.interpreter)
        torch.manual_seed(number)
        self.update = torch.randn(1_000_000) * 1e-3
        write_values(self.update, SHAPES, folder / f"update-{number}")
        (folder / f"state-{number}").write_bytes(bytes(STATE_BYTES))
        self.leave = trio.Event()
        self.service: AveragingService

    async def live(
        self, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the child until it is to leave."""
        async with LocalCompute().child(
            self._service,
            self.setup,
            name=f"trainer-{self.number}",
            interpreter=self._interpreter,
            start_deadline_seconds=START_SECONDS,
        ) as child:
            self.service = client(AveragingService, child)
            task_status.started(await self.service.open())
            await self.leave.wait()
            with suppress(ChildDied):
                await self.service.end()

    def _paths(self, *names: str) -> dict[str, str]:
        return {name: str(self._folder / f"{name}-{self.number}") for name in names}

    async def meet(self) -> None:
        await self.service.meet(Meet(round=0, **self._paths("state", "received", "average")))

    async def average(self, round_: int, found: dict[int, Exchanged]) -> None:
        """Add what came of the round, if the child outlives it."""
        paths = self._paths("update", "state", "average", "received")
        job = AverageRound(round=round_, tokens=100 * self.number, **paths)
        try:
            found[self.number] = await self.service.average(job)
        except ChildDied:
            self.leave.set()

    def result(self) -> torch.Tensor:
        with Contribution(self._folder / f"average-{self.number}", SHAPES) as average:
            return average.values()


async def all_average(trainers: list[Averager], round_: int) -> dict[int, Exchanged]:
    found: dict[int, Exchanged] = {}
    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for trainer in trainers:
                nursery.start_soon(trainer.average, round_, found)
    return found


@pytest.mark.parametrize("moment", ["Before", "Within", "After"])
async def test_a_death_in_an_average_is_repeated_by_all(tmp_path: Path, moment: str) -> None:
    setup = AveragingSetup(run="dying", trainers=3)
    trainers: list[Averager] = []
    async with trio.open_nursery() as nursery:
        for number, service in ((1, SERVICES["hivemind"]), (2, SERVICES["hivemind"]), (3, moment)):
            named = service if ":" in service else f"{DYING}:{service}"
            trainers.append(Averager(tmp_path, setup, number, named))
            reachable = await nursery.start(trainers[-1].live)
            setup = msgspec.structs.replace(setup, join=setup.join or tuple(reachable))
        async with trio.open_nursery() as meeting:
            for trainer in trainers:
                meeting.start_soon(trainer.meet)
        found = await all_average(trainers, 1)
        assert found.keys() == {1, 2}
        check_average(found, trainers[:2])
        assert min(each.attempts for each in found.values()) > 1
        found = await all_average(trainers[:2], 2)
        check_average(found, trainers[:2])
        for trainer in trainers:
            trainer.leave.set()


def check_average(found: dict[int, Exchanged], members: list[Averager]) -> None:
    """Each member has the mean of the members' updates, weighted by their tokens."""
    tokens = sum(100 * each.number for each in members)
    mean = sum(each.update * (100 * each.number / tokens) for each in members)
    for each in members:
        told = found[each.number]
        assert (told.averaged, told.received) == (True, False)
        assert (told.trainers, told.tokens) == (len(members), tokens)
        assert told.bytes_sent > 2_000_000 < told.bytes_received
        torch.testing.assert_close(each.result(), mean, rtol=0, atol=1e-8)


async def test_who_has_another_key_gets_nothing(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    setup = AveragingSetup(run="private", trainers=2, wait_seconds=0.1)
    trainer = Averager(tmp_path, setup, 1, SERVICES["hivemind"])
    async with trio.open_nursery() as nursery:
        reachable = tuple(await nursery.start(trainer.live))
        await trainer.meet()  # from now on it offers its state

        async def asked(folder: Path, service: str) -> list[str]:
            asking = Averager(folder, setup, 2, service)
            asking.setup = msgspec.structs.replace(asking.setup, join=reachable)
            asking.leave.set()
            got: list[str] = await nursery.start(asking.live)
            return got

        with trio.fail_after(SECONDS):
            assert "DownloadData" in await asked(tmp_path, f"{DYING}:Asking")
            assert await asked(tmp_path / "other", f"{DYING}:Asking") == []
            with pytest.raises(ChildUserError, match="--name and --trainers are those of"):
                await asked(tmp_path / "other", SERVICES["hivemind"])
        trainer.leave.set()
