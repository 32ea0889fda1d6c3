"""`swarm demo`: prepare a run, start its peers, watch them, sum up.

The demo is an owner like any other: it makes a key, signs a run manifest, and starts peers with
the command line that anyone uses. It touches the roles only by name, through child processes and
the functions that `_Recipe` looks up.
"""

from __future__ import annotations

import importlib
import json
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.live import Live

from swarm import defaults
from swarm.demo import summary as summaries
from swarm.demo.processes import Process, keep_alive
from swarm.demo.state import SwarmState
from swarm.demo.view import REFRESH_SECONDS, Screen, figure, readable_seconds
from swarm.envelope import Envelope, seal
from swarm.errors import SwarmError, UserError
from swarm.identity import Identity, load_or_create
from swarm.messages import (
    EnvironmentReference,
    Objective,
    Optimiser,
    RunManifest,
    Sampling,
    Schedule,
    TrustedKey,
)
from swarm.output import STANDARD_OUTPUT, check_writable, write_json
from swarm.world.fork_server import ENVIRONMENT as FORK_SERVER
from swarm.world.machine import Machine

OUTPUT = Path("demo-output")
PEERS_MAX = 64
STEPS_MAX = 100_000
ALTERED_WEIGHTS = 0.1
"""Noise of the cheater's weights, relative to each tensor's own spread."""

START_SECONDS_MAX = 120.0
"""For the bootstrap peer to listen, and for the fork server to import torch."""
STALL_SECONDS_MAX = 180.0
"""Without a trained step for this long (and no evaluation going on) the demo gives up."""
FAREWELL_SECONDS = 1.0
"""After the run is over, for the last figures of the peers to come in."""


@dataclass(frozen=True)
class DemoOptions:
    """What the command line says."""

    age_seconds: float = 0.0
    """How long ago the command began: its imports count as well."""
    steps: int = 250
    peers: int = 3
    seed: int = 0
    keep: Path | None = None
    json_file: Path | None = None
    cheat: bool = False
    """The last inference peer generates with altered weights."""
    plain: bool = False


class _Recipe:
    """What the demo trains: sort six digits with a character model. Looked up by name, because
    this package knows no role."""

    environment = ("sort-digits", "1")
    model = "demo/qwen2-0.23m"
    preload = ("torch", "transformers", "transformers.models.qwen2.modeling_qwen2")
    """Nothing that imports pyarrow: its allocator starts a thread, and a fork server has none."""

    @staticmethod
    def write_tokenizer(folder: Path) -> list[int]:
        """Write tokenizer.json to `folder`; the stop ids."""
        demo = importlib.import_module("peers.policy.demo")
        demo.save_tokenizer(folder)
        return [int(demo.EOS_ID)]


def probe(folder: Path, environment: str, version: str) -> tuple[bytes, bytes]:
    """(hash of the tokenizer in `folder`, probe hash of the environment with it).

    Raises `UserError` when the folder has no tokenizer or the environment is not installed.
    """
    environments = importlib.import_module("peers.environments")
    renderer = environments.Renderer(folder)
    return renderer.tokenizer_hash, environments.probe_hash(
        environments.load(environment, version), renderer
    )


def demo_manifest(
    *,
    name: str,
    steps: int,
    stop_ids: list[int],
    hashes: tuple[bytes, bytes],
    trainer: str,
    validator: str,
) -> RunManifest:
    """The run manifest of the demo (recipe and figures: docs/concepts.md)."""
    environment, version = _Recipe.environment
    tokenizer_hash, probe_hash = hashes
    return RunManifest(
        name=name,
        version=1,
        model=_Recipe.model,
        tokenizer_hash=tokenizer_hash,
        environment=EnvironmentReference(name=environment, version=version, probe_hash=probe_hash),
        sampling=Sampling(
            temperature=1.0,
            max_new_tokens=8,
            stop_ids=stop_ids,
            group_size=8,
            groups_per_submission=4,
        ),
        schedule=Schedule(
            steps=steps, groups_per_step=32, asynchrony=2, max_staleness=4, old="generation"
        ),
        objective=Objective(
            epsilon=0.2,
            delta=4.0,
            kl_coefficient=0.0,
            entropy_coefficient=0.0,
        ),
        optimiser=Optimiser(
            gradient_norm_max=0.1,
            learning_rate=6e-4,
            beta1=0.9,
            beta2=0.99,
            warmup_steps=10,
            final_learning_rate_share=0.1,
        ),
        trainers=[TrustedKey(peer=trainer)],
        validators=[TrustedKey(peer=validator)],
        checkpoints_kept=5,
    )


