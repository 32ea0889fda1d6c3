"""The child process of an inference peer: computes rollouts and proofs, and writes the file."""

import math
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import safetensors.torch
import torch
import trio

from peers.engines.device import available_bytes, find_device, survey, use_hardware
from peers.engines.engine import Engine
from peers.engines.episodes import ContinuedTask, Player, Playing, ServedTask, Work, finish
from peers.engines.making import AskedQueue, FinishedRollouts, Made
from peers.engines.memory import Need, check_fits, need_of
from peers.engines.model import read_weights
from peers.engines.registry import check_engine, make_engine
from peers.environments import Renderer, probe_hash
from peers.environments.collection import Environments, GroupTask
from peers.environments.prompt_room import ModelFacts, PromptRoom
from peers.proofs import toploc
from peers.sandbox.launcher import start_launcher
from swarm.errors import UserError
from swarm.jobs import Hardware, Load, SubmissionOrder, inference
from swarm.rollouts import seeds
from swarm.rollouts.rollouts import Rollouts, Row
from swarm.rollouts.submission_file import Header, write
from swarm.wire.messages import CheckpointReference
from swarm.world.progress import checkpoint
from swarm.world.tasks import JobThread, alongside, in_job_thread


class EngineService:
    """Implements `swarm.jobs.inference.InferenceService`.

    The call of the oldest submission drives the engine, in the job thread, until its completions
    are finished; then the next call drives. Two submissions share the batch if `sharing` says so
    (`peers.engines.episodes.Player`). Another thread makes proofs and files."""

    reads_in_home = ("checkpoints", "outbox")
    before_keys_close = staticmethod(start_launcher)

    def __init__(self, setup: inference.InferenceSetup) -> None:
        """Check engine, device and environments, before a large download; raises `UserError`."""
        check_engine(setup.engine)
        use_hardware(setup.hardware)
        self._setup = setup
        self._engine: Engine | None = None
        self._player: Player | None = None
        self._need: Need | None = None
        self._free_bytes = 0
        """Memory that was free before the first policy was loaded."""
        self._folder = Path()
        self._policy: CheckpointReference | None = None
        self._seconds_loading = 0.0
        """How long that policy took to load."""
        self._live: list[Made] = []
        """Submissions in the batch."""
        self._offered: deque[Load] = deque(maxlen=1)
        """The policy to swap to; `swap` adds it, and the job thread takes it."""
        self._reading: CheckpointReference | None = None
        """The policy offered that is being loaded."""
        self._swapping = Lock()
        """Held while weights are swapped, and while a submission joins the batch."""
        self._thread = JobThread()
        self._beside = JobThread()
        """Proofs and files, one submission's after the other's."""
        self._renderer: Renderer | None = None
        self._asked = AskedQueue()
        self._environments = Environments(setup.environments, setup.allowed)
        toploc.build([torch.randn(2, 128).bfloat16()])  # its tables, not in the first submission

    @in_job_thread
    def survey(self) -> inference.Surveyed:
        return survey(self._setup)

    @in_job_thread
    def load(self, job: Load) -> inference.Loaded:
        with self._swapping:
            if self._player is not None:
                self._player.drop_failed()
                if not self._player.is_idle:
                    raise ValueError(f"submissions of {self._policy} are being generated")
            self._load(job)
        assert self._engine is not None and self._need is not None
        known, need = self._engine.capabilities, self._need
        slots = known.slots or 0
        if known.memory_bytes is not None and need.row_bytes:
            row_bytes = need.row_bytes * max(1, len(self._setup.hardware.devices))  # on all of them
            slots = max(1, min(slots or 1 << 30, known.memory_bytes // row_bytes))
        return inference.Loaded(
            seconds=self._seconds_loading,
            weights_bytes=need.weights_bytes,
            row_bytes=need.row_bytes,
            row_tokens=need.length,
            slots=slots,
            free_bytes=self._free_bytes,
        )

    @in_job_thread
    def probe(self, job: inference.Probe) -> bytes:
        return probe_hash(self._environments.of(job.environment), Renderer(self._folder))

    def _load(self, job: Load) -> None:
        path, loaded, started = Path(job.folder), False, time.perf_counter()
        try:
            if self._setup.alter_weights or self._setup.round_weights != "none":
                with tempfile.TemporaryDirectory() as aside:
                    altered = _altered(path, Path(aside), self._setup.alter_weights)
                    self._load_folder(altered, job.policy.step)
            else:
                self._load_folder(path, job.policy.step)
            loaded = True
        finally:  # after a failure, no policy counts as loaded
            self._folder, self._policy = path, job.policy if loaded else None
            self._seconds_loading = time.perf_counter() - started

    def _load_folder(self, folder: Path, policy: int) -> None:
        if self._engine is None:
            self._check_memory(folder)
            self._engine = make_engine(self._setup.engine, folder, self._setup.hardware, policy)
            self._player = Player(self._engine, sharing(self._setup.hardware), self._asked.stall)
        else:
            self._engine.load_weights(folder, policy)

    def _check_memory(self, folder: Path) -> None:
        """Raise `UserError` if the policy in `folder` does not fit into the device's memory."""
        self._need = need_of(folder, self._setup.hardware, self._setup.tokens_max)
        self._free_bytes = available_bytes(find_device(self._setup.hardware.device))
        check_fits(self._need, self._free_bytes)

    async def usage(self) -> float:
        return self._player.seconds if self._player else 0.0

    async def generate(self, job: inference.Generate) -> inference.Generated:
        made = await trio.to_thread.run_sync(self._begin, job)
        async with alongside(made.finished.keep_proving):
            try:
                await self._thread.run(self._drive, made.playing)
            finally:
                if not made.playing.is_over:
                    made.playing.error = RuntimeError("the call was cancelled")
        return await self._beside.run(self._complete, made)

    def _drive(self, playing: Playing) -> None:
        """Step the engine until a submission's completions are finished."""
        assert self._player is not None
        try:
            finish(self._player, playing, self._before_step)
        finally:
            with self._swapping:
                self._forget_ended()

    def _forget_ended(self) -> None:
        self._live = [made for made in self._live if not made.playing.is_over]

    def _before_step(self) -> None:
        """Swap to the policy offered last, if all submissions in the batch may."""
        checkpoint()
        if not self._offered:
            return
        offered = self._offered[0]
        with self._swapping:
            self._forget_ended()
            assert self._engine is not None
            held, given = self._policy, offered.policy
            later = held is not None and (held.lineage, held.step) < (given.lineage, given.step)
            swaps = self._engine.capabilities.in_flight and later
            if swaps and not all(made.may_swap(offered.policy) for made in self._live):
                return  # submissions that begin later may
            self._reading = offered.policy
            try:
                if self._take(offered) and swaps:
                    self._swap_to(offered)
            finally:
                self._reading = None

    def _take(self, offered: Load) -> bool:
        """Take an offer; False if another has replaced it meanwhile, which the next step takes."""
        try:
            self._offered.remove(offered)
        except (ValueError, IndexError):
            return False
        return True

    def _swap_to(self, offered: Load) -> None:
        """Load another policy for all submissions in the batch.

        If that fails, all are given up: weights are replaced in place."""
        try:
            self._load(offered)
        except Exception as error:
            for made in self._live:
                made.playing.error = error
            raise
        for made in self._live:
            made.policies.add(offered.policy.step)

    async def turns(self) -> inference.AskedTurns:
        """Not in the job thread, which is generating."""
        return await self._asked.take()

    async def give(self, job: inference.GiveTurn) -> None:
        """Not in the job thread, either."""
        made = next((each for each in self._live if each.order.seed() == job.seed), None)
        if made is None or self._player is None:
            return
        if job.unwanted:
            made.playing.error = UserError(job.unwanted)
        else:
            made.finished.turns.setdefault(job.row, []).append(job.signed)
            self._player.answer(made.playing, job.row, job.tokens)

    async def swap(self, job: inference.Swap) -> inference.Swapping:
        """Not in the job thread, which is generating."""
        self._offered.append(job.load)
        return inference.Swapping(reading=self._reading)

    def _begin(self, job: inference.Generate) -> Made:
        """Draw a submission's tasks, and put its completions into the batch."""
        order = job.order
        self._check_policy(order)
        assert self._player is not None
        renderer = self._renderer = Renderer.current(self._folder, self._renderer)
        positions = ModelFacts.read(self._folder).max_position_embeddings
        room = PromptRoom.of_policy(renderer, positions, order.sampling.max_new_tokens)
        with self._player.environments_turn():
            local = self._environments.tasks(order, room)
        groups = self._with_served(job, local)
        path = Path(job.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._swapping:
            return self._join(job, path, groups, renderer)

    def _with_served(
        self, job: inference.Generate, local: Sequence[GroupTask | None]
    ) -> list[Work]:
        """The work of all groups, served ones too; raises `ValueError` for one without a prompt."""
        seed = job.order.seed()
        served = {
            each.group: ServedTask(each.tokens, each.last, self._asked.asking(seed))
            for each in job.prompts
        }
        missing = [n for n, task in enumerate(local) if task is None and n not in served]
        if missing:
            raise ValueError(f"group {missing[0]} of a served environment has no prompt")
        return [served[group] if task is None else _work(task) for group, task in enumerate(local)]

    def _check_policy(self, order: SubmissionOrder) -> None:
        """Raise `ValueError` unless a submission may begin with the loaded policy."""
        if self._player is None or not order.may_begin_with(self._policy):
            raise ValueError(
                f"{order.policy} is wanted, but {self._policy or 'no policy'} is loaded"
            )

    def _join(
        self, job: inference.Generate, path: Path, groups: Sequence[Work], renderer: Renderer
    ) -> Made:
        order = job.order
        self._check_policy(order)  # another may have been loaded since the first look
        assert self._player is not None and self._policy is not None
        sampling = order.sampling
        finished = FinishedRollouts()
        rows = range(order.rows())
        work = [groups[row // sampling.group_size] for row in rows]
        key = seeds.noise_key(order.seed())
        temperatures = [each for each in order.temperatures() for _ in range(sampling.group_size)]
        playing = Playing(renderer, work, rows, key, sampling, finished.add, temperatures)
        self._player.add(playing)
        prompts = {each.group: each.signed for each in job.prompts}
        made = Made(order, path, prompts, finished, playing, self._slots(), {self._policy.step})
        self._live.append(made)
        return made

    def _slots(self) -> int:
        assert self._engine is not None
        return self._engine.capabilities.slots or 0

    def _complete(self, made: Made) -> inference.Generated:
        """Build the last proofs, and write the file."""
        order, finished = made.order, made.finished
        assert self._policy is not None
        finished.prove()
        size = order.sampling.group_size
        environments = order.environments_of_groups()
        rollouts = Rollouts.from_rows(
            [
                Row(
                    group=row // size,
                    sample=row % size,
                    environment=environments[row // size],
                    rollout=finished.rollouts[row],
                    proof=finished.proofs[row],
                )
                for row in range(order.rows())
            ]
        )
        turns = made.turns() if made.prompts else None
        digest, size_bytes = write(made.path, rollouts, self._header(order), turns)
        slots_left = self._slots()
        return inference.Generated(
            digest=digest,
            size_bytes=size_bytes,
            tokens=len(rollouts.log_probabilities),
            groups=order.groups,
            slots_left=slots_left if slots_left < made.slots else 0,
            seconds_generate=made.playing.seconds,
            seconds_proofs=finished.seconds_proofs,
            policy=self._policy,
            policies=finished.policies(),
            seconds_load=self._seconds_loading,
        )

    def _header(self, order: SubmissionOrder) -> Header:
        assert self._engine is not None
        return Header(**order.header_fields(), engine=self._engine.capabilities.engine_class)


_SERVICE: type[inference.InferenceService] = EngineService


def sharing(hardware: Hardware) -> int:
    """Submissions that share the batch: 1 on a single CPU, 2 on all else.

    Completions of mixed lengths share each attention, which costs a CPU 8 to 10 % of its tokens
    per processor second. A GPU with a part of its batch empty is idle for that part, and several
    devices that share the layers wait for one another."""
    return 1 if find_device(hardware.device).type == "cpu" and not hardware.devices else 2


def _work(drawn: GroupTask) -> Work:
    if drawn.prefix:
        return ContinuedTask(drawn.task, drawn.prefix)
    return drawn.environment, drawn.task


def _altered(folder: Path, aside: Path, size: float) -> Path:
    """A copy of a model folder with Gaussian noise of relative `size` on every weight; with a size
    of 0, its matrices rounded to 8-bit integers, one scale per row."""
    generator = torch.Generator().manual_seed(0)
    weights = read_weights(folder, dtype=torch.float32)  # of adapters: as honest workers add them
    for name, stored in weights.items():
        weight = stored.float()
        if size:
            scale = size * float(weight.norm()) / math.sqrt(weight.numel())
            weight += torch.randn(weight.shape, generator=generator) * scale
        elif weight.dim() > 1:
            step = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
            weight = (weight / step).round() * step
        weights[name] = weight.to(stored.dtype)
    safetensors.torch.save_file(weights, aside / "model.safetensors")
    (aside / "config.json").write_bytes((folder / "config.json").read_bytes())
    return aside
