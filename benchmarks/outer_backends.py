"""The three backends of the outer loop, compared on loopback.

    python -m benchmarks.outer_backends --backend hivemind --trainers 2,4 --elements 228192
    python -m benchmarks.outer_backends --backend shardcast --trainers 2,4 --hidden 96

Prints one JSON object. `swarm backend install NAME --home build/backends` comes first. It runs in a
network namespace of its own (`unshare`), so that the counter of its loopback holds the bytes of
this measurement alone, protocol included.

hivemind and torchft: their children average random updates, called at the same moment; `seconds`
is the time until the last one has the average. Then one is killed just before a round, another in
the middle of one, and a new one joins. shardcast: whole peers of a run, in int8, one inner step per
round; `seconds` is the time from the last contribution to the last merge, the outer step included.
Then one is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import trio
import trio.lowlevel

from benchmarks.arguments import at_least, several
from benchmarks.outer_shardcast import measure_shardcast
from peers.demo.local_peers import free_ports
from peers.outer.backends.installed import SERVICES, interpreter_for, recipe_of
from swarm.events import Event, Events
from swarm.jobs.averaging import (
    AverageRound,
    AveragingService,
    AveragingSetup,
    EndAveraging,
    Exchanged,
    Meet,
    OpenAveraging,
)
from swarm.terminal.output import print_json
from swarm.world import ChildDied, client
from swarm.world.compute import LocalCompute
from swarm.world.machine import Machine

ISOLATED = "SWARM_BENCHMARK_ISOLATED"
"""Set in the process that has a network namespace of its own."""

ROUND_SECONDS = 300.0
"""Longest time for a round."""


class Trainer:
    """One child, and the files that it exchanges."""

    def __init__(self, backend: str, folder: Path, number: int, setup: AveragingSetup) -> None:
        self._backend, self._setup, self._folder = backend, setup, folder
        self._number = number
        self._events = Events(Machine(), str(number))
        self._events.add_sink(self._hear)
        self._pid = 0
        self._leave = trio.Event()
        self.service: AveragingService
        (folder / f"state-{number}").write_bytes(bytes(setup.state_bytes))
        generator = np.random.default_rng(number)
        values = generator.standard_normal(setup.elements, "f4") * np.float32(1e-3)
        values.astype("<f4").tofile(folder / f"update-{number}")

    def _hear(self, event: Event) -> None:
        if event.name == "compute.child_started":
            self._pid = event.fields["pid"]

    def path(self, name: str) -> str:
        return str(self._folder / f"{name}-{self._number}")

    async def live(
        self, home: Path, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the child until it is told to leave, or dies."""
        try:
            async with LocalCompute(events=self._events).child(
                SERVICES[self._backend],
                self._setup,
                name=f"trainer-{self._number}",
                interpreter=str(interpreter_for(self._backend, home)),
                start_deadline_seconds=ROUND_SECONDS,
            ) as child:
                self.service = client(AveragingService, child)
                task_status.started((await self.service.open(OpenAveraging())).addresses)
                await self._leave.wait()
                await self.service.end(EndAveraging())
        except ChildDied:
            pass

    def leave(self) -> None:
        self._leave.set()

    def kill(self) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        self._leave.set()

    async def meet(self, round_: int) -> Exchanged:
        return await self.service.meet(
            Meet(
                round=round_,
                state=self.path("state"),
                received=self.path("received"),
                average=self.path("average"),
            )
        )

    async def average(self, round_: int) -> Exchanged | None:
        """None if the child was killed meanwhile."""
        try:
            return await self.service.average(
                AverageRound(
                    round=round_,
                    tokens=1000 * self._number,
                    update=self.path("update"),
                    state=self.path("state"),
                    average=self.path("average"),
                    received=self.path("received"),
                )
            )
        except ChildDied:
            return None

    def result(self) -> Any:
        return np.fromfile(self.path("average"), "<f4")