# --- the peers ---------------------------------------------------------------------------------


@dataclass
class _Peer:
    """One peer of the demo: who it is and where it listens, the same after every restart."""

    name: str
    role: str
    identity: Identity
    home: Path
    port: int
    bulk_port: int
    arguments: list[str] = field(default_factory=list)
    """Beyond role, home and ports."""

    @property
    def multiaddr(self) -> str:
        return f"/ip4/127.0.0.1/tcp/{self.port}/p2p/{self.identity.peer_id}"

    def command(self, restart: bool) -> list[str]:
        resume = ["--resume"] if restart and self.role == "trainer" else []
        return [
            sys.executable,
            "-m",
            "swarm.peer",
            *("--role", self.role),
            *("--home", str(self.home)),
            *("--listen", f"/ip4/127.0.0.1/tcp/{self.port}"),
            *("--bulk-port", str(self.bulk_port)),
            *self.arguments,
            *resume,
            "--json-logs",
        ]


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of loopback that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def cast(inference_peers: int) -> list[tuple[str, str]]:
    """(name, role) of every peer of a demo."""
    return [
        ("bootstrap", "bootstrap"),
        ("relay-1", "relay"),
        ("relay-2", "relay"),
        ("trainer", "trainer"),
        ("validator", "validator"),
        *((f"inference-{index + 1}", "inference") for index in range(inference_peers)),
    ]


def _make_peers(folder: Path, options: DemoOptions) -> list[_Peer]:
    roles = cast(options.peers)
    ports = free_ports(2 * len(roles))
    return [
        _Peer(
            name=name,
            role=role,
            identity=load_or_create(folder / "peers" / name / "identity.key"),
            home=folder / "peers" / name,
            port=ports[2 * index],
            bulk_port=ports[2 * index + 1],
        )
        for index, (name, role) in enumerate(roles)
    ]


def write_config(path: Path, options: Mapping[str, str | int | float | bool]) -> None:
    """A peer's TOML settings with `[options]`. JSON's scalars are valid TOML."""
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in options.items()]
    path.write_text("[options]\n" + "\n".join(lines) + "\n", encoding="utf-8")


# --- the demo ----------------------------------------------------------------------------------


