"""The exchange of trainers by hivemind and by the loop of a run, on loopback.

    python -m benchmarks.averaging --by hivemind --trainers 3,4 --width 512
    python -m benchmarks.averaging --by run --trainers 1,3,4 --width 512

Prints one JSON object, and each case on standard error as it is measured. `--width 512` is a model
of 20 million parameters. `swarm backend install hivemind --home build/backends` comes first. It
runs in a network namespace of its own (`unshare`), so that the counter of its loopback holds the
bytes of this measurement alone, protocol included.

hivemind: children average updates in fp32, called at the same moment; `seconds` until the last one
has the average. run: whole peers, with one inner step of 16 tokens per round; `seconds` from the
last contribution of a round to its last merge, the outer step included. CPU seconds are those of
all processes, for each trainer and round; of `run` they hold the inner step, which the case with
one trainer shows. The first round, which opens the connections, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio

from benchmarks.common import at_least, load_average, processor_seconds, several, spread
from peers.demo.setup import Setting, free_ports, write_config
from peers.engines import loading
from peers.engines import model as policy_model
from peers.engines.demo import make_policy
from peers.outer.alone.averaging import open_backend
from peers.outer.learning.contribution import write_values
from swarm.jobs.averaging import AverageRound, AveragingService, AveragingSetup, Exchanged, Meet
from swarm.run.update import sign_manifest
from swarm.terminal.output import print_json
from swarm.wire.identity import Identity, load_or_create
from swarm.wire.manifest import Limits, Optimiser, Outer, TrustedKey
from tests.end_to_end.harness import START_SECONDS, Peer, processes_in_group, tiny_manifest

ISOLATED = "SWARM_BENCHMARK_ISOLATED"
"""Set in the process that has a network namespace of its own."""

ROUND_SECONDS = 300.0
"""Longest time for a round."""

LAYERS_WIDE = 6
"""Layers of a model that is wider than the demo's."""


def make_model(folder: Path, width: int) -> int:
    """Save the demo's model, or a wider one with its tokenizer; return its parameters."""
    model = make_policy(folder / "narrow", seed=3)
    path = folder / "narrow" / "config.json"
    wider = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": LAYERS_WIDE,
        "layer_types": ["full_attention"] * LAYERS_WIDE,
        "num_key_value_heads": 4,
    }
    if width > 96:
        path.write_text(json.dumps(json.loads(path.read_text()) | wider))
        model = loading.random(folder / "narrow", 3)
    (folder / "model").mkdir()
    policy_model.save(model, folder / "model", folder / "narrow")
    return policy_model.count_parameters(model)


def cpu_seconds(groups: list[int]) -> float:
    """Processor seconds so far of all living processes of these groups."""
    found = 0.0
    for pid in (pid for group in groups for pid in processes_in_group(group)):
        with suppress(OSError):
            found += processor_seconds(pid, children=True)
    return found


def carried_bytes() -> int:
    """Bytes that this network namespace's loopback has carried."""
    line = next(each for each in Path("/proc/net/dev").read_text().splitlines() if "lo:" in each)
    return int(line.partition(":")[2].split()[8])


