"""The course of one demo, the owner of a run like any other: prepare, start its peers, watch."""

import secrets
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import trio
from msgspec.structs import replace
from rich.console import Console

from peers.demo import setup
from peers.demo.processes import PRELOAD_PEERS, Process, keep_alive, reach, start_fork_server
from peers.demo.recipes import MODEL, PreparationService, Prepare, Recipe, recipe_of
from peers.demo.state import SwarmState
from peers.demo.summary import OUTPUT, page, write_results
from peers.demo.view import STEP_LINE_SECONDS, draw, print_lines
from peers.engines.demo import save_tokenizer
from peers.environments import Renderer, task_of
from peers.environments.collection import Environments
from peers.environments.interface import messages_of
from peers.environments.probe import probe_seed
from peers.environments.run_probe import probe_hashes, try_grading
from peers.evaluation.run import accuracies
from peers.models.find import Model, find_model
from swarm.errors import SwarmError, UserError
from swarm.jobs.evaluation import EVALUATION_START_SECONDS, Answer, Evaluated
from swarm.look.rollouts.filters import Filters
from swarm.look.rollouts.seen import SeenRollout
from swarm.look.rollouts.sources import open_source
from swarm.look.rollouts.text import Decoder
from swarm.run.allowed import allow_environments
from swarm.run.update import sign_manifest
from swarm.terminal.output import print_json
from swarm.wire.identity import load_or_create
from swarm.world import client
from swarm.world.compute import LocalCompute
from swarm.world.machine import Machine
from swarm.world.process import FORK_SERVER_VARIABLE


class Answers:
    """What the swarm's model answers while it learns, from the work in the validator's home: one
    answer at a time, of the newest submission that was accepted."""

    def __init__(self, home: Path, policy: Path, recipe: Recipe) -> None:
        """`home`: the validator's. `policy`: a folder with the tokenizer."""
        self._home = home
        self._decoder = Decoder(policy)
        self._stops = recipe.sampling.stop_ids
        environment = Environments(recipe.environments).of(recipe.environments[0])
        prompt = task_of(environment, probe_seed(0)).prompt
        text = self._decoder.decode(Renderer(policy).encode_prompt(prompt))
        # What the chat template writes around every question.
        self._before, _, self._after = text.rpartition(messages_of(prompt)[-1].content)
        self._shown: set[Path] = set()

    def newest(self) -> tuple[int, Answer] | None:
        """(the step that the answer is for, the answer); None if there is no new one."""
        try:
            source = open_source(self._home, tokenizer=self._decoder)
        except UserError:  # the home holds none at this moment
            return None
        for found in reversed(source.files):
            if found.path in self._shown:
                return None
            source.files = [found]
            accepted = [each for each in source.rollouts(Filters()) if each.reward is not None]
            if accepted:
                self._shown.add(found.path)
                return found.step, self._answer(accepted[len(self._shown) % len(accepted)])
        return None

    def _answer(self, seen: SeenRollout) -> Answer:
        prompt, *turns = seen.turns
        question = (prompt.text or "").removeprefix(self._before).removesuffix(self._after)
        written = [
            self._decoder.decode([token for token in turn.tokens if token not in self._stops])
            for turn in turns
            if turn.kind == "model"
        ]
        return Answer(question, " ⏎ ".join(written), seen.reward or 0.0)


PEER_SERVER = "peer-server"
PREPARATION = "peers.demo.warmup:open_preparation"
START_SECONDS_MAX = 120.0
"""Deadline for a peer to listen. The fork servers import in this time."""
STALL_SECONDS_MAX = 300.0
"""The demo gives up when no step is trained for this long."""
WARMED_BELOW = 0.1
"""Sampled accuracy below which a given model is warmed up: wholly wrong groups teach nothing."""
FIRST_PROMPTS = 32
"""Held-out prompts on which that is measured."""
ANSWERS_SECONDS = 5.0
"""Between two looks for new answers."""
FAREWELL_SECONDS = 1.0
"""Wait for the peers' last figures after the end of the run."""