class _Demo:
    """One demo from beginning to end. Also the `Watcher` of its processes."""

    def __init__(
        self, options: DemoOptions, folder: Path, socket_folder: Path, console: Console
    ) -> None:
        """`folder` holds everything that lasts; `socket_folder` has a short path, since that of
        a Unix socket may have 107 bytes."""
        self.options = options
        self.folder = folder
        self.console = console
        self.state = SwarmState(
            steps_wanted=options.steps, started=trio.current_time() - options.age_seconds
        )
        self.state.enter("preparing", self.state.started)
        self.peers = _make_peers(folder, options)
        self.processes: dict[str, Process] = {}
        self.environment = {FORK_SERVER: str(socket_folder / "fork-server")}
        """Added to that of every process."""
        self.listening = {peer.name: trio.Event() for peer in self.peers}
        self.complete = trio.Event()
        self.ending = False
        for peer in self.peers:
            self.state.add_peer(peer.name, peer.role, peer.identity.peer_id)

    # --- what the processes say --------------------------------------------------------------

    def said(self, name: str, event: Mapping[str, Any]) -> None:
        self.state.apply(event, trio.current_time())
        if event.get("event") == "peer.listening" and name in self.listening:
            self.listening[name].set()
        if self.state.finished_folder is not None:
            self.complete.set()

    def died(self, name: str, status: int) -> None:
        self.state.process_died(name, status, trio.current_time())

    def finished(self, name: str) -> None:
        self.state.process_finished(name)

    def restart_wanted(self, name: str) -> bool:
        return not self.ending and name not in self.state.evicted

    # --- phases ------------------------------------------------------------------------------

    async def run(self, nursery: trio.Nursery) -> dict[str, Any]:
        """The whole demo; its processes live in `nursery` and end with it."""
        base = self.folder / "base"
        (self.folder / "logs").mkdir(parents=True)
        self._start_fork_server(nursery)
        manifest = self._sign_manifest(base)
        bootstrap = self._peer("bootstrap")
        bootstrap.arguments = ["--manifest", str(manifest)]
        self._configure(bootstrap.multiaddr)
        nursery.start_soon(self._start_in_turn, nursery)
        await self._watch_progress()
        await trio.sleep(FAREWELL_SECONDS)
        return self._sum_up()

    async def _start_in_turn(self, nursery: trio.Nursery) -> None:
        """Start the peers one after the other, each when the last has done its imports.

        All at once they would keep the fork server from its own, for which trainer, validator and
        inference peers wait: what the first step needs comes first.
        """
        urgency = ("bootstrap", "trainer", "validator", "inference", "relay")
        for peer in sorted(self.peers, key=lambda peer: urgency.index(peer.role)):
            self._start(nursery, peer)
            await self._wait_for(self.listening[peer.name], peer.name, "listen")
            if peer.role == "bootstrap":
                self.state.join_line = join_line(peer.multiaddr)

    def _peer(self, name: str) -> _Peer:
        return next(peer for peer in self.peers if peer.name == name)

    def _sign_manifest(self, base: Path) -> Path:
        """Write the signed run manifest. The name is new each time, since a guest's home pins the
        owner's key to it."""
        base.mkdir(parents=True, exist_ok=True)
        stop_ids = _Recipe.write_tokenizer(base)
        manifest = demo_manifest(
            name=f"demo-{secrets.token_hex(3)}",
            steps=self.options.steps,
            stop_ids=stop_ids,
            hashes=probe(base, *_Recipe.environment),
            trainer=self._peer("trainer").identity.peer_id,
            validator=self._peer("validator").identity.peer_id,
        )
        owner = load_or_create(self.folder / "owner.key")
        path = self.folder / "run.manifest"
        path.write_bytes(sign_manifest(owner, manifest, Machine().wall_time()).raw)
        return path

    def _start_fork_server(self, nursery: trio.Nursery) -> None:
        """The process that has torch imported already: the peers' compute children fork off it."""
        path = self.environment[FORK_SERVER]

        command = [sys.executable, "-m", "swarm.world.fork_server", "--socket", path]
        command += ["--preload", ",".join(_Recipe.preload)]
        process = Process(
            "fork-server",
            lambda restart: command,
            log=self.folder / "logs" / "fork-server.log",
        )
        self.processes[process.name] = process
        nursery.start_soon(keep_alive, process, self)

    async def _wait_for(self, event: trio.Event, name: str, what: str) -> None:
        with trio.move_on_after(START_SECONDS_MAX):
            await event.wait()
        if not event.is_set():
            said = "; ".join(self.processes[name].last_lines) or "nothing"
            raise SwarmError(
                f"{name} did not {what} within {START_SECONDS_MAX:g} s; it said: {said}"
            )

    def _configure(self, bootstrap: str) -> None:
        """Every other peer's arguments."""
        cheater = self.peers[-1] if self.options.cheat else None
        for peer in self.peers:
            if peer.role == "bootstrap":
                continue
            peer.arguments = ["--bootstrap", bootstrap]
            settings: dict[str, str | int | float | bool] = {}
            if peer.role == "trainer":
                settings = {
                    "trainer.model": str(self.folder / "base"),
                    "trainer.prepare_base": True,
                    "trainer.seed": self.options.seed,
                    "trainer.evaluate": True,
                    "trainer.starved_seconds": 30.0,
                }
            elif peer is cheater:
                settings = {"inference.alter_weights": ALTERED_WEIGHTS}
            if settings:
                config = peer.home / "settings.toml"
                write_config(config, settings)
                peer.arguments += ["--config", str(config)]

    def _start(self, nursery: trio.Nursery, peer: _Peer) -> None:
        process = Process(
            peer.name,
            peer.command,
            log=self.folder / "logs" / f"{peer.name}.jsonl",
            environment=self.environment,
        )
        self.processes[peer.name] = process
        nursery.start_soon(keep_alive, process, self)

    async def _watch_progress(self) -> None:
        """Until the run is complete; raises `SwarmError` when nothing is trained for long."""
        while not self.complete.is_set():
            trained = self.state.step
            with trio.move_on_after(STALL_SECONDS_MAX):
                await self.complete.wait()
            if not self.complete.is_set() and self.state.step == trained:
                doing = "; ".join(
                    f"{peer.name} is {peer.state}{f' ({peer.doing})' if peer.doing else ''}"
                    for peer in self.state.peers.values()
                )
                raise SwarmError(
                    f"no step was trained for {STALL_SECONDS_MAX:g} s (step {trained} of "
                    f"{self.options.steps}): {doing}"
                )
        self.ending = True

    # --- the end -----------------------------------------------------------------------------

    def _sum_up(self) -> dict[str, Any]:
        output = self.options.keep or OUTPUT
        output.mkdir(parents=True, exist_ok=True)
        policy = output / "policy"
        if self.state.finished_folder:
            shutil.rmtree(policy, ignore_errors=True)
            shutil.copytree(self.state.finished_folder, policy)
        summary = summaries.summarise(
            self.state,
            trio.current_time(),
            seed=self.options.seed,
            policy_folder=str(policy) if policy.exists() else None,
        )
        summaries.draw_rewards(summary, output / "reward.png")
        summary["seconds"] = round(trio.current_time() - self.state.started, 2)
        summary["seconds_by_phase"] = summaries.seconds_by_phase(self.state, trio.current_time())
        write_json("--keep", summary, output / "summary.json")
        if self.options.json_file is not None:
            write_json("--json", summary, self.options.json_file)
        return summary


