"""What trainers of `swarm train` give each other at the end of a round, and the libraries for it.

An exchange turns this trainer's contribution into what its next outer state follows from: a base
and the contributions to merge into it. The merge, with Nesterov's step, is the same for all
(`swarm.jobs.outer.MergeRound`). With `shardcast` the contributions are those that a signed record
lists (`peers.outer`); another library gives one, the average."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from peers.outer.backends.installed import SERVICES, interpreter_for
from swarm.errors import UserError
from swarm.jobs.averaging import AverageRound, AveragingService, AveragingSetup, Exchanged, Meet
from swarm.jobs.outer import CheckState, Contributed, OuterService
from swarm.wire.identity import Identity, load_or_create
from swarm.world import client
from swarm.world.compute import LocalCompute
from swarm.world.disk import sync_path

STATE_FILE = "outer.safetensors"
CONTRIBUTION_FILE = "contribution.swouter"
"""Names of the files in the folders of a state and of a contribution."""


@dataclass(frozen=True)
class ToMerge:
    """The way to this trainer's next outer state."""

    round: int
    """The round that the state completes."""
    base: str
    """Folder of the state that the step is taken from."""
    given: list[Contributed]
    """Contributions to merge; none: the base is the state already."""
    figures: dict[str, Any] = field(default_factory=dict)
    """For the event of the round."""


class Alone:
    """The exchange of a training without other trainers, and what any exchange is.

    Folders are absolute paths on this machine."""

    async def meet(self, done: int, state: str) -> ToMerge | None:
        """Find the others after round `done`; what to begin from if they are further, else None."""
        return None

    async def exchange(self, round: int, state: str, own: Contributed) -> ToMerge:
        """Give this trainer's contribution of a round that began from `state`.

        Raises `UserError` if the network of the trainers cannot be reached any more."""
        return ToMerge(round=round, base=state, given=[own])

    async def end(self) -> None:
        """Leave the others."""


@dataclass(frozen=True)
class Averaging(Alone):
    """Trainers whose contributions another library averages, in a child."""

    service: AveragingService
    outer: OuterService
    folder: Path
    """Folder of the training, for the files that are exchanged."""
    say: Callable[[dict[str, Any]], None]

    async def meet(self, done: int, state: str) -> ToMerge | None:
        """See `Alone.meet`. Says where this trainer can be reached."""
        for address in await self.service.open():
            self.say({"event": "reachable", "at": address})
        found = await self.service.meet(
            Meet(
                round=done,
                state=str(Path(state) / STATE_FILE),
                received=self._file_in("received", STATE_FILE),
                average=self._file_in("averaged", CONTRIBUTION_FILE),
            )
        )
        merge = await self._to_merge(found, state, found.tokens)
        return merge if found.received or found.averaged else None

    async def exchange(self, round: int, state: str, own: Contributed) -> ToMerge:
        """See `Alone.exchange`."""
        found = await self.service.average(
            AverageRound(
                round=round,
                tokens=own.tokens,
                update=str(Path(own.folder) / CONTRIBUTION_FILE),
                state=str(Path(state) / STATE_FILE),
                average=self._file_in("averaged", CONTRIBUTION_FILE),
                received=self._file_in("received", STATE_FILE),
            )
        )
        return await self._to_merge(found, state, max(own.tokens, found.tokens))

    async def end(self) -> None:
        await self.service.end()

    async def _to_merge(self, found: Exchanged, state: str, tokens: int) -> ToMerge:
        given = []
        if found.received:
            state = await self._checked(found.round)
        if found.averaged:
            folder = str(self.folder / "averaged")
            given = [Contributed(trainer="average", folder=folder, tokens=max(1, tokens))]
        figures: dict[str, Any] = {"trainers": found.trainers, "received": found.received}
        figures |= {"bytes_sent": found.bytes_sent, "bytes_received": found.bytes_received}
        if found.attempts > 1:
            figures["attempts"] = found.attempts
        return ToMerge(round=found.round, base=state, given=given, figures=figures)

    async def _checked(self, round_: int) -> str:
        """The folder of a state that another trainer sent; raises `UserError` if it is unusable."""
        folder = self.folder / "received"
        problem = (await self.outer.check_state(CheckState(folder=str(folder)))).problem
        if problem:
            raise UserError(
                f"another trainer's state of round {round_} cannot be used ({problem}); all "
                "trainers need the same --model"
            )
        sync_path(folder / STATE_FILE)
        return str(folder)

    def _file_in(self, name: str, file: str) -> str:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return str(folder / file)


START_SECONDS = 300.0
"""Time for the child to import torch and to reach the others."""

RUN_CHARACTERS_MAX = 100


@dataclass(frozen=True)
class Library:
    """A library that averages, in a child that has it."""

    name: str
    interpreter: Path
    setup: AveragingSetup
    """Without the sizes, which follow from the model."""

    @asynccontextmanager
    async def connect(
        self, shapes: dict[str, tuple[int, ...]], state_bytes: int
    ) -> AsyncIterator[AveragingService]:
        """Begin to take part, with tensors of these shapes and states of this size; raises
        `UserError`."""
        async with LocalCompute().child(
            SERVICES[self.name],
            msgspec.structs.replace(self.setup, shapes=shapes, state_bytes=state_bytes),
            name=self.name,
            interpreter=str(self.interpreter),
            start_deadline_seconds=START_SECONDS,
        ) as child:
            yield client(AveragingService, child)


def identity_of(key: Identity, run: str, number: int) -> Identity:
    """The identity of a trainer, which all that have the training's key can work out."""
    return Identity(blake3(f"{run} {number}".encode(), key=key.seed).digest())


def open_backend(name: str, setup: AveragingSetup, home: Path, key: Path, number: int) -> Library:
    """The backend of a name, for the trainer of a number.

    `key`: the training's key file. Raises `UserError` if the backend is not installed, or an option
    is wrong."""
    interpreter = interpreter_for(name, home)
    if not setup.run.replace("-", "").replace("_", "").isalnum() or (
        len(setup.run) > RUN_CHARACTERS_MAX
    ):
        raise UserError(
            f"--name is {setup.run!r}; use at most {RUN_CHARACTERS_MAX} letters, digits, - and _"
        )
    for each in setup.join:
        if not each.startswith("/"):
            raise UserError(
                f"--join {each} is no address for {name}; give one like "
                "/ip4/10.0.0.1/tcp/31337/p2p/12D3KooW…, which another trainer prints"
            )
    secret = load_or_create(key)
    everyone = [identity_of(secret, setup.run, each + 1) for each in range(setup.trainers)]
    members = tuple(each.peer_id for each in everyone)
    for each in setup.join:
        if each.rpartition("/p2p/")[2] not in members:
            raise UserError(
                f"--join {each} is no trainer of this training; copy the --key-file from the "
                "others, and give their --name and --trainers"
            )
    own = everyone[number - 1].seed
    return Library(name, interpreter, msgspec.structs.replace(setup, seed=own, members=members))
