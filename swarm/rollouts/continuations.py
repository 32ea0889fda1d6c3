"""Continuations: rollouts that begin within another one, and so estimate the value of that state.

A state is a task and the first tokens of a completion (VinePPO, arXiv 2410.01679). The step's order
names a blob of states, and determines which groups of a submission continue which."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.errors import DECODE_ERRORS
from swarm.rollouts.rollout import Rollout, Segment, Span
from swarm.rollouts.seeds import digest
from swarm.wire.messages import ENVIRONMENTS_MAX, Count, Digest

STATES_MAX = 4096
"""Most states of one step."""

STATES_BYTES_MAX = 8 << 20
"""Size of the largest blob of states: 4096 prefixes of 400 tokens and more."""

TOKEN_ID_MAX = 2**31 - 1


class BadStates(ValueError):
    """A blob of states that breaks a bound; the message says which."""


class State(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The state of one rollout after its first tokens."""

    submission: Digest
    row: Annotated[int, Meta(ge=0, le=2**24)]
    """Index of the rollout in it."""
    group: Annotated[int, Meta(ge=0, le=4095)]
    """Index of the rollout's group in it."""
    seed: Digest
    """The submission's seed, which with the group determines the task."""
    step: Count
    """The submission's step."""
    environment: Annotated[int, Meta(ge=0, lt=ENVIRONMENTS_MAX)]
    """Index of the group's environment among the run's."""
    prefix: Annotated[
        list[Annotated[int, Meta(ge=0, le=TOKEN_ID_MAX)]], Meta(min_length=1, max_length=1 << 20)
    ]
    """The rollout's first model tokens, without a stop token."""


class Continued(msgspec.Struct, array_like=True, frozen=True):
    """A group of a submission whose completions continue a state."""

    group: int
    index: int
    """Index of the state in the step's blob."""
    state: State


_States = Annotated[list[State], Meta(min_length=1, max_length=STATES_MAX)]
_decoder = msgspec.msgpack.Decoder(_States)


def encode_states(states: Sequence[State]) -> bytes:
    """The blob of a step's states."""
    return msgspec.msgpack.encode(list(states))


def decode_states(raw: bytes, prefix_max: int) -> list[State]:
    """Decode a blob whose prefixes have at most `prefix_max` tokens; raises `BadStates`."""
    if len(raw) > STATES_BYTES_MAX:
        raise BadStates(f"{len(raw)} bytes of states are more than {STATES_BYTES_MAX}")
    try:
        states = _decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise BadStates(f"these bytes are no states ({error})") from error
    longest = max(len(state.prefix) for state in states)
    if longest > prefix_max:
        raise BadStates(f"a state has {longest} tokens; the longest may have {prefix_max}")
    return states


def whole(rollout: Rollout, prefix: int) -> Rollout:
    """The rollout of which `rollout` is the continuation, for its environment to grade.

    The prompt's last `prefix` tokens become the segment's first. It has no log-probabilities."""
    if not prefix:
        return rollout
    prompt, model, *rest = rollout.segments
    tokens = [*prompt.tokens[-prefix:], *model.tokens]
    span = Span(model.spans[0].policy, len(tokens))
    joined = Segment("model", tokens, model.finish, spans=(span,))
    return Rollout((Segment("prompt", prompt.tokens[:-prefix]), joined, *rest))


def states_of_groups(
    nonce: bytes, worker: str, first: int, groups: int, share: float, states: int
) -> list[int | None]:
    """[groups] Index of the state that each group continues; None: it begins a task of its own.

    `nonce` is the worker's nonce, `first` the number of groups before these in the worker's earlier
    submissions of the step. The worker's k-th continued group, of the `share` of all its groups,
    continues the k-th state, counted from one that the nonce determines: a worker that makes fewer
    groups than there are states repeats none."""
    drawn = digest("swarm/1/continuations", nonce, worker.encode())
    offset = int.from_bytes(drawn[:8], "big")
    found: list[int | None] = []
    for group in range(first, first + groups):
        before = int(group * share)
        found.append((offset + before) % states if int((group + 1) * share) > before else None)
    return found


def continued_groups(
    states: Sequence[State], share: float, nonce: bytes, worker: str, number: int, groups: int
) -> list[Continued]:
    """The groups of a worker's submission `number`, of so many groups, that continue a state."""
    if not states:
        return []
    drawn = states_of_groups(nonce, worker, number * groups, groups, share, len(states))
    return [
        Continued(group, index, states[index])
        for group, index in enumerate(drawn)
        if index is not None
    ]