class Network:
    """Trainers of one backend, and the rounds that they take."""

    def __init__(self, backend: str, folder: Path, home: Path, nursery: trio.Nursery) -> None:
        self._backend, self._folder, self._home, self._nursery = backend, folder, home, nursery
        self._join: tuple[str, ...] = ()
        self.round = 0
        self.trainers: list[Trainer] = []

    async def start_lighthouse(self) -> None:
        (port,) = free_ports(1)
        program = recipe_of(self._backend).folder(self._home) / "bin" / "torchft_lighthouse"
        command = [str(program), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1"]
        quiet = subprocess.DEVNULL
        run = partial(trio.run_process, command, stdout=quiet, stderr=quiet)
        await self._nursery.start(run)
        self._join = (f"http://127.0.0.1:{port}",)

    async def add(self, number: int, elements: int, trainers: int) -> Trainer:
        setup = AveragingSetup(
            run="benchmark",
            elements=elements,
            state_bytes=8 * elements,
            join=self._join,
            trainers=trainers,
            wait_seconds=60.0,
        )
        trainer = Trainer(self._backend, self._folder, number, setup)
        addresses = await self._nursery.start(trainer.live, self._home)
        self._join = self._join or tuple(addresses)
        self.trainers.append(trainer)
        return trainer

    async def take_round(self, aside: Callable[[], Any] | None = None) -> dict[str, Any]:
        """Let all trainers average; `aside` is awaited beside them."""
        self.round += 1
        answers: list[Exchanged | None] = []
        results: list[Any] = []
        begun = trio.current_time()

        async def one(trainer: Trainer) -> None:
            answer = await trainer.average(self.round)
            answers.append(answer)
            if answer is not None:
                results.append(trainer.result())

        with trio.fail_after(ROUND_SECONDS):
            async with trio.open_nursery() as nursery:
                for trainer in self.trainers:
                    nursery.start_soon(one, trainer)
                if aside is not None:
                    nursery.start_soon(aside)
        whole = [each for each in answers if each is not None]
        differs = [np.abs(each - results[0]) for each in results]
        return {
            "seconds": trio.current_time() - begun,
            "trainers": [each.trainers for each in whole],
            "attempts": max(each.attempts for each in whole),
            "largest_difference": max(float(each.max()) for each in differs),
            "differing_share": max(float((each > 1e-6).mean()) for each in differs),
        }


async def measure_library(options: argparse.Namespace, count: int, folder: Path) -> dict[str, Any]:
    """Figures of hivemind or torchft with `count` trainers."""
    found: dict[str, Any] = {"trainers": count, "elements": options.elements}
    async with trio.open_nursery() as nursery:
        network = Network(options.backend, folder, options.home.absolute(), nursery)
        if options.backend == "torchft":
            await network.start_lighthouse()
        for number in range(1, count + 1):
            await network.add(number, options.elements, count)
        async with trio.open_nursery() as meeting:
            for trainer in network.trainers:
                meeting.start_soon(trainer.meet, 0)
        before = sent_bytes()
        rounds = [await network.take_round() for _ in range(options.rounds)]
        spread = sorted(each["seconds"] for each in rounds)
        found |= {
            "seconds": median(spread),
            "seconds_least": spread[0],
            "seconds_most": spread[-1],
            "bytes_per_trainer_and_round": (sent_bytes() - before) / count / options.rounds,
            "largest_difference": max(each["largest_difference"] for each in rounds),
        }
        if options.kill and count > 2:
            network.trainers.pop().kill()
            found["killed_before_a_round"] = await network.take_round()
            victim = network.trainers[-1]

            async def kill_in_the_middle() -> None:
                await trio.sleep(found["seconds"] / 2)
                victim.kill()

            found["killed_in_a_round"] = await network.take_round(kill_in_the_middle)
            network.trainers.pop()
            found["after_it"] = await network.take_round()
            begun = trio.current_time()
            late = await network.add(count + 1, options.elements, count)
            started = trio.current_time()
            network.trainers.remove(late)
            async with trio.open_nursery() as joining:
                met = trio.Event()
                joining.start_soon(_meet, late, met)
                while options.backend == "torchft" and not met.is_set():
                    await network.take_round()  # it gets the state when the others average
            network.trainers.append(late)
            found["join"] = {
                "start_seconds": started - begun,
                "state_seconds": trio.current_time() - started,
            }
            found["after_joining"] = await network.take_round()
        for trainer in network.trainers:
            trainer.leave()
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.deadline = trio.current_time() + 20
        if options.backend == "torchft":
            nursery.cancel_scope.cancel()
    return found


async def _meet(trainer: Trainer, met: trio.Event) -> None:
    await trainer.meet(0)
    met.set()


def sent_bytes() -> int:
    """Bytes that this network namespace's loopback has sent."""
    line = next(each for each in Path("/proc/net/dev").read_text().splitlines() if "lo:" in each)
    return int(line.partition(":")[2].split()[8])


def isolate() -> None:
    """Run this command again in a network namespace of its own."""
    environment = os.environ | {ISOLATED: "1"}
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up; exec "$@"']
    again = [sys.executable, "-m", "benchmarks.outer_backends", *sys.argv[1:]]
    os.execvpe("unshare", [*command, "sh", *again], environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=["shardcast", *SERVICES], required=True)
    parser.add_argument("--trainers", type=several(at_least(2)), default=[2, 4])
    parser.add_argument("--elements", type=at_least(1), default=228_192)
    parser.add_argument("--hidden", type=at_least(96), default=96, help="shardcast: model's width")
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--kill", action="store_true", help="kill trainers, if there are over two")
    parser.add_argument("--home", type=Path, default=Path("build/backends"))
    options = parser.parse_args()
    if ISOLATED not in os.environ:
        isolate()
    cases = []
    for count in options.trainers:
        with tempfile.TemporaryDirectory() as folder:
            if options.backend == "shardcast":
                case = trio.run(measure_shardcast, options, count, Path(folder), sent_bytes)
            else:
                case = trio.run(measure_library, options, count, Path(folder))
        print(json.dumps(case), file=sys.stderr, flush=True)
        cases.append(case)
    print_json({"backend": options.backend, "cases": cases})


if __name__ == "__main__":
    main()
