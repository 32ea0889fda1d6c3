"""Verdicts of a real swarm beside new identities that hand in programs that sleep.

    python -m benchmarks.sleepers
    python -m benchmarks.sleepers --rounds 3 --seconds 40 --json sleepers.json

Prints one JSON object. The demo's processes train on programs of one line (`swarm demo
--environment code`). In every second period four identities without a record join, who load the
policy, never use it, and hand in files of programs that sleep, with proofs of zeros. `pace_kept` is
the share of the honest workers' verdicts per second that is left; `cheats` has the seconds from
each one's first file to its first refusal and to its eviction (null: not within the period).
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import trio
import typer

from benchmarks.common import at_least
from peers.engines.service import EngineService
from peers.environments import Renderer
from peers.environments.prompt_room import ModelFacts, PromptRoom
from peers.inference.role import InferenceRole
from peers.proofs.format import TOP_VALUES, chunk_count
from swarm.commands.peer import peer
from swarm.jobs.inference import Generate, Generated
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.rollouts.rollouts import Rollouts, Row
from swarm.rollouts.submission_file import write
from swarm.terminal.output import print_json, write_json
from swarm.wire.identity import load_or_create

SLEEPERS = 4
START_SECONDS = 300.0
"""Time limit for the first steps, and for the cheats' first files."""
PROGRAM = "import time;time.sleep(99);solve=sum"
NOTHING = struct.pack(f">{1 + TOP_VALUES}H", TOP_VALUES, *[0] * TOP_VALUES)
"""A proof of the right form, of nothing but zeros."""


class SleepingService(EngineService):
    """The engine's child of a cheat."""

    async def generate(self, job: Generate) -> Generated:
        """Write a file without generating anything."""
        return await trio.to_thread.run_sync(partial(self._fabricate, job))

    def _fabricate(self, job: Generate) -> Generated:
        order, path, policy = job.order, Path(job.path), self._policy
        assert policy is not None
        renderer, sampling = Renderer(self._folder), order.sampling
        positions = ModelFacts.read(self._folder).max_position_embeddings
        room = PromptRoom.of_policy(renderer, positions, sampling.max_new_tokens)
        said = [*renderer.encode_prompt(PROGRAM), sampling.stop_ids[0]]
        said = said[-(len(PROGRAM) + 1) :]  # without a token for the beginning
        spans = (Span(order.policy.step, len(said)),)
        answer = Segment("model", said, "stop", [-1.0] * len(said), spans)
        rows = [
            Row(
                group=group,
                sample=sample,
                environment=0,
                rollout=Rollout([Segment("prompt", task.tokens), answer]),
                proof=NOTHING * chunk_count(len(said)),
            )
            for group, task in enumerate(self._environments.tasks(order, room))
            if task is not None
            for sample in range(sampling.group_size)
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        digest, size_bytes = write(path, Rollouts.from_rows(rows), self._header(order), None)
        return Generated(
            digest=digest,
            size_bytes=size_bytes,
            tokens=len(rows) * len(said),
            groups=order.groups,
            seconds_generate=0.0,
            seconds_proofs=0.0,
            policy=policy,
        )


def events(log: Path, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """The events of a name, and with these fields, that a peer has written so far."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if f'"event": "{name}"' in line:
            found = json.loads(line)
            if fields.items() <= found.items():
                yield found


def wait_for(log: Path, name: str, **fields: Any) -> dict[str, Any]:
    """The first such event; ends the benchmark with a sentence if it does not come in time."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if log.exists() and (found := next(events(log, name, **fields), None)):
            return found
        time.sleep(0.2)
    sys.exit(f"{log.name} has no {name} after {START_SECONDS:g} s")


def pace(log: Path, cheats: set[str], seconds: float) -> float:
    """Verdicts a second on the work of others than the cheats, from now on."""
    since = time.time()
    time.sleep(seconds)
    judged = [e for e in events(log, "validator.verdict") if e["worker"] not in cheats]
    return len([e for e in judged if since <= e["time"] < since + seconds]) / seconds


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Run the demo in `folder`, and periods without and with the cheats."""
    swarm = [sys.executable, "-m", "swarm.commands.main", "demo", "--environment", "code"]
    quiet: list[float] = []
    beside: list[float] = []
    told: list[dict[str, float | None]] = []
    with ExitStack() as stack:
        command = [*swarm, "--steps", "10000", "--keep", str(folder / "demo")]
        demo = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(demo.send_signal, signal.SIGINT)
        logs = folder / "demo" / "logs"
        wait_for(logs / "trainer.jsonl", "trainer.checkpoint_published", step=3)
        validator = logs / "validator.jsonl"
        address = (folder / "demo/peers/inference-1/last-bootstrap").read_text().split()[0]
        for number in range(rounds):
            quiet.append(pace(validator, set(), seconds))
            homes = [folder / f"cheat-{number}-{each}" for each in range(SLEEPERS)]
            ids = [load_or_create(home / "identity.key").peer_id for home in homes]
            with ExitStack() as cheats:
                for home in homes:
                    log = cheats.enter_context((home / "log").open("w"))
                    flags = ["--role", "inference", "--bootstrap", address, "--home", str(home)]
                    run = [sys.executable, "-m", __spec__.name, "worker", *flags, "--json-logs"]
                    cheat = subprocess.Popen(run, stdout=log, stderr=log)
                    cheats.enter_context(cheat)
                    cheats.callback(cheat.kill)
                made = [wait_for(h / "log", "inference.submission_made")["time"] for h in homes[:1]]
                beside.append(pace(validator, set(ids), seconds))
            for home, peer_id in zip(homes, ids, strict=True):
                made = [each["time"] for each in events(home / "log", "inference.submission_made")]
                refused = events(validator, "validator.verdict", worker=peer_id, outcome="refused")
                evicted = events(validator, "membership.peer_evicted", remote=peer_id)
                told.append(
                    {
                        f"{name}_seconds": round(found["time"] - made[0], 1) if found else None
                        for name, found in (
                            ("refused", next(refused, None) if made else None),
                            ("evicted", next(evicted, None) if made else None),
                        )
                    }
                )
            print(f"round {number + 1}: {quiet[-1]:.3f} without, {beside[-1]:.3f} with",
                  file=sys.stderr)  # fmt: skip
    kept = statistics.median(beside) / max(statistics.median(quiet), 1e-9)
    return {
        "seconds": seconds,
        "without": quiet,
        "with": beside,
        "cheats": told,
        "pace_kept": round(kept, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--seconds", type=at_least(5), default=40, help="of each period")
    parser.add_argument("--json", type=Path, help="file to write the report to as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarm-sleepers-") as folder:
        report = measure(Path(folder), given.rounds, given.seconds)
    print_json(report)
    if given.json is not None:
        write_json("--json", report, given.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        InferenceRole.service = "benchmarks.sleepers:SleepingService"
        del sys.argv[1]
        typer.run(peer)
    else:
        main()
