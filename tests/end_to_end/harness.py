"""A swarm of real peers, each `python -m swarm.peer` in a process of its own, on loopback.

Tests wait for the events that the peers print. Each wait has a deadline, and its error names the
missing event. Every process leads a process group, which is killed at the end of the test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from peers.demo.recipes import ENVIRONMENT, Warmup
from peers.demo.setup import demo_manifest, free_ports, write_config
from peers.environments.collection import Environments
from peers.environments.run_probe import probe_hashes
from swarm.run.allowed import ALLOWED_VARIABLE
from swarm.run.update import sign_manifest
from swarm.wire.identity import Identity, load_or_create
from swarm.wire.manifest import (
    Adapter,
    EnvironmentReference,
    Limits,
    Objective,
    RunManifest,
    TrustedKey,
    Values,
)
from swarm.world.child import die_with_parent
from swarm.world.observable import Observable
from swarm.world.process import FORK_SERVER_VARIABLE, lines_of

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 60.0
"""Deadline for a peer's first event while all others start as well."""
STEP_SECONDS = 60.0
"""Deadline for one step of the tiny run, many times its usual duration, so that it suffices on a
busy machine and with a restart."""

GROUPS_PER_STEP, GROUPS_PER_SUBMISSION = 8, 2

Event = dict[str, Any]

PRELOAD = (
    "torch",
    "transformers.models.qwen2.modeling_qwen2",
    "peers.trainer.service",
    "peers.engines.service",
    "peers.validator.prefill",
)


def make_base(folder: Path) -> None:
    """Make a policy that sometimes sorts six digits, so that rewards differ within groups."""
    import torch

    from peers.demo.warmup import warm_up
    from peers.engines.demo import make_policy
    from peers.environments import load

    torch.set_num_threads(1)
    make_policy(folder, seed=0)
    warm_up(folder, [load(ENVIRONMENT.name, ENVIRONMENT.version)], 0, Warmup(accuracy=0.05))


