"""An old and large run: what its trainer and validator hold, and how fast they resume.

    python -m benchmarks.old_run --submissions 100000
    python -m benchmarks.old_run --submissions 1000000 --samples 20

A simulated trainer and validator take steps with two workers. Beside each step the validator's log
gets the verdicts on so many submissions of former workers, and the trainer's their outcomes,
through the same calls as real ones: each verdict is signed, logged, mirrored, used, sealed and
pruned by production code. Nothing is generated, sent, graded or recomputed for them: that would
take a third of a second of the processor each, and leaves nothing behind but these entries.

Prints one JSON object. A sample has the rows and bytes of both peers' databases and files, the
entries of their collections (a resumed peer's caches begin empty), and the memory of the process,
in which all databases are. `resume`: CPU seconds from the start of a killed peer until the trainer
has opened its step again, or the validator waits for submissions; all other peers' work in this
time included, the disk's not. `status`: CPU seconds to make the answer to `swarm status`, and to
read and format it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import trio
from blake3 import blake3

from benchmarks.common import at_least, load_average, memory_of
from benchmarks.month import SEED, WORKLOAD, collections, stored
from simnet.clock import run_virtual
from simnet.compute.setting import Hardware
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.simulation import Peer, Plan, Simulation
from swarm.commands.status import status_lines
from swarm.events import Event
from swarm.ledger import wire
from swarm.ledger.entries import Consumed, Entry
from swarm.ledger.serving import report
from swarm.look.onlooker import RunStatus
from swarm.node.trusted import TrustedPart
from swarm.run.run import Run
from swarm.terminal.output import print_json
from swarm.wire.envelope import ENVELOPES_REMEMBERED, remembering_envelopes
from swarm.wire.manifest import Limits, Thresholds
from swarm.wire.messages import Evidence, Verdict

MACHINE = Hardware(tokens_per_second=4000.0, step_seconds=8.0)
RESUMED_SECONDS = 1200.0
READY = "ready to judge"
"""What a resumed validator says that it does."""
GROUPS = 4
"""Of one submission, of eight completions each."""
RECOMPUTED_EVERY, REFUSED_EVERY = 6, 200
"""One submission in so many is recomputed (the default share), or recomputed and refused."""
BETS = 32


@dataclass(frozen=True)
class Size:
    """How old and how large the run is; the defaults are the manifest's own, where it has some."""

    submissions: int = 100_000
    per_step: int = 128
    """Submissions of a step: 4,096 completions, as many as INTELLECT-2 trained on."""
    workers: int = 100
    stake_steps: int = 100
    epoch_entries: int = 20_000
    samples: int = 10


class Sample(msgspec.Struct, frozen=True):
    """What the two peers hold after so many submissions."""

    submissions: int
    epochs: int
    rows: dict[str, float]
    disk_bytes: dict[str, float]
    entries_in_memory: dict[str, float]
    resident_mib: float
    cpu_seconds: float
    """Of the whole simulation, so far."""


class OldRun(msgspec.Struct, frozen=True):
    submissions: int
    steps: int
    samples: list[Sample]
    resume: dict[str, list[float]]
    """CPU seconds by role: after the first sample, and at the end."""
    status: dict[str, float]


Said = Callable[[Sample], None]


def measure(size: Size, say: Said | None = None) -> OldRun:
    """Let a run grow old; `say` gets each sample as it is taken."""
    simulation = Simulation(SEED, workload=WORKLOAD)
    past = Past(simulation, size, say or (lambda sample: None))

    async def main() -> None:
        async with simulation.running():
            await past.begin()
            await past.grow_old()

    run_virtual(main, seed=SEED)
    if simulation.violations:
        raise RuntimeError("; ".join(simulation.violations))
    return OldRun(past.made, past.steps, past.samples, past.resume, past.status)


