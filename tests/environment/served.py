"""A served environment in a package of its own, and an environment peer without a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio

from peers.engines.service import EngineService
from peers.environment.service import EnvironmentPeerService
from swarm.jobs import SubmissionOrder
from swarm.jobs.environment import DrawPrompt, PlayTurn
from swarm.jobs.inference import AskedTurn, Generate, Generated, GiveTurn, SignedPrompt
from swarm.wire.envelope import seal
from swarm.wire.identity import Identity
from swarm.wire.manifest import EnvironmentReference
from swarm.wire.turns import Turn, pack, tokens_digest, unpack

PACKAGE = '''
from peers.environments import Episodes, Generated, Task


class Echo(Episodes):
    """Asks for six sorted digits, and answers two turns with the first digit of the prompt."""

    name = "echo"
    version = "1"
    safe_for_strangers = True

    def tasks(self):
        return Generated(self.make)

    def make(self, randomness):
        digits = f"{int.from_bytes(randomness[:4], 'big') % 10**6:06d}"
        return Task(prompt=digits + ">", answer="".join(sorted(digits)))

    def start(self, task):
        return {"task": task, "turns": 0}

    def step(self, state, text):
        state["turns"] += 1
        return state["task"].prompt[0] + ">" if state["turns"] < 3 else None

    def grade(self, task, transcript):
        return float(transcript.turns[0].text == task.answer)


class Sorting(Episodes):
    """Sorting six digits, with a turn that says nothing new."""

    name = "served-sorting"
    version = "1"
    safe_for_strangers = True

    def tasks(self):
        from peers.environments.sort_digits import SortDigits

        return SortDigits().tasks()

    def start(self, task):
        return None

    def step(self, state, text):
        return None

    def grade(self, task, transcript):
        return float(transcript.finished and transcript.text == task.answer)
'''

ENTRY_POINTS = """
[swarm.environments]
echo = served_package:Echo
served-sorting = served_package:Sorting
"""

ECHO = EnvironmentReference(name="echo", version="1", where="served")
SORTING = EnvironmentReference(name="served-sorting", version="1", where="served")


def install(site: Path) -> Path:
    """Write the package into a folder for a search path."""
    info = site / "served_package-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: served-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "served_package.py").write_text(PACKAGE)
    return site


@dataclass
class LonePeer:
    """The turns that an environment peer would sign, made in this process."""

    service: EnvironmentPeerService
    identity: Identity = field(default_factory=lambda: Identity(bytes([9]) * 32))

    def sign(self, order: SubmissionOrder, turn: Turn) -> bytes:
        return seal(
            self.identity, turn, run=order.run, sequence=1, wall_time=1e9, lifetime_seconds=60
        ).raw

    def prompt(self, order: SubmissionOrder, group: int) -> tuple[bytes, Turn]:
        drawn = trio.run(self.service.draw, DrawPrompt(order=order, group=group))
        turn = Turn(
            seed=order.seed(),
            group=group,
            sample=0,
            index=0,
            before=tokens_digest(()),
            tokens=pack(drawn.tokens),
            last=drawn.last,
        )
        return self.sign(order, turn), turn

    async def answer(
        self, order: SubmissionOrder, row: int, segments: Sequence[Sequence[int]]
    ) -> tuple[bytes, list[int]]:
        size = order.sampling.group_size
        job = PlayTurn(
            order=order,
            group=row // size,
            sample=row % size,
            segments=[list(segment) for segment in segments],
        )
        played = await self.service.play(job)
        assert not played.differs
        turn = Turn(
            seed=order.seed(),
            group=row // size,
            sample=row % size,
            index=len(segments) // 2,
            before=tokens_digest(token for segment in segments for token in segment),
            tokens=pack(played.tokens),
        )
        return self.sign(order, turn), played.tokens


async def job_of(peer: LonePeer, order: SubmissionOrder, path: Path) -> Generate:
    """What a worker asks of its engine, whose environments are all `peer`'s."""
    prompts = []
    for group in range(order.groups):
        signed, turn = await trio.to_thread.run_sync(peer.prompt, order, group)
        prompts.append(
            SignedPrompt(group=group, tokens=unpack(turn.tokens), last=turn.last, signed=signed)
        )
    return Generate(order=order, path=str(path), prompts=prompts)


async def answer(
    engine: EngineService, peer: LonePeer, order: SubmissionOrder, asked: AskedTurn
) -> None:
    """Give the engine a turn that an episode waits for."""
    given = GiveTurn(seed=asked.seed, row=asked.row)
    try:
        signed, tokens = await peer.answer(order, asked.row, asked.segments)
    except Exception as error:  # the engine's thread would wait for ever
        await engine.give(msgspec.structs.replace(given, unwanted=str(error)))
        raise
    await engine.give(msgspec.structs.replace(given, tokens=tokens, signed=signed))


async def generate(
    engine: EngineService, peer: LonePeer, order: SubmissionOrder, path: Path
) -> Generated:
    """Generate a submission as a worker does."""
    job = await job_of(peer, order, path)

    async def answer_all() -> None:
        while True:
            for asked in (await engine.turns()).turns:
                await answer(engine, peer, order, asked)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_all)
        made = await engine.generate(job)
        nursery.cancel_scope.cancel()
    return made


def without(order: SubmissionOrder, reference: EnvironmentReference) -> SubmissionOrder:
    """An order of this environment alone."""
    return msgspec.structs.replace(order, environments=[reference])