class Demo:
    """One demo; also the `Watcher` of its processes."""

    def __init__(
        self,
        options: setup.DemoOptions,
        recipe: Recipe,
        model: Model | None,
        folder: Path,
        compute: Process,
        socket_folder: Path,
    ) -> None:
        """`model`: the one that is given. `folder` holds all files that outlast the demo. `compute`
        is the fork server of children that compute; its socket is in `socket_folder`, whose path
        must be short: a Unix socket's may have at most 107 bytes."""
        self.options, self.recipe, self.model = options, recipe, model
        self.folder = folder
        self.base = folder / "base"
        self.state = SwarmState(
            steps_wanted=options.steps or recipe.schedule.steps,
            title=recipe.title,
            started=trio.current_time() - time.process_time(),  # its imports count, too
            held_out=recipe.held_out,
        )
        self.state.enter("preparing", self.state.started)
        self._note(f"to learn: {recipe.title}")
        self.peers = setup.make_peers(folder, options.peers)
        self.processes: dict[str, Process] = {}
        self.compute = compute
        self.compute_server = socket_folder / compute.name
        self.peer_server = socket_folder / PEER_SERVER
        self._compute = LocalCompute(fork_server=str(self.compute_server))
        self.environment = {FORK_SERVER_VARIABLE: str(self.compute_server)}
        """Environment variables added for every process."""
        self.listening = {peer.name: trio.Event() for peer in self.peers}
        self.prepared, self.complete = trio.Event(), trio.Event()
        self.ending = False
        for peer in self.peers:
            self.state.add_peer(peer.name, peer.role, peer.identity.peer_id)

    # --- events of the processes -------------------------------------------------------------

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
        (self.folder / "logs").mkdir(parents=True)
        self._keep(nursery, self.compute)
        folder = self.peer_server.parent
        self._keep(nursery, start_fork_server(PEER_SERVER, folder, PRELOAD_PEERS))
        if self.model is None:
            save_tokenizer(self.base)  # with which the run is described
            self._start_peers(nursery)
        with suppress(trio.TooSlowError):  # the child then starts without it
            (await reach(self.compute_server)).close()
        async with self._compute.child(
            PREPARATION, name="preparation", start_deadline_seconds=EVALUATION_START_SECONDS
        ) as child:
            service = client(PreparationService, child)
            if self.model is not None:
                evaluated = await self._take(self.model, service)
            else:
                self._note("a supervised warm-up makes the base policy, in up to a minute")
                job = Prepare(recipe=self.recipe, folder=str(self.base), seed=self.options.seed)
                await service.warm_up(job)
                self._ready()  # the trainer starts meanwhile
                evaluated = await self._measure(self.base, self.recipe.held_out)
        if self.model is not None:
            self._start_peers(nursery)
            nursery.start_soon(self._show_answers)
            self._ready()
        self.state.evaluated("before", msgspec.to_builtins(evaluated), trio.current_time())
        await self._watch_progress()
        evaluated = await self._measure(
            Path(self.state.finished_folder or ""), self.recipe.held_out
        )
        self.state.evaluated("after", msgspec.to_builtins(evaluated), trio.current_time())
        await trio.sleep(FAREWELL_SECONDS)
        return write_results(self.state, self.options)

    def _ready(self) -> None:
        self.state.enter("joining", trio.current_time())
        self.prepared.set()

    async def _take(self, model: Model, service: PreparationService) -> Evaluated:
        """Make the base policy of a model that is given, warmed up if it is hardly ever right;
        measure it, and thresholds for it. Raises `UserError` if it has nothing to learn from."""
        given = Prepare(
            recipe=self.recipe, folder=str(model.folder.resolve()), seed=self.options.seed
        )
        self._note(f"asking {model.title} {FIRST_PROMPTS} held-out questions")
        found = await self._measure(Path(given.folder), FIRST_PROMPTS)
        self.state.show("model", msgspec.to_builtins(found.answers), trio.current_time())
        right = f"{model.title} is right in {found.sampled:.0%} of them"
        if found.sampled < WARMED_BELOW and self.recipe.warmup is not None:
            self._note(f"{right}: a supervised warm-up first, so that there is something to reward")
            steps = await service.warm_up(replace(given, model=given.folder, folder=str(self.base)))
            self._note(f"warmed up with {steps} batches of the tasks' own answers")
        elif found.sampled > 0:
            self.base = Path(given.folder)
        else:
            raise UserError(
                f"{right}, and {self.recipe.title} tells no answers to learn first; give another "
                "model, or give its tasks answers"
            )
        job = replace(given, folder=str(self.base))
        self._note("measuring how far honest peers differ, to tell fakes from them")
        self.recipe = replace(self.recipe, thresholds=await service.calibrate(job))
        self._note(f"measuring the policy on {self.recipe.held_out} held-out questions")
        return await self._measure(self.base, self.recipe.held_out)

    async def _measure(self, folder: Path, prompts: int) -> Evaluated:
        recipe = self.recipe
        return await accuracies(
            self._compute, folder, recipe.environments, recipe.sampling, prompts
        )

    def _start_peers(self, nursery: trio.Nursery) -> None:
        bootstrap = self._peer("bootstrap")
        bootstrap.arguments = ["--manifest", str(self._sign_manifest())]
        setup.configure(self.peers, bootstrap.multiaddr, self.base, self.options)
        nursery.start_soon(self._start_in_turn, nursery)

    async def _show_answers(self) -> None:
        """Show an answer of the newest work that was judged, now and then."""
        reader = Answers(self._peer("validator").home, self.base, self.recipe)
        while True:
            await trio.sleep(ANSWERS_SECONDS)
            found = await trio.to_thread.run_sync(reader.newest)
            if found is not None:
                step, answer = found
                shown = [msgspec.to_builtins(answer)]
                self.state.show(f"step {step + 1}", shown, trio.current_time())

    def _note(self, line: str) -> None:
        self.state.note(line, trio.current_time())

    async def _start_in_turn(self, nursery: trio.Nursery) -> None:
        """Start the peers in turn, the trainer once the base policy is there: all at once they
        would slow down the imports of the compute server, for which most of them wait."""
        urgency = ("bootstrap", "validator", "inference", "relay", "trainer")
        for peer in sorted(self.peers, key=lambda peer: urgency.index(peer.role)):
            if peer.role == "trainer":
                await self.prepared.wait()
            self._start(nursery, peer)
            with trio.move_on_after(START_SECONDS_MAX):
                await self.listening[peer.name].wait()
            if not self.listening[peer.name].is_set():
                said = "; ".join(self.processes[peer.name].last_lines) or "nothing"
                raise SwarmError(
                    f"{peer.name} did not listen within {START_SECONDS_MAX:g} s; it said: {said}"
                )
            if peer.role == "bootstrap":
                self.state.join_line = join_line(peer.multiaddr)

    def _peer(self, name: str) -> setup.LocalPeer:
        return next(peer for peer in self.peers if peer.name == name)

    def _sign_manifest(self) -> Path:
        """Each run has a new name, because a guest's home pins the owner's key to the name."""
        recipe = self.recipe
        manifest = setup.demo_manifest(
            name=f"demo-{secrets.token_hex(3)}",
            recipe=recipe,
            steps=self.options.steps,
            hashes=probe_hashes(self.base, recipe.environments),
            trainer=self._peer("trainer").identity.peer_id,
            validator=self._peer("validator").identity.peer_id,
            groups_per_submission=recipe.schedule.groups_per_step // setup.SUBMISSIONS_PER_STEP,
            model=self.model.name if self.model else MODEL,
        )
        owner = load_or_create(self.folder / "owner.key")
        path = self.folder / "run.manifest"
        path.write_bytes(sign_manifest(owner, manifest, Machine().wall_time()).raw)
        return path

    def _start(self, nursery: trio.Nursery, peer: setup.LocalPeer) -> None:
        process = Process(
            peer.name, peer.command, environment=self.environment, fork_server=self.peer_server
        )
        self._keep(nursery, process, "jsonl")

    def _keep(self, nursery: trio.Nursery, process: Process, suffix: str = "log") -> None:
        process.log = self.folder / "logs" / f"{process.name}.{suffix}"
        self.processes[process.name] = process
        nursery.start_soon(keep_alive, process, self)

    async def _watch_progress(self) -> None:
        """Raises `SwarmError` if nothing is trained for `STALL_SECONDS_MAX`."""
        while not self.complete.is_set():
            done = self.state.step
            with trio.move_on_after(STALL_SECONDS_MAX):
                await self.complete.wait()
            if not self.complete.is_set() and self.state.step == done:
                doing = "; ".join(
                    f"{peer.name} is {peer.state}{f' ({peer.doing})' if peer.doing else ''}"
                    for peer in self.state.peers.values()
                )
                raise SwarmError(
                    f"no step was trained for {STALL_SECONDS_MAX:g} s (step {done} of "
                    f"{self.state.steps_wanted}): {doing}"
                )
        self.ending = True


