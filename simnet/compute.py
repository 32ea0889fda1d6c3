"""Cost models in place of child processes: they answer the roles' calls in virtual time.

A model replaces a service by its name, with the same jobs and replies. It reads and writes the
peer's simulated disk, charges virtual time by the peer's `Hardware`, and answers like the real
service. Submissions are small real files with real hashes, so that the roles exchange them as on a
real network. Lengths and rewards follow from the submission's seed, so that every reader of a file
finds the same.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import trio
from blake3 import blake3

from peers.validator.evidence import betting
from simnet.disk import PowerCut, SimulatedDisk
from simnet.extents import Symbol
from swarm.jobs import Load, SubmissionOrder, inference, training, validation
from swarm.jobs.memory import MemoryPart, MemoryPlan, shown
from swarm.messages import Check, CheckpointReference, Evidence, Thresholds
from swarm.rollouts.seeds import digest as digest_of
from swarm.shardcast.jobs import DeltaEncoded, DeltaService, EncodeDelta, MakePieces, PiecesMade
from swarm.world import Child, ChildDied, ChildError, Job, Setup, job_type, setup_type

TOKENIZER = b'{"simulated": "tokenizer"}'
WEIGHTS = "model.safetensors"
TOKENIZER_HASH = blake3(TOKENIZER).digest()
START_SECONDS = 3.0
"""Time to start a child."""
_LEADS_TO = " -> "
"""Separator of two contents' names in the name of the delta from the first to the second."""
PROBE_HASH = digest_of("simnet/1/probe")
"""The probe hash of every honest simulated machine."""


T = TypeVar("T")


@dataclass(frozen=True)
class Hardware:
    """Speeds and memory of a peer's machine."""

    tokens_per_second: float = 2000.0
    """Speed of generation, all sequences of a batch together."""
    proof_tokens_per_second: float = 200_000.0
    """Speed of building proofs."""
    prefill_tokens_per_second: float = 40_000.0
    load_bytes_per_second: float = 2e9
    delta_bytes_per_second: float = 1e9
    """Checkpoint bytes per second, when making or applying a delta."""
    step_seconds: float = 60.0
    """Duration of one rollout step of the trainer."""
    memory_bytes: int = 1 << 50
    """Memory free for children; by default more than enough."""
    grades: bool = True
    """False: the environment's reward function raises on this machine."""


@dataclass(frozen=True)
class Workload:
    """Lengths, rewards and sizes of a run's computations."""

    model_bytes: int = 2_000_000
    delta_share: float = 0.0
    """Size of the delta from one policy to the next, as a share of the checkpoint; 0: all weights
    change, and a delta saves nothing."""
    completion_tokens_mean: float = 256.0
    """Mean of the exponentially distributed lengths, which the manifest's limit cuts off."""
    target_lengths: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Target lengths from step s on: ((s, (tokens, ...)), ...), by ascending s. Lengths are then
    near one of these targets, as where prompts ask for a length."""
    reward_start: float = 0.2
    reward_gain: float = 0.02
    """Probability that a completion is right: `reward_start`, plus this much per policy."""


class SimulatedRollouts(msgspec.Struct, array_like=True):
    """Content of a simulated submission's file."""

    run: str
    lineage: int
    step: int
    policy: int
    worker: str
    number: int
    seed: bytes
    lengths: list[list[int]]
    """Completion lengths in tokens, [groups][G]."""
    invented: bool = False
    """Whether the policy did not generate it; only a prefill notices that."""
    edited: bool = False
    """Whether a few tokens were replaced; only the evidence of prefills notices that."""
    variant: int = 0
    """Which of several correct files: another machine's rounding gives other bytes."""


Fabricates = str | Callable[[SubmissionOrder], str]

EDITED_SHARE = 0.02
"""Share of the tokens that "edits" replace."""
EDIT_MARGIN = 0.5
"""How far behind the seed's token an edited one is: within the bound on a single token."""


