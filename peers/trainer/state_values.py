"""States of accepted rollouts: which ones workers continue, and the values that they get.

When a step is opened, its order names states of rollouts of the step before, which wait in the
pool. Groups of the new step continue them (`swarm.rollouts.continuations`); their mean rewards,
from accepted verdicts only, are the states' values. A rollout whose states have no value when its
batch is due keeps the advantage of its group. Imports no torch."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from peers.trainer.pool import Accepted
from peers.trainer.progress import Progress
from swarm.errors import PeerError
from swarm.jobs.training import StateValue
from swarm.node.run_node import RunNode
from swarm.rollouts.continuations import STATES_BYTES_MAX, State
from swarm.rollouts.rollouts import Rollouts
from swarm.wire.manifest import RunManifest, Values
from swarm.wire.messages import StepOrder, Verdict

FILES_READ_MAX = 32
"""Submissions that one step's states are chosen from, at most: each is read whole."""

TOKEN_BYTES_MAX, STATE_BYTES_MAX = 5, 128
"""Bytes of a prefix's token, and of the rest of a state."""


class _Measured(NamedTuple):
    """What one group of continuations says of a state."""

    submission: bytes
    """The submission that holds the continued rollout."""
    row: int
    position: int
    reward: float
    """Mean reward of the group."""


@dataclass(eq=False)
class StateValues:
    """Chooses states for orders, and gathers their values from verdicts."""

    peer: RunNode
    progress: Progress
    _ordered: dict[tuple[int, int], list[State]] = field(default_factory=dict)
    """States by the lineage and the step whose order names them."""
    _measured: dict[bytes, tuple[int, list[_Measured]]] = field(default_factory=dict)
    """By the submission that holds the continuations: its step, and what it says."""

    async def restore(self, orders: Sequence[StepOrder]) -> None:
        """Read the states of an earlier process's orders, as far as they are on this disk."""
        for order in orders[: self.peer.run.max_staleness + 2]:
            manifest = self.progress.versions.manifest_of(order.step)
            try:
                states = await self.peer.states.of(order, manifest)
            except PeerError:  # those rollouts keep their groups' advantages
                continue
            if states:
                self._ordered[(order.lineage, order.step)] = states

    async def choose(
        self, step: int, manifest: RunManifest, alike: Sequence[Accepted], groups: int
    ) -> tuple[bytes, int]:
        """Choose and publish states for the order of `step`, which wants so many groups of its own.

        Returns the blob's hash and size; nothing and 0 if no state can be continued. `alike`: the
        submissions whose rollouts may be continued, because `step` draws their tasks alike."""
        values = manifest.values
        if values.estimate != "continuations":
            return b"", 0
        count = min(values.states_max, round(groups * values.share / (1 - values.share)))
        states: list[State] = []
        size = 0
        for state in await self._candidates(alike, manifest):
            size += len(state.prefix) * TOKEN_BYTES_MAX + STATE_BYTES_MAX
            if len(states) == count or size > STATES_BYTES_MAX:
                break
            states.append(state)
        if not states:
            return b"", 0
        self._forget_before(step)
        self._ordered[(self.progress.lineage, step)] = states
        return await self.peer.states.publish(states)

    async def _candidates(
        self, alike: Sequence[Accepted], manifest: RunManifest
    ) -> Iterator[State]:
        """States of these rollouts not chosen before, in random order, a rollout's together."""
        random = self.peer.node.world.random
        waiting = [each for each in alike if len(each.verdict.seed) == 32]
        chosen = {(state.submission, state.row) for all in self._ordered.values() for state in all}
        random.shuffle(waiting)
        read: dict[bytes, Rollouts] = {}
        for accepted in waiting[:FILES_READ_MAX]:
            rollouts = await self._read(accepted)
            if rollouts is not None:
                read[accepted.digest] = rollouts
        rows = [
            (accepted, row)
            for accepted in waiting
            if accepted.digest in read
            for row in _rows(accepted, read[accepted.digest], manifest)
            if (accepted.digest, row) not in chosen
        ]
        random.shuffle(rows)
        return (
            state
            for accepted, row in rows
            for state in _states_in(accepted.verdict, read[accepted.digest], row, manifest.values)
        )

    async def _read(self, accepted: Accepted) -> Rollouts | None:
        try:
            return Rollouts.from_bytes(await self.peer.node.disk.read(accepted.path))
        except (OSError, ValueError):  # its step will say so
            return None

    def observe(self, verdict: Verdict) -> None:
        """Take the values that an accepted submission gives."""
        states = self._ordered.get((verdict.lineage, verdict.step), [])
        found = [
            _Measured(state.submission, state.row, len(state.prefix), fmean(rewards))
            for group, (rewards, index) in enumerate(
                zip(verdict.rewards, verdict.continued, strict=False)
            )
            if 0 <= index < len(states) and group not in verdict.quarantined
            for state in [states[index]]
        ]
        if found:
            self._measured[verdict.submission] = (verdict.step, found)

    def withdraw(self, submission: bytes) -> None:
        """Forget what a submission gave: a validator has refused it after all."""
        self._measured.pop(submission, None)

    def of(self, batch: Sequence[Accepted]) -> list[list[StateValue]]:
        """[submissions] Known values of a batch's states, by row and position; else empty."""
        wanted = {accepted.digest for accepted in batch}
        found: defaultdict[tuple[bytes, int, int], list[float]] = defaultdict(list)
        for _, measured in self._measured.values():
            for each in measured:
                if each.submission in wanted:
                    found[(each.submission, each.row, each.position)].append(each.reward)
        by_submission: defaultdict[bytes, list[StateValue]] = defaultdict(list)
        for (submission, row, position), rewards in sorted(found.items()):
            value = StateValue(row=row, position=position, value=fmean(sorted(rewards)))
            by_submission[submission].append(value)
        return [by_submission[accepted.digest] for accepted in batch] if found else []

    def _forget_before(self, step: int) -> None:
        """Forget the states of old steps: their rollouts are trained on or stale."""
        oldest = step - self.peer.run.max_staleness - 1
        lineage = self.progress.lineage
        self._ordered = {
            key: each for key, each in self._ordered.items() if key >= (lineage, oldest)
        }
        self._measured = {key: each for key, each in self._measured.items() if each[0] >= oldest}


