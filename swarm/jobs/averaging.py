"""The service that averages pseudo-gradients by another library, in a child process under a Python
of its own (`peers.outer.backends`). An *update* is the file of a trainer's contribution, a *state*
that of an outer state. Swarm computes both, and takes the outer step."""

from typing import Annotated, ClassVar, Protocol

import msgspec
from msgspec import Meta

from swarm.wire.messages import Count
from swarm.world import Job, Setup

PATIENCE_SECONDS = 1800.0
"""Silence after which an exchange is given up; the child reports progress while it waits."""


class AveragingSetup(Setup, frozen=True, kw_only=True):
    run: str
    """Name of the training, the same for all its trainers."""
    shapes: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    """Of an update's tensors, in order."""
    state_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of a state's file."""
    join: tuple[str, ...] = ()
    """Multiaddresses of other trainers; empty: this one is the first."""
    host: str = "127.0.0.1"
    """Address of this machine at which the other trainers reach it."""
    port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    """Port to listen on; 0: the system chooses."""
    trainers: Annotated[int, Meta(ge=1)] = 2
    """Trainers that usually take part. An exchange begins as soon as that many have come."""
    seed: bytes = bytes(32)
    """Of this trainer's Ed25519 key."""
    members: tuple[str, ...] = ()
    """Peer ids of all trainers, this one among them; no other is answered."""
    wait_seconds: Annotated[float, Meta(gt=0)] = 60.0
    """Time to wait for the other trainers before a round goes on without them."""


class Meet(Job, frozen=True, kw_only=True):
    """Wait for the other trainers, and take their state if they are further."""

    patience_seconds: ClassVar[float] = PATIENCE_SECONDS

    round: Annotated[int, Meta(ge=0)]
    """The last round that this trainer has completed."""
    state: str
    """The file of its state."""
    received: str
    """File to write another trainer's state to."""
    average: str
    """File to write an average to, as an update, if the others end a round meanwhile."""


class AverageRound(Job, frozen=True, kw_only=True):
    """Average the updates of a round among the trainers that take part in it."""

    patience_seconds: ClassVar[float] = PATIENCE_SECONDS

    round: Annotated[int, Meta(ge=1)]
    tokens: Annotated[int, Meta(ge=1)]
    """The weight of this trainer's update."""
    update: str
    state: str
    """The file of the state that the round began from, for trainers that come later."""
    average: str
    """File to write the average to."""
    received: str
    """As `Meet.received`."""


class Exchanged(msgspec.Struct, frozen=True, kw_only=True):
    """What came of `Meet` or `AverageRound`. The state after `round` follows from the received
    state, or else its own, by a step along the average, if there is one."""

    round: Annotated[int, Meta(ge=0)]
    trainers: Annotated[int, Meta(ge=1)] = 1
    """Trainers whose updates the average holds; 1: this one was alone."""
    tokens: Count = 0
    """Sum of their tokens, as far as known."""
    averaged: bool = False
    received: bool = False
    attempts: Annotated[int, Meta(ge=1)] = 1
    """How often the averaging was begun; another trainer failed in all but the last."""
    bytes_sent: Count = 0
    bytes_received: Count = 0
    """Of updates and states, since the child's start, without what TLS and TCP add."""


class AveragingService(Protocol):
    """One trainer's part in the network of a library. Jobs one at a time."""

    async def open(self) -> list[str]:
        """What other trainers name to join this one; empty: they join elsewhere. The first call."""

    async def meet(self, job: Meet) -> Exchanged:
        """Raises `UserError` if the network cannot be reached."""

    async def average(self, job: AverageRound) -> Exchanged:
        """Raises `UserError` if the network cannot be reached any more."""

    async def end(self) -> None:
        """Leave the network."""