def sign_manifest(owner: Identity, manifest: RunManifest, wall_time: float) -> Envelope:
    """A run manifest signed by its owner."""
    return seal(
        owner,
        manifest,
        run=f"{owner.peer_id}/{manifest.name}",
        sequence=int(wall_time * 1000),
        wall_time=wall_time,
        lifetime_seconds=defaults.MANIFEST_LIFETIME_SECONDS,
    )


def join_line(bootstrap: str) -> str:
    """The exact command that joins from another terminal, wherever that terminal is."""
    python = sys.executable
    found = shutil.which("python")
    if found is not None and Path(found).absolute() == Path(python).absolute():
        python = "python"
    return f"{shlex.quote(python)} -m swarm.peer --role inference --bootstrap {bootstrap}"


# --- showing it --------------------------------------------------------------------------------


async def _draw(demo: _Demo) -> None:
    """The live view, until cancelled."""
    screen = Screen(demo.state, trio.current_time)
    with Live(
        screen,
        console=demo.console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as live:
        while True:
            live.update(screen, refresh=True)
            await trio.sleep(REFRESH_SECONDS)


class _Plain:
    """One line per step and per thing worth knowing, for logs and pipes."""

    def __init__(self, state: SwarmState) -> None:
        self._state = state
        self._shown_join = False
        self._last_step = -1
        self._last_note = 0.0
        self._last_verdict = 0.0

    def lines(self) -> list[str]:
        """What is new since the last call."""
        state = self._state
        lines = []
        if state.join_line and not self._shown_join:
            self._shown_join = True
            lines.append(f"to join from another terminal: {state.join_line}")
        for note in [note for note in state.notes if note.at > self._last_note]:
            lines.append(f"{readable_seconds(note.at - state.started)}: {note.text}")
            self._last_note = note.at
        for verdict in [v for v in state.refusals if v.at > self._last_verdict]:
            self._last_verdict = verdict.at
            lines.append(
                f"{verdict.worker} step {verdict.step} #{verdict.number} {verdict.outcome}: "
                f"{verdict.failed} {figure(verdict.figure)} against {figure(verdict.threshold)}"
                f"{f' ({verdict.detail})' if verdict.detail else ''}"
            )
        for step in sorted(step for step in state.trained if step > self._last_step):
            trained = state.trained[step]
            self._last_step = step
            left = state.seconds_left()
            speed = state.tokens_per_second(trained.at)
            lines.append(
                f"step {step + 1}/{state.steps_wanted} reward {trained.reward:.3f} "
                f"gradient norm {trained.gradient_norm:.3g} groups {trained.groups} "
                f"{speed:,.0f} tokens/s accepted {state.counts['accepted']}"
                + (f" · {readable_seconds(left)} left" if left is not None else "")
            )
        return lines


async def _print(demo: _Demo) -> None:
    plain = _Plain(demo.state)
    try:
        while True:
            for line in plain.lines():
                print(line, file=demo.console.file, flush=True)
            await trio.sleep(REFRESH_SECONDS)
    finally:
        for line in plain.lines():
            print(line, file=demo.console.file, flush=True)


# --- the command -------------------------------------------------------------------------------


def _check(options: DemoOptions) -> None:
    if not 1 <= options.steps <= STEPS_MAX:
        raise UserError(f"--steps is {options.steps}; give 1 to {STEPS_MAX}")
    if not 1 <= options.peers <= PEERS_MAX:
        raise UserError(f"--peers is {options.peers}; give 1 to {PEERS_MAX}")
    if options.cheat and options.peers < 2:
        raise UserError("--cheat needs an honest peer beside the cheater; give --peers 2 or more")
    if options.keep is not None and (options.keep / "peers").exists():
        raise UserError(
            f"--keep {options.keep} holds the peers of an earlier demo; "
            "choose another folder, or remove it"
        )
    for path in (options.keep, options.json_file and options.json_file.parent):
        if path is not None:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"{path} cannot be made ({error.strerror})") from error
    check_writable("--json", options.json_file)