def join_line(bootstrap: str) -> str:
    """Return the exact command that joins the demo from another terminal."""
    program = Path(sys.executable).with_name("swarm").absolute()
    found = shutil.which("swarm")
    activated = found is not None and Path(found).absolute() == program
    called = "swarm" if activated else shlex.quote(str(program))
    return f"{called} peer --role inference --bootstrap {bootstrap}"


async def run_demo(options: setup.DemoOptions, compute: Process, socket_folder: Path) -> int:
    """Run a demo; returns the exit status: 0, or 130 after Ctrl-C. Raises `UserError` for wrong
    options and `SwarmError` if the demo cannot continue. For the others see `Demo`."""
    setup.check_options(options)
    model = None
    if options.model is not None:
        model = find_model(options.model, "--model")
        setup.check_memory(model.folder, options)
    console = Console(stderr=options.as_json)
    lines = options.plain or not console.is_terminal
    summary: dict[str, Any] | None = None
    save_tokenizer(socket_folder)  # of the policy that is made where none is given
    recipe = recipe_of(
        options.environment,
        options.environment_options,
        model=model.folder if model else None,
        tokenizer=socket_folder,
    )
    allow_environments(each.name for each in recipe.environments)  # to the demo's peers as well
    try_grading(recipe.environments)
    folder = (options.out or Path(tempfile.mkdtemp(prefix="swarm-demo-"))).absolute()
    demo = Demo(options, recipe, model, folder, compute, socket_folder)
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        try:
            async with trio.open_nursery() as nursery:

                async def listen() -> None:
                    async for _ in signals:
                        nursery.cancel_scope.cancel()
                        return

                nursery.start_soon(listen)
                if lines:
                    every = 0.0 if options.plain else STEP_LINE_SECONDS
                    nursery.start_soon(print_lines, demo.state, console.file, every)
                else:
                    nursery.start_soon(draw, demo.state, console)
                summary = await demo.run(nursery)
                nursery.cancel_scope.cancel()
        except BaseException:
            print(f"the peers' output is in {folder / 'logs'}", file=sys.stderr)
            raise
    if options.out is None:
        shutil.rmtree(folder, ignore_errors=True)
    if summary is None:
        print("stopped", file=sys.stderr)
        return 130
    output = options.out or OUTPUT
    files = {
        "trained policy": output / "policy",
        "reward curve": output / "reward.png",
        "summary": output / "summary.json",
    }
    if options.out is not None:
        files["peers and logs"] = options.out
    console.print(page(summary, files))
    if options.as_json:
        print_json(summary)
    return 0