@dataclass
class Setting:
    """A model's view of its peer."""

    disk: SimulatedDisk
    hardware: Hardware
    workload: Workload
    tell: Callable[..., None] = lambda _what, **_facts: None
    """Reports the model's true actions to the invariants: tell("trained", …)."""
    fabricates: Fabricates = ""
    """What an adversary's engine delivers, or a function that says it for each submission: rollouts
    of other "weights" or "prompts", "edits" of a few tokens, "garbage", or "poison", which kills an
    inspector. A validator's "approval" finds everything right, and its "refusal" nothing."""

    def fabricated(self, order: SubmissionOrder) -> str:
        """What is fabricated for a submission."""
        return self.fabricates if isinstance(self.fabricates, str) else self.fabricates(order)


def rollouts(setting: Setting, order: SubmissionOrder) -> SimulatedRollouts:
    """The honest submission of a worker and number."""
    seed = order.seed()
    chance = Random(seed)
    mean = setting.workload.completion_tokens_mean
    longest = order.sampling.max_new_tokens

    targets: Sequence[int] = ()
    for since, lengths in setting.workload.target_lengths:
        if order.step >= since:
            targets = lengths

    def length() -> int:
        if targets:
            return min(longest, max(1, int(chance.choice(targets) * chance.uniform(0.9, 1.1))))
        return min(longest, 1 + int(chance.expovariate(1 / mean)))

    return SimulatedRollouts(
        run=order.run,
        lineage=order.policy.lineage,
        step=order.step,
        policy=order.policy.step,
        worker=order.worker,
        number=order.number,
        seed=seed,
        lengths=[[length() for _ in range(order.sampling.group_size)] for _ in range(order.groups)],
    )


def true_rewards(workload: Workload, made: SimulatedRollouts) -> list[list[float]]:
    """Rewards of a submission's completions, [groups][G]."""
    skill = workload.reward_start + workload.reward_gain * made.policy
    chance = Random(digest_of("simnet/1/rewards", made.seed))
    return [[float(chance.random() < skill) for _ in group] for group in made.lengths]


async def read_rollouts(setting: Setting, path: str, wanted: bytes) -> SimulatedRollouts:
    """Read a submission's file; raises `OSError` unless its digest is `wanted`."""
    raw = await setting.disk.read(setting.disk.path_of(path))
    if raw.startswith(POISON):
        raise _Crash
    if blake3(raw).digest() != wanted:
        raise OSError("the file has changed since it arrived: its hash differs")
    return msgspec.msgpack.decode(raw, type=SimulatedRollouts)


POISON = b"a file that crashes its reader"


class _Crash(Exception):
    """An operation that kills the child."""