class Trainer:
    """A child that averages a random update of its own."""

    def __init__(self, folder: Path, setup: AveragingSetup, number: int, home: Path) -> None:
        self._folder, self._number = folder, number
        key = folder / "averaging.key"
        self._library = open_backend("hivemind", setup, home, key, number)
        self._shapes: dict[str, tuple[int, ...]] = {"weight": (setup.state_bytes // 8,)}
        (folder / f"state-{number}").write_bytes(bytes(setup.state_bytes))
        torch.manual_seed(number)
        values = torch.randn(setup.state_bytes // 8) * 1e-3
        write_values(values, self._shapes, folder / f"update-{number}")
        self.leave = trio.Event()
        self.service: AveragingService

    async def live(
        self, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        size = (self._folder / f"state-{self._number}").stat().st_size
        async with self._library.connect(self._shapes, size) as self.service:
            task_status.started(await self.service.open())
            await self.leave.wait()
            await self.service.end()

    async def meet(self) -> None:
        await self.service.meet(Meet(round=0, **self._paths("state", "received", "average")))

    async def average(self, round_: int, answers: list[Exchanged]) -> None:
        paths = self._paths("update", "state", "average", "received")
        answers.append(await self.service.average(AverageRound(round=round_, tokens=1000, **paths)))

    def _paths(self, *names: str) -> dict[str, Any]:
        return {name: str(self._folder / f"{name}-{self._number}") for name in names}


async def by_hivemind(
    options: argparse.Namespace, count: int, folder: Path, parameters: int
) -> dict[str, Any]:
    setup = AveragingSetup(run="benchmark", state_bytes=8 * parameters, trainers=count)
    trainers: list[Trainer] = []
    taken: list[dict[str, float]] = []
    async with trio.open_nursery() as nursery:
        for number in range(1, count + 1):
            trainer = Trainer(folder, setup, number, options.home.absolute())
            reachable = await nursery.start(trainer.live)
            setup = msgspec.structs.replace(setup, join=setup.join or tuple(reachable))
            trainers.append(trainer)
        groups = children_of(os.getpid())
        async with trio.open_nursery() as meeting:
            for trainer in trainers:
                meeting.start_soon(trainer.meet)
        for round_ in range(1, options.rounds + 2):
            answers: list[Exchanged] = []
            before, cpu, carried = time.monotonic(), cpu_seconds(groups), carried_bytes()
            with trio.fail_after(ROUND_SECONDS):
                async with trio.open_nursery() as averaging:
                    for trainer in trainers:
                        averaging.start_soon(trainer.average, round_, answers)
            assert [each.trainers for each in answers] == [count] * count, answers
            taken.append(
                {
                    "seconds": time.monotonic() - before,
                    "cpu_seconds": (cpu_seconds(groups) - cpu) / count,
                    "megabytes": (carried_bytes() - carried) / count / 1e6,
                }
            )
        for trainer in trainers:
            trainer.leave.set()
    given = sum(each.bytes_sent for each in answers) / count / len(taken) / 1e6
    return figures(taken[1:]) | {"megabytes_by_its_own_count": round(given, 3)}


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children, each of which leads a group."""
    return [
        int(each)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for each in (task / "children").read_text().split()
    ]


def figures(taken: list[dict[str, float]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in taken[0]:
        told |= spread(name, [each[name] for each in taken])
    return told


def make_peers(folder: Path, rounds: int, count: int) -> list[Peer]:
    """A bootstrap peer and `count` trainers of the model in `folder`."""
    model, text, manifest_path = folder / "model", folder / "birds.txt", folder / "run.manifest"
    text.write_text("\n".join(f"the {n % 10} birds sing {n * 3 % 10} songs." for n in range(500)))
    peers: list[Peer] = []
    ports = iter(free_ports(2 * count + 2))
    for number in range(count + 1):
        home = folder / f"peer-{number}"
        home.mkdir(mode=0o700)
        role, port = "replica" if number else "bootstrap", next(ports)
        command = [sys.executable, "-m", "swarm.peer", "--role", role, "--home", str(home)]
        command += ["--listen", f"/ip4/127.0.0.1/tcp/{port}", "--bulk-port", str(next(ports))]
        command += ["--json-logs"]
        if number:
            table: dict[str, Setting] = {"model": str(model), "data": [str(text)]}
            table |= {"sequence_tokens": 17, "batch_sequences": 1}
            write_config(home / "settings.toml", role, table)
            command += ["--config", str(home / "settings.toml")]
            command += ["--bootstrap", peers[0].multiaddr]
        else:
            command += ["--manifest", str(manifest_path)]
        identity = load_or_create(home / "identity.key")
        peers.append(Peer(home.name, command, {}, role=role, identity=identity, port=port))
    trainers = [peer.identity.peer_id for peer in peers[1:]]
    manifest = msgspec.structs.replace(
        tiny_manifest(model, trainer=trainers[0], validators=trainers, steps=1, limits=Limits()),
        trainers=[TrustedKey(peer=trainer) for trainer in trainers],
        optimiser=Optimiser(learning_rate=1e-3, warmup_steps=1),
        outer=Outer(rounds=rounds + 2, inner_steps=1, grace_seconds=ROUND_SECONDS / 2),
    )
    manifest_path.write_bytes(sign_manifest(Identity(bytes([7]) * 32), manifest, time.time()).raw)
    return peers


async def by_run(
    options: argparse.Namespace, count: int, folder: Path, parameters: int
) -> dict[str, Any]:
    bootstrap, *trainers = make_peers(folder, options.rounds, count)
    async with trio.open_nursery() as nursery:
        bootstrap.start(nursery)
        await bootstrap.says("peer.listening", seconds=START_SECONDS)
        for peer in trainers:
            peer.start(nursery)

        async def merged(round_: int) -> tuple[float, float]:
            for peer in trainers:
                await peer.says("outer.merged", round=round_, seconds=2 * ROUND_SECONDS)
            groups = [group for peer in trainers for group in [peer.pid, *peer.children().values()]]
            return cpu_seconds(groups), carried_bytes()

        cpu, carried = await merged(1)
        cpu_after, carried_after = await merged(1 + options.rounds)
        nursery.cancel_scope.cancel()
    seconds = []
    for round_ in range(2, 2 + options.rounds):
        given = [e["time"] for p in trainers for e in p.heard("outer.contributed", round=round_)]
        done = [e["time"] for p in trainers for e in p.heard("outer.merged", round=round_)]
        seconds.append(max(done) - max(given))
    states = {(e["record"], e["state"]) for peer in trainers for e in peer.heard("outer.merged")}
    assert len({record for record, _ in states}) == len(states), "equal records, other states"
    parts = count * options.rounds
    return spread("seconds", seconds) | {
        "cpu_seconds": round((cpu_after - cpu) / parts, 3),
        "megabytes": round((carried_after - carried) / parts / 1e6, 3),
    }


def isolate() -> None:
    """Run this command again in a network namespace of its own."""
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up; exec "$@"']
    again = [sys.executable, "-m", "benchmarks.averaging", *sys.argv[1:]]
    os.execvpe("unshare", [*command, "sh", *again], os.environ | {ISOLATED: "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--by", choices=["hivemind", "run"], required=True)
    parser.add_argument("--trainers", type=several(at_least(1)), default=[3, 4])
    parser.add_argument("--width", type=at_least(96), default=512, help="of the model")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--home", type=Path, default=Path("build/backends"))
    options = parser.parse_args()
    if ISOLATED not in os.environ:
        isolate()
    cases = []
    measure = by_hivemind if options.by == "hivemind" else by_run
    for count in options.trainers:
        with tempfile.TemporaryDirectory() as folder:
            parameters = make_model(Path(folder), options.width)
            load = load_average()
            case = trio.run(measure, options, count, Path(folder), parameters)
        cases.append({"trainers": count, "parameters": parameters, "load_before": load} | case)
        print(json.dumps(cases[-1]), file=sys.stderr, flush=True)
    print_json({"by": options.by, "cases": cases})


if __name__ == "__main__":
    main()