class Past:
    """Adds the submissions of former workers to a simulated run, step by step."""

    def __init__(self, simulation: Simulation, size: Size, say: Said) -> None:
        self.simulation, self.size, self.say = simulation, size, say
        self.made = self.steps = self.epochs = 0
        self.samples: list[Sample] = []
        self.resume: dict[str, list[float]] = {"trainer": [], "validator": []}
        self.status: dict[str, float] = {}
        self._trained, self._steps = trio.open_memory_channel[int](1 << 16)
        self._workers = [simulation.identity(f"former {n}").peer_id for n in range(size.workers)]
        self._began = time.process_time()
        simulation.listeners.append(self._hear)

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        if event.name == "trainer.checkpoint_published":
            self._trained.send_nowait(event.fields["step"])
        elif event.name == "ledger.sealed" and peer.name == "trainer":
            self.epochs += 1

    async def begin(self) -> None:
        """Start the peers."""
        simulation, size = self.simulation, self.size
        await start_bootstrap(
            simulation, trainers=["trainer"], validators=["validator"], steps=1_000_000,
            groups_per_step=8, max_new_tokens=128,
            limits=Limits(epoch_entries=size.epoch_entries),
            thresholds=Thresholds(stake_steps=size.stake_steps, measured_tokens=1),
        )  # fmt: skip
        for role in ("validator", "trainer"):
            await simulation.add(Plan(role, [role], SERVER, MACHINE)).start()
        for name in ("worker-0", "worker-1"):
            await simulation.add(Plan(name, ["inference"], SERVER, MACHINE)).start()

    async def grow_old(self) -> None:
        """Add submissions to each step, with samples in between; resume both peers twice."""
        size, step = self.size, 0
        for sample in range(size.samples):
            while self.made < size.submissions * (sample + 1) // size.samples:
                published = await self._steps.receive()
                if published > step:  # a resumed trainer may publish its policy again
                    step = published
                    await self._add(step)
            self.samples.append(self._sample())
            self.say(self.samples[-1])
            if sample in (0, size.samples - 1):
                for name in ("trainer", "validator"):
                    await self._resume(self.simulation.peers[name])
        self.status = self._status()

    async def _add(self, step: int) -> None:
        """Add the submissions of a step to the logs."""
        validator, trainer = self._trusted("validator"), self._trusted("trainer")
        outcomes: list[Entry] = []
        for number in range(self.size.per_step):
            digest = blake3(f"{step} {number}".encode()).digest()
            verdict = partial(self._verdict, step, number, digest)
            if (await validator.append_verdict(verdict)).expect(Verdict).outcome == "accepted":
                done = Consumed(step=step, submission=digest, outcomes=["consumed"] * GROUPS)
                outcomes.append(done)
        await trainer.append(outcomes)
        self.made += self.size.per_step
        self.steps += 1

    def _trusted(self, name: str) -> TrustedPart:
        part = self.simulation.peers[name].part
        assert part is not None
        return part.trusted_part(name)

    def _verdict(self, step: int, number: int, digest: bytes, log_index: int) -> Verdict:
        refused = number % REFUSED_EVERY == REFUSED_EVERY - 1
        bets = [-50] * BETS
        evidence = Evidence(tokens=8000, sampler=bets, policy=bets, text=bets, selection=bets)
        return Verdict(
            submission=digest,
            size_bytes=400_000,
            worker=self._workers[number % len(self._workers)],
            lineage=0,
            step=step,
            policy=max(0, step - 2),
            number=number // len(self._workers),
            outcome="refused" if refused else "accepted",
            failed="sampler" if refused else "",
            rewards=[] if refused else [[0.0, 1.0] * 4] * GROUPS,
            log_index=log_index,
            rollouts_digest=digest,
            rollouts_bytes=200_000,
            tokens=8000,
            share=0.17,
            evidence=evidence if refused or number % RECOMPUTED_EVERY == 0 else Evidence(),
        )

    # --- measuring -------------------------------------------------------------------------------

    def _sample(self) -> Sample:
        totals: dict[str, Counter[str]] = {}
        for name in ("trainer", "validator"):
            peer = self.simulation.peers[name]
            held = totals[name] = Counter()
            for quantity, value in stored(peer):
                held[quantity] += round(value)
            for _, entries in collections(peer.node, peer.part, *peer.roles):
                held["entries"] += entries
        return Sample(
            submissions=self.made,
            epochs=self.epochs,
            rows={name: held["rows"] for name, held in totals.items()},
            disk_bytes={name: held["disk bytes"] for name, held in totals.items()},
            entries_in_memory={name: held["entries"] for name, held in totals.items()},
            resident_mib=round(memory_of(os.getpid()).resident, 1),
            cpu_seconds=round(time.process_time() - self._began, 1),
        )

    async def _resume(self, peer: Peer) -> None:
        await peer.kill()
        ready = self.simulation.expect(
            "trainer.step_opened" if peer.name == "trainer" else "peer.status",
            [peer.name],
            lambda event: event.fields.get("doing", READY) == READY,
        )
        began = time.process_time()
        with remembering_envelopes(ENVELOPES_REMEMBERED):  # its own, so that it checks signatures
            await peer.start_again()
        await self.simulation.meet(ready, RESUMED_SECONDS)
        self.resume[peer.name].append(round(time.process_time() - began, 2))

    def _status(self) -> dict[str, float]:
        asked = self._trusted("trainer")
        began = time.process_time()
        raw = wire.encoder.encode(report(asked))
        made = time.process_time()
        bootstrap = self.simulation.peers["bootstrap"]
        status = RunStatus(Run(bootstrap.plan.manifests[0]))
        status.learn(msgspec.msgpack.decode(raw, type=wire.Status))
        lines = status_lines(status)
        shown = time.process_time() - made
        assert len(lines) > 1
        return {"bytes": len(raw), "made_seconds": made - began, "shown_seconds": shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("submissions", "per_step", "workers", "stake_steps", "epoch_entries", "samples"):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=at_least(1), default=getattr(Size, name))
    size = Size(**vars(parser.parse_args()))
    load = load_average()
    found = measure(size, lambda sample: print(sample, file=sys.stderr, flush=True))
    print_json({"load_average": load, **msgspec.to_builtins(found)})


if __name__ == "__main__":
    main()