class EngineModel:
    """Cost model of `peers.inference.engine_service.EngineService`: submissions are generated one
    after the other, and the proofs and the file of one beside the next."""

    BESIDE: ClassVar[frozenset[str]] = frozenset({"generate", "usage"})
    """Methods that run while another one does."""

    def __init__(self, setting: Setting, setup: inference.InferenceSetup) -> None:
        self._setting = setting
        self._altered = bool(setup.alter_weights)
        self._policy: CheckpointReference | None = None
        self._turn = trio.Lock()
        """Held while a submission is generated."""
        self._seconds = 0.0
        """Time of the submissions generated so far."""
        self._since: float | None = None
        """When the submission that is being generated was begun."""

    async def usage(self, job: inference.AskUsage) -> inference.Usage:
        spent = 0.0 if self._since is None else trio.current_time() - self._since
        return inference.Usage(seconds_generating=self._seconds + spent)

    async def survey(self, job: inference.Survey) -> inference.Surveyed:
        return inference.Surveyed(
            engine="simulated",
            engine_version="",
            torch_version="",
            device="simulated",
            device_title=f"{self._setting.hardware.tokens_per_second:g} tokens/s",
            dtype="bfloat16",
            threads=1,
            free_bytes=self._setting.hardware.memory_bytes,
        )

    async def load(self, job: Load) -> inference.Loaded:
        disk, path = self._setting.disk, self._setting.disk.path_of(job.folder)
        size = sum(disk.size_bytes(f"{path}/{name}") for name in disk.list(path))
        seconds = size / self._setting.hardware.load_bytes_per_second
        await trio.sleep(seconds)
        self._policy = job.policy
        weights = disk.names_in(f"{path}/{WEIGHTS}")
        self._setting.tell("loaded", policy=job.policy.step, weights=weights)
        return inference.Loaded(seconds=seconds)

    async def probe(self, job: inference.Probe) -> inference.Probed:
        return inference.Probed(digest=PROBE_HASH)

    async def generate(self, job: inference.Generate) -> inference.Generated:
        order, fabricates = job.order, self._setting.fabricated(job.order)
        if order.policy != self._policy:
            raise ValueError(
                f"{order.policy} is wanted, but {self._policy or 'no policy'} is loaded"
            )
        made = rollouts(self._setting, order)
        made.invented = self._altered or fabricates == "weights"
        made.edited = fabricates == "edits"
        if fabricates == "prompts":
            made.seed = digest_of("simnet/1/liked better", made.seed)
        tokens = sum(map(sum, made.lengths))
        seconds = tokens / self._setting.hardware.tokens_per_second
        async with self._turn:
            self._since = trio.current_time()
            try:
                await trio.sleep(seconds)
            finally:
                self._seconds += trio.current_time() - self._since
                self._since = None
        building = tokens / self._setting.hardware.proof_tokens_per_second
        await trio.sleep(building)
        raw = msgspec.msgpack.encode(made)
        if fabricates == "garbage":
            raw = raw[: len(raw) // 2]
        if fabricates == "poison":
            raw = POISON + f" {order.step} {order.number}".encode()
        await self._setting.disk.write(self._setting.disk.path_of(job.path), raw)
        return inference.Generated(
            digest=blake3(raw).digest(),
            size_bytes=len(raw),
            tokens=tokens,
            groups=order.groups,
            finished_share=1.0,
            seconds_generate=seconds,
            seconds_proofs=building,
            seconds_write=0.0,
        )


class InspectorModel:
    """Cost model of `peers.validator.inspector.InspectorService`."""

    def __init__(self, setting: Setting, setup: validation.InspectionSetup) -> None:
        self._setting = setting

    async def inspect(self, job: validation.Inspect) -> validation.Inspected:
        try:
            found = await read_rollouts(self._setting, job.path, job.digest)
        except msgspec.MsgspecError as error:
            return _fault("schema", str(error))
        right = rollouts(self._setting, job.order)
        right.edited = found.edited
        right.invented = found.invented  # an inspector cannot see it in the file
        right.variant = found.variant
        if found != right:
            return _fault("header", "another submission", _exact("schema"))
        grades, order = self._setting.hardware.grades, job.order
        disk, canonical = self._setting.disk, msgspec.msgpack.encode(found)
        await disk.write(disk.path_of(job.canonical_path), canonical)
        return validation.Inspected(
            checks=[_exact("schema"), _exact("header")],
            ungraded="" if grades else "environment 'simulated' cannot grade",
            rewards=true_rewards(self._setting.workload, right) if grades else [],
            environments=order.environments_of_groups(),
            group_digests=[
                digest_of("simnet/1/group", found.seed, group.to_bytes(2, "big"))
                for group in range(order.groups)
            ],
            canonical_digest=blake3(canonical).digest(),
            canonical_bytes=len(canonical),
            tokens=sum(map(sum, found.lengths)),
        )


def _exact(name: str, faults: int = 0) -> Check:
    """An exact check, which allows no fault."""
    return Check(name=name, figure=faults, threshold=0, passed=faults == 0)


def _fault(check: str, detail: str, *passed: Check) -> validation.Inspected:
    return validation.Inspected(
        checks=[*passed, _exact(check, 1)], failed=check, detail=detail, proven_fault=True
    )


class PrefillModel:
    """Cost model of `peers.validator.prefill.PrefillService`."""

    def __init__(self, setting: Setting, setup: validation.PrefillSetup) -> None:
        self._setting = setting
        self._kept = setup.policies_kept
        self._policies: list[CheckpointReference] = []

    async def load(self, job: Load) -> validation.PoliciesLoaded:
        size = self._setting.workload.model_bytes
        await trio.sleep(size / self._setting.hardware.load_bytes_per_second)
        self._policies = [*(held for held in self._policies if held != job.policy), job.policy]
        self._policies = self._policies[-self._kept :]
        return validation.PoliciesLoaded(policies=list(self._policies))

    async def judge(self, job: validation.Judge) -> validation.Judged:
        if job.order.policy not in self._policies:
            raise ValueError(f"{job.order.policy} is not loaded")
        found = await read_rollouts(self._setting, job.path, job.digest)
        tokens = sum(map(sum, found.lengths))
        await trio.sleep(tokens / self._setting.hardware.prefill_tokens_per_second)
        least = job.thresholds.proof_exponents_min
        says = self._setting.fabricated(job.order)
        invented = says == "refusal" or (found.invented and says != "approval")
        edited = round(EDITED_SHARE * tokens) if found.edited and says != "approval" else 0
        figure = 0 if invented else 128
        passed = figure >= least
        return validation.Judged(
            checks=[Check(name="proofs", figure=figure, threshold=least, passed=passed)],
            failed="" if passed else "proofs",
            detail="" if passed else "the proofs are of another model",
            proofs=validation.ProofFigures(
                chunks=1,
                chunks_passed=int(passed),
                exponents_min=figure,
                exponents_mean=figure,
                mantissa_mean_max=0.0,
                error_mean=0.0 if passed else 1.0,
            ),
            sampling=validation.SamplingFigures(
                tokens=tokens,
                mismatches=tokens if invented else edited,
                margin_mean=float(invented) or edited * EDIT_MARGIN / tokens,
                margin_max=float(invented) or EDIT_MARGIN * found.edited,
            ),
            evidence=_evidence(tokens, invented, edited, job.thresholds),
        )


def _evidence(tokens: int, invented: bool, edited: int, thresholds: Thresholds) -> Evidence:
    """The bets on the margins and proofs of a submission; no honest token has a margin here."""
    margins = np.zeros(tokens)
    margins[: tokens if invented else edited] = 1.0 if invented else EDIT_MARGIN
    return Evidence(
        tokens=tokens,
        mismatches=tokens if invented else edited,
        sampler=betting.gains(margins, thresholds.honest_margin),
        policy=betting.gains(np.full(1, float(invented)), thresholds.honest_proof_error),
        text=[0],
        selection=[0],
    )


class TrainerModel:
    """Cost model of `peers.trainer.service.TrainerService`."""

    BESIDE: ClassVar[frozenset[str]] = frozenset({"finish_save", "record"})
    """Methods that run while another one does; all others take turns."""

    def __init__(self, setting: Setting, setup: training.TrainingSetup) -> None:
        self._setting = setting
        self._disk = setting.disk
        self._step = 0
        self._consumed: list[str] = []
        self._name = ""
        self._saving: tuple[training.BeginSave, int, list[str]] | None = None

    async def plan(self, job: training.PlanTraining) -> MemoryPlan:
        """Weights in 16 bits have 16 bytes per parameter in a trainer."""
        needed, limit = 8 * self._bytes(), self._setting.hardware.memory_bytes
        return MemoryPlan(
            parameters=self._bytes() // 2,
            ranks=1,
            tokens=0,
            parts=[MemoryPart(name="training", memory="host", phase="always", bytes=needed)],
            host_bytes=needed,
            host_limit=limit,
            problem=f"the trainer needs {shown(needed)}" if needed > limit else "",
        )

    async def start(self, job: training.StartTraining) -> training.Done:
        await trio.sleep(self._bytes() / self._setting.hardware.load_bytes_per_second)
        self._name = f"{job.model} {job.seed}"
        self._lessons = job.lessons
        return training.Done()

    async def follow(self, job: training.Follow) -> training.Done:
        self._lessons = job.lessons
        return training.Done()

    async def resume(self, job: training.Resume) -> training.Resumed:
        await self.start(job.start)
        self._step, self._consumed = await self._state(job.folder)
        return training.Resumed(
            step=self._step, consumed=[bytes.fromhex(digest) for digest in self._consumed]
        )

    async def train(self, job: training.TrainStep) -> training.Trained:
        step = job.step
        if step != self._step:
            raise ValueError(f"step {step} was asked for, but the learner is at step {self._step}")
        read: list[SimulatedRollouts] = []
        unreadable: list[training.Unreadable] = []
        for index, each in enumerate(job.submissions):
            try:
                read.append(await read_rollouts(self._setting, each.path, each.rollouts_digest))
            except PowerCut:
                raise
            except OSError as error:
                unreadable.append(training.Unreadable(index=index, reason=str(error)))
        if unreadable:
            return training.Trained(unreadable=unreadable)
        self._setting.tell(
            "trained",
            step=step,
            learning_rate=self._lessons.optimiser.learning_rate,
            steps=self._lessons.schedule.steps,
            rollouts=[
                (each.digest, each.rewards, found)
                for each, found in zip(job.submissions, read, strict=True)
            ],
        )
        await trio.sleep(self._setting.hardware.step_seconds)
        self._step += 1
        self._consumed += [submission.digest.hex() for submission in job.submissions]
        groups = [group for submission in job.submissions for group in submission.rewards]
        rewards = [reward for group in groups for reward in group]
        return training.Trained(
            figures={
                "groups": float(len(groups)),
                "reward": sum(rewards) / max(1, len(rewards)),
                "train_seconds": self._setting.hardware.step_seconds,
            },
            outcomes=[
                [
                    "consumed" if len(set(group)) > 1 else "zero-advantage"
                    for group in submission.rewards
                ]
                for submission in job.submissions
            ],
        )

    async def roll_back(self, job: training.RollBack) -> training.Done:
        self._step, _ = await self._state(job.folder)
        return training.Done()

    async def record_to(self, job: training.RecordTo) -> training.Recording:
        return training.Recording(ranks=1)

    async def record(self, job: training.Record) -> training.Done:
        return training.Done()

    async def begin_save(self, job: training.BeginSave) -> training.Done:
        self._saving = (job, self._step, list(self._consumed))
        return training.Done()

    async def finish_save(self, job: training.FinishSave) -> training.Done:
        """Writes only now: the role calls it at once, beside the next step's training."""
        if self._saving is None:
            return training.Done()
        (job_before, step, consumed), self._saving = self._saving, None
        if job_before.state:
            path = f"{self._disk.path_of(job_before.state)}/state"
            await self._disk.write(path, msgspec.msgpack.encode((step, consumed)))
            self._setting.tell("saved", step=step, consumed=consumed)
        if job_before.policy:
            await self._export(job_before.policy, step, consumed)
        return training.Done()

    async def export(self, job: training.Export) -> training.Done:
        await self._export(job.folder, self._step, self._consumed)
        return training.Done()

    async def compare(self, job: training.Compare) -> training.Compared:
        path = f"{self._disk.path_of(job.folder)}/{WEIGHTS}"
        symbol = self._weights(self._step, self._consumed)
        held = self._disk.digest_now(path, 0, symbol.size_bytes)
        return training.Compared(same=held == symbol.digest())

    def _weights(self, step: int, consumed: list[str]) -> Symbol:
        learnt_from = blake3(msgspec.msgpack.encode(consumed)).hexdigest()[:16]
        return Symbol(f"policy {step} of {self._name} from {learnt_from}", 0, self._bytes())

    async def _export(self, folder: str, step: int, consumed: list[str]) -> None:
        path = self._disk.path_of(folder)
        await trio.sleep(self._bytes() / self._disk.bytes_per_second)
        weights = self._weights(step, consumed)
        self._setting.tell("exported", step=step, weights=weights.name)
        self._disk.put(f"{path}/{WEIGHTS}", 0, weights)
        await self._disk.write(f"{path}/tokenizer.json", TOKENIZER)
        await self._disk.sync(path)

    async def end(self, job: training.EndTraining) -> training.Done:
        return training.Done()

    async def evaluate(self, job: training.Evaluate) -> training.Evaluated:
        return training.Evaluated(sampled=self._skill(), greedy=self._skill())

    async def prepare_base(self, job: training.PrepareBase) -> training.BasePrepared:
        return training.BasePrepared(sft_steps=0, sampled=self._skill(), greedy=self._skill())

    def _skill(self) -> float:
        work = self._setting.workload
        return min(1.0, work.reward_start + work.reward_gain * self._step)

    async def _state(self, folder: str) -> tuple[int, list[str]]:
        raw = await self._disk.read(f"{self._disk.path_of(folder)}/state")
        return msgspec.msgpack.decode(raw, type=tuple[int, list[str]])

    def _bytes(self) -> int:
        return self._setting.workload.model_bytes


class DeltaModel:
    """Cost model of `swarm.shardcast.delta.DeltaService`, for weights. A delta is a symbol, too:
    its name gives its source and its result."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._disk = setting.disk

    async def encode(self, job: EncodeDelta) -> DeltaEncoded:
        old, weights = self._weights(job.base), self._weights(job.new)
        await self._work(weights.size_bytes)
        size = int(weights.size_bytes * self._setting.workload.delta_share)
        words = weights.size_bytes // 2
        if not 0 < size <= job.limit_bytes:
            return DeltaEncoded(size_bytes=0, changed_words=words, words=words)
        delta = Symbol(f"{old.name}{_LEADS_TO}{weights.name}", 0, size)
        self._disk.put(self._disk.path_of(job.out), 0, delta)
        return DeltaEncoded(size_bytes=size, changed_words=size // 4, words=words)

    async def make(self, job: MakePieces) -> PiecesMade:
        name = self._weights(job.base).name
        for delta in job.deltas:
            content = self._whole(self._disk.path_of(delta))
            old, _, new = content.name.partition(_LEADS_TO)
            if old != name:
                raise ValueError(f"{delta} changes something else than its base")
            name = new
        made = []
        for piece in job.pieces:
            content = Symbol(name, piece.offset, piece.size_bytes)
            await self._work(piece.size_bytes)
            if piece.name == WEIGHTS and content.digest() == piece.digest:
                path = f"{self._disk.path_of(job.target)}/{piece.name}"
                self._disk.put(path, piece.offset, content)
                made.append(piece.index)
        return PiecesMade(made=made)

    def _weights(self, folder: str) -> Symbol:
        return self._whole(f"{self._disk.path_of(folder)}/{WEIGHTS}")

    def _whole(self, path: str) -> Symbol:
        content = self._disk.symbol(path, 0, self._disk.size_bytes(path))
        if content is None:
            raise ValueError(f"{path} is not whole")
        return content

    async def _work(self, size_bytes: int) -> None:
        await trio.sleep(size_bytes / self._setting.hardware.delta_bytes_per_second)


ENGINE: type[inference.InferenceService] = EngineModel  # a type error where a model lacks a method
INSPECTOR: type[validation.InspectionService] = InspectorModel
PREFILL: type[validation.PrefillService] = PrefillModel
TRAINER: type[training.TrainingService] = TrainerModel
DELTAS: type[DeltaService] = DeltaModel
MODELS: dict[str, Callable[..., Any]] = {
    "swarm.shardcast.delta:DeltaService": DELTAS,
    "peers.inference.engine_service:EngineService": ENGINE,
    "peers.validator.inspector:InspectorService": INSPECTOR,
    "peers.validator.prefill:PrefillService": PREFILL,
    "peers.trainer.service:open_service": TRAINER,
}


_END = object()
"""Follows the last item of a stream."""


def _over_the_pipe(value: Any, kind: type[T]) -> T:
    """What the other side of a real child's pipe would decode."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)


class SimulatedChild:
    """A cost model behind `swarm.world.Child`."""

    def __init__(self, name: str, model: Any, disk: SimulatedDisk) -> None:
        self.name = name
        self._model = model
        self._machine = disk
        self._busy = trio.Lock()
        self._calls: dict[trio.CancelScope, None] = {}
        """Running calls: one, and any of the model's `BESIDE`."""
        self._died = ""
        """How the child died; empty while it lives."""

    async def request(self, method: str, job: Job, reply: type[T]) -> T:
        work = getattr(self._model, method)
        given = _over_the_pipe(job, job_type(work))
        return _over_the_pipe(await self._answer(method, job, partial(work, given)), reply)

    @asynccontextmanager
    async def stream(self, method: str, job: Job, item: type[T]) -> AsyncIterator[AsyncIterator[T]]:
        work = getattr(self._model, method)
        parts = work(_over_the_pipe(job, job_type(work)))

        async def items() -> AsyncGenerator[T, None]:
            next_part = partial(anext, parts, _END)
            while (part := await self._answer(method, job, next_part)) is not _END:
                yield _over_the_pipe(part, item)

        async with aclosing(parts), aclosing(items()) as found:
            yield found

    async def _answer(self, method: str, job: Job, work: Callable[[], Awaitable[Any]]) -> Any:
        beside = method in getattr(self._model, "BESIDE", ())
        async with nullcontext() if beside else self._busy:
            if self._died:
                raise ChildDied(f"{self.name} {self._died}", self.name, between_calls=True)
            with trio.CancelScope() as scope:
                self._calls[scope] = None
                try:
                    await self._machine_answers(method, job.patience_seconds)
                    result = await work()  # always makes progress
                    await self._machine_answers(method, job.patience_seconds)
                except PowerCut:
                    raise
                except _Crash:
                    self.die()
                    await trio.sleep_forever()
                except (ValueError, OSError) as error:
                    raise ChildError(str(error), type(error).__name__) from error
                finally:
                    self._calls.pop(scope, None)
                return result
            raise ChildDied(f"{self.name} {self._died}", self.name)

    async def _machine_answers(self, method: str, patience_seconds: float) -> None:
        with trio.move_on_after(patience_seconds):
            await self._machine.answering()
            return
        self._died = f"made no progress on {method} within {patience_seconds:g} s"
        raise ChildDied(f"{self.name} {self._died}", self.name)

    def die(self) -> None:
        """Die at once, during a call or between calls."""
        self._died = "was killed"
        for scope in tuple(self._calls):
            scope.cancel()


class SimulatedCompute:
    """Implements `swarm.world.Compute` with `MODELS`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.children: dict[str, SimulatedChild] = {}
        """Running children, by name."""

    def free_memory_bytes(self) -> int:
        return self._setting.hardware.memory_bytes

    @asynccontextmanager
    async def child(
        self,
        service: str,
        setup: Setup | None = None,
        *,
        name: str,
        memory_limit_bytes: int | None = None,
        start_deadline_seconds: float = 60.0,
        interpreter: str | None = None,
    ) -> AsyncIterator[Child]:
        if service not in MODELS:
            raise ChildDied(f"{name}: there is no cost model of {service} in this simulation", name)
        await trio.sleep(START_SECONDS)
        kind = setup_type(MODELS[service])
        setups = [] if kind is None else [_over_the_pipe(setup, kind)]
        model = MODELS[service](self._setting, *setups)
        child = self.children[name] = SimulatedChild(name, model, self._setting.disk)
        try:
            yield child
        finally:
            del self.children[name]