async def run_demo(options: DemoOptions) -> int:
    """Run a demo; the exit status: 0, or 130 after Ctrl-C.

    Raises `UserError` for wrong options and `SwarmError` when the demo cannot go on.
    """
    _check(options)
    console = Console(stderr=options.json_file == STANDARD_OUTPUT)
    folder = (options.keep or Path(tempfile.mkdtemp(prefix="swarm-demo-"))).absolute()
    show = _print if options.plain or not console.is_terminal else _draw
    summary: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory(prefix="swarm-fork-") as socket_folder:
        demo = _Demo(options, folder, Path(socket_folder), console)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            try:
                async with trio.open_nursery() as nursery:

                    async def listen() -> None:
                        async for _ in signals:
                            nursery.cancel_scope.cancel()
                            return

                    nursery.start_soon(listen)
                    nursery.start_soon(show, demo)
                    summary = await demo.run(nursery)
                    nursery.cancel_scope.cancel()
            except BaseException:
                print(f"what the peers said is in {folder / 'logs'}", file=sys.stderr)
                raise
    if options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    if summary is None:
        print("stopped", file=sys.stderr)
        return 130
    output = options.keep or OUTPUT
    files = {
        "trained policy": output / "policy",
        "reward curve": output / "reward.png",
        "summary": output / "summary.json",
    }
    if options.json_file not in (None, STANDARD_OUTPUT):
        files["summary"] = options.json_file
    if options.keep is not None:
        files["peers and logs"] = options.keep
    console.print(summaries.page(summary, files))
    return 0


__all__ = [
    "DemoOptions",
    "cast",
    "demo_manifest",
    "free_ports",
    "join_line",
    "probe",
    "run_demo",
    "sign_manifest",
    "write_config",
]
