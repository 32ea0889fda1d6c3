"""Cost model of the engine."""

from collections.abc import Callable
from typing import ClassVar

import msgspec
import trio
from blake3 import blake3

from simnet.compute.environment import model_segments
from simnet.compute.rollouts import POISON, SimulatedRollouts, rollouts
from simnet.compute.setting import PROBE_HASH, WEIGHTS, Setting
from swarm.errors import UserError
from swarm.jobs import Load, SubmissionOrder, inference
from swarm.rollouts.seeds import digest as digest_of
from swarm.rollouts.signed_turns import has_room
from swarm.wire.messages import CheckpointReference

SLEEP_SECONDS = 20.0
"""Wall time of each program that sleeps, as long as the grader `code` allows by default."""
SWAP_CHANCES = 8
"""Moments in a submission at which the simulated engine swaps to a policy offered to it."""


class EngineModel:
    """Cost model of `peers.engines.service.EngineService`: submissions are generated one
    after the other, and the proofs and the file of one beside the next."""

    BESIDE: ClassVar[frozenset[str]] = frozenset({"generate", "usage", "swap", "turns", "give"})

    def __init__(self, setting: Setting, setup: inference.InferenceSetup) -> None:
        self._setting = setting
        self._altered = bool(setup.alter_weights)
        self._policy: CheckpointReference | None = None
        self._offered: Load | None = None
        self._turn = trio.Lock()
        self._seconds = 0.0
        """Time of the submissions generated so far."""
        self._asked: list[inference.AskedTurn] = []
        self._news = trio.Event()
        """Set when turns are asked for."""
        self._given: dict[tuple[bytes, int], Callable[[inference.GiveTurn], None]] = {}
        """Takes the turn of an episode that waits, by seed and row."""
        self._since: float | None = None
        """When the submission that is being generated was begun."""

    async def usage(self) -> float:
        spent = 0.0 if self._since is None else trio.current_time() - self._since
        return self._seconds + spent

    async def survey(self) -> inference.Surveyed:
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
        self._hold(job)
        return inference.Loaded(seconds=seconds)

    def _hold(self, job: Load) -> None:
        disk, path = self._setting.disk, self._setting.disk.path_of(job.folder)
        self._policy = job.policy
        weights = disk.names_in(f"{path}/{WEIGHTS}")
        self._setting.tell("loaded", policy=job.policy.step, weights=weights)

    async def turns(self) -> inference.AskedTurns:
        with trio.move_on_after(60.0):
            while not self._asked:
                await self._news.wait()
        asked, self._asked, self._news = self._asked, [], trio.Event()
        return inference.AskedTurns(turns=asked)

    async def give(self, job: inference.GiveTurn) -> None:
        take = self._given.pop((job.seed, job.row), None)
        if take is not None:
            take(job)

    async def _ask(self, seed: bytes, row: int, segments: list[list[int]]) -> inference.GiveTurn:
        given: list[inference.GiveTurn] = []
        came, since = trio.Event(), trio.current_time()

        def take(job: inference.GiveTurn) -> None:
            given.append(job)
            came.set()

        self._given[seed, row] = take
        self._asked.append(
            inference.AskedTurn(seed=seed, row=row, segments=[list(each) for each in segments])
        )
        self._news.set()
        await came.wait()
        self._setting.tell("turn_given", seconds=trio.current_time() - since)
        return given[0]

    async def _play(self, job: inference.Generate, made: SimulatedRollouts, seconds: float) -> None:
        """Play a submission's served episodes: the longest completion takes all `seconds`, the
        others go on while one waits. Raises `UserError` if nobody wants it any more."""
        size, seed = job.order.sampling.group_size, job.order.seed()
        prompts = {each.group: each for each in job.prompts}
        made.turns = [[] for _ in range(job.order.rows())]
        longest, limit = max(map(max, made.lengths)), job.order.sampling.max_new_tokens
        unwanted: list[str] = []

        async def play(group: int, sample: int, prompt: inference.SignedPrompt) -> None:
            row, length = group * size + sample, made.lengths[group][sample]
            if sample == 0:
                made.turns[row].append(prompt.signed)
            segments, turns = [prompt.tokens], self._setting.workload.turns
            for model in model_segments(length, turns, made.seed, row):
                await trio.sleep(seconds * length / longest / (turns + 1))
                segments.append(model)
                if prompt.last or not has_room(segments[1::2], limit):
                    return
                given = await self._ask(seed, row, segments)
                if given.unwanted:
                    unwanted.append(given.unwanted)
                    nursery.cancel_scope.cancel()
                    return
                made.turns[row].append(given.signed)
                segments.append(given.tokens)

        async with trio.open_nursery() as nursery:
            for group, prompt in prompts.items():
                for sample in range(size):
                    nursery.start_soon(play, group, sample, prompt)
        if unwanted:
            raise UserError(unwanted[0])

    async def swap(self, job: inference.Swap) -> inference.Swapping:
        self._offered = job.load
        return inference.Swapping()

    async def probe(self, job: inference.Probe) -> bytes:
        return PROBE_HASH

    async def generate(self, job: inference.Generate) -> inference.Generated:
        order, fabricates = job.order, self._setting.fabricated(job.order)
        if not order.may_begin_with(self._policy):
            raise ValueError(
                f"{order.policy} is wanted, but {self._policy or 'no policy'} is loaded"
            )
        if fabricates == "a failure":
            raise inference.TurnFailed("the tool's server is gone")
        made = rollouts(self._setting, order)
        made.invented = self._altered or fabricates in ("weights", "sleepers")
        made.sleeps_seconds = SLEEP_SECONDS if fabricates == "sleepers" else 0.0
        made.invented_row = 0 if fabricates == "row" else -1
        made.edited = fabricates == "edits"
        if fabricates == "prompts":
            made.seed = digest_of("simnet/1/liked better", made.seed)
        tokens = sum(map(sum, made.lengths))
        seconds = tokens / self._setting.hardware.tokens_per_second
        async with self._turn:
            self._since = trio.current_time()
            try:
                if job.prompts:
                    await self._play(job, made, seconds)
                else:
                    await self._generate(seconds, order, made)
            finally:
                self._seconds += trio.current_time() - self._since
                self._since = None
        building = tokens / self._setting.hardware.proof_tokens_per_second
        await trio.sleep(building)
        assert self._policy is not None
        if fabricates == "turns" and made.turns:
            made.turns[0], made.turns[1] = made.turns[1], made.turns[0]
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
            seconds_generate=seconds,
            seconds_proofs=building,
            policy=self._policy,
            policies=made.policies or [order.policy.step],
        )

    async def _generate(
        self, seconds: float, order: SubmissionOrder, made: SimulatedRollouts
    ) -> None:
        """Generate for some seconds; swap meanwhile to policies offered, if the order allows it."""
        assert self._policy is not None
        used = [self._policy.step]
        chances = SWAP_CHANCES if order.sampling.swaps_max else 1
        for _ in range(chances):
            await trio.sleep(seconds / chances)
            offered, self._offered = self._offered, None
            if offered is None or len(used) > order.sampling.swaps_max:
                continue
            if offered.policy.lineage == order.policy.lineage and offered.policy.step > used[-1]:
                self._hold(offered)
                used.append(offered.policy.step)
        if used != [order.policy.step]:
            made.policies = used