def boundaries(tokens: Sequence[int], values: Values) -> list[int]:
    """Positions of the states within a completion, ascending: none at its beginning or end."""
    ends = set(values.boundary_ids)
    found: list[int] = []
    last = 0
    for position in range(1, len(tokens)):
        due = position - last >= values.segment_tokens
        if due and (not ends or tokens[position - 1] in ends):
            found.append(position)
            last = position
    return found


def _rows(accepted: Accepted, rollouts: Rollouts, manifest: RunManifest) -> Iterator[int]:
    """Rows of the groups that will be trained on, of local environments of a single turn."""
    turns = rollouts.segment_counts() // 2
    several = set(rollouts.environment[turns > 1].tolist())
    for row in range(len(rollouts)):
        group, environment = int(rollouts.group[row]), int(rollouts.environment[row])
        if group >= len(accepted.labels) or accepted.labels[group] != "kept":
            continue
        local = manifest.environments[environment].where == "local"
        if local and environment not in several:
            yield row


def _states_in(verdict: Verdict, rollouts: Rollouts, row: int, values: Values) -> Iterator[State]:
    tokens = rollouts.rollout(row).model_tokens
    for position in boundaries(tokens, values):
        yield State(
            submission=verdict.submission,
            row=row,
            group=int(rollouts.group[row]),
            seed=verdict.seed,
            step=verdict.step,
            environment=int(rollouts.environment[row]),
            prefix=tokens[:position],
        )