@contextmanager
def running_fork_server(folder: Path) -> Iterator[Path]:
    """Run a fork server with torch for the peers' children; yields its socket."""
    path = folder / "socket"
    command = [sys.executable, "-m", "swarm.world.fork_server", "--socket", str(path)]
    with subprocess.Popen(
        [*command, "--preload", ",".join(PRELOAD)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield path
        finally:
            process.kill()


@dataclass
class Person:
    """A process and its output, as a person at a terminal sees it. Restarted by hand."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    build: Path = REPOSITORY
    """Folder with the source of the build that the process runs."""
    output: list[str] = field(default_factory=list)
    """Lines of standard output, over all restarts."""
    complaints: list[str] = field(default_factory=list)
    """Lines of standard error, over all restarts."""
    status: Observable[int | None] = field(default_factory=lambda: Observable(None))
    """Exit status of the last process, once it has ended and all its output is read."""
    said: Observable[int] = field(default_factory=lambda: Observable(0))
    pid: int = 0

    def start(self, nursery: trio.Nursery, *arguments: str) -> None:
        """Start a process, with `arguments` after the usual ones."""
        output, output_end = os.pipe()
        complaints, complaints_end = os.pipe()
        child = subprocess.Popen(
            [*self.command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output_end,
            stderr=complaints_end,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # even if this process is killed
            cwd=self.build,
            env=self._variables(),
        )
        os.close(output_end)
        os.close(complaints_end)
        self.pid = child.pid
        self.status.set(None)
        nursery.start_soon(self._live, child, output, complaints)

    def _variables(self) -> dict[str, str]:
        variables = {**os.environ, **self.environment}
        if self.build != REPOSITORY:  # for its children as well, which no fork server may start
            variables["PYTHONPATH"] = str(self.build)
            variables.pop(FORK_SERVER_VARIABLE, None)
        return variables

    async def _live(self, child: subprocess.Popen[bytes], output: int, complaints: int) -> None:
        watch = os.pidfd_open(child.pid)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, output, self._hear)
                nursery.start_soon(self._listen, complaints, self._hear_complaint)
                await trio.lowlevel.wait_readable(watch)
                self.left_behind = processes_in_group(child.pid) - {child.pid}
                _kill_group(child.pid, signal.SIGKILL)  # its children may hold the pipes open
            self.status.set(child.wait())
            self.said.touch()
        finally:
            _kill_group(child.pid, signal.SIGKILL)
            child.wait()
            os.close(watch)

    left_behind: set[int] = field(default_factory=set)
    """Processes of its group that outlived the last process, and were then killed."""

    @staticmethod
    async def _listen(pipe: int, hear: Callable[[str], None]) -> None:
        async with trio.lowlevel.FdStream(pipe) as stream:
            async for line in lines_of(stream):
                hear(line)

    def _hear(self, line: str) -> None:
        self.output.append(line)
        self.said.touch()

    def _hear_complaint(self, line: str) -> None:
        self.complaints.append(line)
        self.said.touch()

    def send(self, which: signal.Signals) -> None:
        """Send a signal to the process alone, like a terminal's Ctrl-C to a single program."""
        os.kill(self.pid, which)

    async def complains(self, text: str, seconds: float) -> str:
        """Wait for the first line of standard error that contains `text`."""

        def found() -> str | None:
            return next((line for line in self.complaints if text in line), None)

        line: str = await self._wait(found, f"say {text!r}", seconds)
        return line

    async def ended(self, seconds: float) -> int:
        """Wait for the exit status, negative for a signal."""
        status: int = await self._wait(lambda: self.status.value, "end", seconds, may_end=True)
        return status

    async def kill(self) -> None:
        """Send SIGKILL to the whole group, as if the machine failed."""
        _kill_group(self.pid, signal.SIGKILL)
        status = await self.ended(10)
        assert status == -signal.SIGKILL, f"{self.name} ended with {status}: {self.complaints}"

    async def _wait(
        self, found: Callable[[], Any], what: str, seconds: float, *, may_end: bool = False
    ) -> Any:
        with trio.move_on_after(seconds):
            while True:
                result = found()
                if result is not None:
                    return result
                if self.status.value is not None and not may_end:
                    raise AssertionError(
                        f"{self.name} ended with status {self.status.value} before it did "
                        f"{what}:\n{self._last_words()}"
                    )
                await self.said.wait_change()
        raise AssertionError(f"{self.name} did not {what} in {seconds:g} s:\n{self._last_words()}")

    def _last_words(self) -> str:
        return "\n".join([*self.output[-15:], *self.complaints[-15:]])


@dataclass
class Peer(Person):
    """A peer that prints its events as JSON. It keeps its home and ports across restarts."""

    role: str = ""
    identity: Identity = field(default_factory=lambda: Identity(bytes(32)))
    home: Path = Path()
    port: int = 0
    events: list[Event] = field(default_factory=list)
    """Events over all restarts."""

    @property
    def multiaddr(self) -> str:
        return f"/ip4/127.0.0.1/tcp/{self.port}/p2p/{self.identity.peer_id}"

    def _hear(self, line: str) -> None:
        if line.startswith("{"):
            with suppress(ValueError):  # a line that SIGKILL cut off
                self.events.append(json.loads(line))
        super()._hear(line)

    def children(self) -> dict[str, int]:
        """Return the process ids of its present compute children, by name."""
        living: dict[str, int] = {}
        for event in self.events:
            if event["event"] == "peer.listening":
                living.clear()
            elif event["event"] == "compute.child_started":
                living[event["name"]] = event["pid"]
            elif event["event"] == "compute.child_died":
                living.pop(event["name"], None)
        return {name: pid for name, pid in living.items() if _is_swarms(pid)}

    def heard(self, name: str, /, since: int = 0, **fields: Any) -> list[Event]:
        """List the events of this name with these fields, from the `since`-th event on."""
        return [
            event
            for event in self.events[since:]
            if event["event"] == name and all(event.get(k) == v for k, v in fields.items())
        ]

    async def says(
        self, name: str, /, *, seconds: float = STEP_SECONDS, since: int = 0, **fields: Any
    ) -> Event:
        """Wait for the first such event, or return it if it has already come."""

        def found() -> Event | None:
            return next(iter(self.heard(name, since, **fields)), None)

        event: Event = await self._wait(found, f"say {name} {fields or ''}", seconds)
        return event


def _is_swarms(pid: int) -> bool:
    """Whether this id is still one of our processes; another process may have it by now."""
    try:
        return b"swarm" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def processes_in_group(group: int) -> set[int]:
    """List the processes of a process group, without zombies."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(pgrp) == group and state != "Z":
                    found.add(int(entry.name))
    return found


def processes_with(word: str) -> set[int]:
    """List the processes on this machine with this word in their command line."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
    return found


def _kill_group(group: int, which: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, which)


# --- attackers ---------------------------------------------------------------------------------


def run_as_attacker(main: Callable[[], Awaitable[None]]) -> None:
    """`trio.run(main)` in a thread of its own: the priority that `yield_processor` gives up is
    that thread's, and cannot be raised again for the tests that follow."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(trio.run, main).result()


def yield_processor() -> None:
    """Give this thread the lowest priority. What it starts from now on inherits it."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)


# --- the swarm ---------------------------------------------------------------------------------


def tiny_manifest(
    base: Path,
    *,
    trainer: str,
    validators: Sequence[str],
    steps: int,
    limits: Limits,
    environment: EnvironmentReference = ENVIRONMENT,
    environment_peers: Sequence[str] = (),
    sampling: Mapping[str, Any] | None = None,
) -> RunManifest:
    """Make a small version of the demo's run: 8 groups of 4 per step, 2 groups per submission.

    `sampling`: other values of its fields."""
    hashes = probe_hashes(base, [environment], Environments(allowed=[environment.name]))
    manifest = demo_manifest(
        name="tiny", steps=steps, hashes=hashes, trainer=trainer, validator=validators[0]
    )
    replace = msgspec.structs.replace
    return replace(
        manifest,
        environments=[replace(environment, probe_hash=hashes.probes[0])],
        environment_peers=[TrustedKey(peer=peer) for peer in environment_peers],
        sampling=replace(
            manifest.sampling,
            group_size=4,
            groups_per_submission=GROUPS_PER_SUBMISSION,
            **(sampling or {}),
        ),
        schedule=replace(manifest.schedule, groups_per_step=GROUPS_PER_STEP),
        validators=[TrustedKey(peer=validator) for validator in validators],
        limits=limits,
    )


class Swarm:
    """Peers by name: bootstrap, relay, trainer, validator(-1, -2…), inference-1, inference-2…

    Further trainers (trainer-2…) are standbys of the first.
    """

    def __init__(
        self,
        folder: Path,
        base: Path,
        nursery: trio.Nursery,
        *,
        fork_server: Path,
        names: Sequence[str],
        steps: int,
        limits: Limits | None = None,
        adapter: Adapter | None = None,
        objective: Objective | None = None,
        values: Values | None = None,
        settings: Mapping[str, Mapping[str, str | int | float | bool]] | None = None,
        environment: EnvironmentReference = ENVIRONMENT,
        sampling: Mapping[str, Any] | None = None,
        site: Path | None = None,
    ) -> None:
        """`site`: a folder with packages that environment peers alone have."""
        self.nursery = self._nursery = nursery
        self.folder = folder
        ports = iter(free_ports(2 * len(names)))
        self.peers: dict[str, Peer] = {}
        for name in names:
            home = folder / name
            home.mkdir(mode=0o700, parents=True)
            port, bulk_port = next(ports), next(ports)
            role = name.partition("-")[0]
            command = [sys.executable, "-m", "swarm.peer", "--role", role, "--home", str(home)]
            command += ["--listen", f"/ip4/127.0.0.1/tcp/{port}", "--bulk-port", str(bulk_port)]
            command += ["--json-logs"]
            variables = {FORK_SERVER_VARIABLE: str(fork_server), ALLOWED_VARIABLE: environment.name}
            if role == "environment" and site is not None:
                search = [str(site), os.environ.get("PYTHONPATH", "")]
                variables["PYTHONPATH"] = os.pathsep.join(filter(None, search))
            self.peers[name] = Peer(
                name,
                command,
                variables,
                role=role,
                identity=load_or_create(home / "identity.key"),
                home=home,
                port=port,
            )
        owner = Identity(bytes([7]) * 32)
        self.validators = [p.identity.peer_id for p in self.peers.values() if p.role == "validator"]
        manifest = tiny_manifest(
            base,
            trainer=self["trainer"].identity.peer_id,
            validators=self.validators,
            steps=steps,
            limits=limits or Limits(),
            environment=environment,
            environment_peers=[p.identity.peer_id for p in self.of_role("environment")],
            sampling=sampling,
        )
        manifest = msgspec.structs.replace(
            manifest,
            adapter=adapter or Adapter(),
            objective=objective or manifest.objective,
            values=values or manifest.values,
            standbys=[TrustedKey(peer=p.identity.peer_id) for p in self.of_role("trainer")[1:]],
        )
        envelope = sign_manifest(owner, manifest, time.time())
        self.run = envelope.body.run
        self.manifest = manifest
        path = folder / "run.manifest"
        path.write_bytes(envelope.raw)
        bootstrap = self["bootstrap"].multiaddr
        for name, peer in self.peers.items():
            if name == "bootstrap":
                peer.command = [*peer.command, "--manifest", str(path)]
                continue
            table = dict((settings or {}).get(name, {}))
            if peer.role == "trainer":
                # Rewards of a policy that is not trained rise and fall by chance.
                table = {"model": str(base), "alarm_action": "report", **table}
            write_config(peer.home / "settings.toml", peer.role, table)
            peer.command = [*peer.command, "--bootstrap", bootstrap]
            peer.command = [*peer.command, "--config", str(peer.home / "settings.toml")]
        self._commands = {name: list(peer.command) for name, peer in self.peers.items()}

    def __getitem__(self, name: str) -> Peer:
        return self.peers[name]

    def of_role(self, role: str) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.role == role]

    async def start(self, *names: str) -> None:
        """Start the named peers, by default all, the bootstrap peer first."""
        wanted = names or tuple(self.peers)
        if "bootstrap" in wanted:
            self["bootstrap"].start(self._nursery)
            await self["bootstrap"].says("peer.listening", seconds=START_SECONDS)
        for name in wanted:
            if name != "bootstrap":
                self[name].start(self._nursery)

    def restart(self, name: str, module: Sequence[str] = ("swarm.peer",)) -> None:
        """Restart a dead peer with the same home and ports.

        `module` names another module that runs the peer, with the module's own arguments.
        """
        peer = self[name]
        python, dash_m, _, *flags = self._commands[name]
        peer.command = [python, dash_m, *module, *flags]
        peer.start(self._nursery, *(["--resume"] if peer.role == "trainer" else []))

    async def complete(self, seconds: float) -> Path:
        """Wait for the end of the run; return the folder of the final policy."""
        event = await self["trainer"].says("trainer.run_complete", seconds=seconds)
        assert event["steps"] == self.manifest.schedule.steps
        return Path(event["folder"])

    def person(self, name: str, *arguments: str, home: Path) -> Person:
        """Make a peer as a person starts it by `python -m swarm.peer …` on another machine.

        It prints no JSON, uses no fork server, and has everything in its home folder.
        """
        person = Person(name, [sys.executable, "-m", "swarm.peer", *arguments], {"HOME": str(home)})
        person.start(self._nursery)
        return person


@asynccontextmanager
async def swarm(
    folder: Path, base: Path, fork_server: Path, **settings: Any
) -> AsyncIterator[Swarm]:
    """Make a swarm whose processes end with the block."""
    async with trio.open_nursery() as nursery:
        yield Swarm(folder, base, nursery, fork_server=fork_server, **settings)
        nursery.cancel_scope.cancel()
