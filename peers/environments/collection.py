"""The environments of a run: each is loaded once, and each group draws its task from one."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec

from peers.environments.interface import Environment, Task
from peers.environments.play import task_of
from peers.environments.prompt_room import PromptRoom
from peers.environments.registry import load_named
from swarm.jobs import SubmissionOrder
from swarm.rollouts.continuations import State
from swarm.rollouts.seeds import environment_of_group, task_seed
from swarm.wire.manifest import EnvironmentReference
from swarm.wire.turns import PACKED_BYTES_MAX, TOKEN_BYTES

SERVED_PROMPT_TOKENS_MAX = PACKED_BYTES_MAX // TOKEN_BYTES
"""A prompt of a served environment travels in one message."""


@dataclass(frozen=True)
class GroupTask:
    """A group's task, and the environment that grades it."""

    index: int
    """Index of the environment in the run's list."""
    environment: Environment
    task: Task
    tokens: list[int]
    """Token ids of the task's prompt."""
    prefix: Sequence[int] = ()
    """Token ids of the state that the group continues, after the task's prompt."""


def room_for(reference: EnvironmentReference, room: PromptRoom) -> PromptRoom:
    """Room for the prompts of an environment, which may have to fit a message."""
    return room.at_most(SERVED_PROMPT_TOKENS_MAX) if reference.where == "served" else room


class Environments:
    """Loads environments on first use, without their weights, which a later version may change."""

    def __init__(
        self, references: Sequence[EnvironmentReference] = (), allowed: Collection[str] = ()
    ) -> None:
        """Load the local ones of `references`, others when asked for; raises as `load_named`."""
        self._allowed = allowed
        self._loaded: dict[bytes, Environment] = {}
        for reference in references:
            if reference.where == "local":
                self.of(reference)

    def of(self, reference: EnvironmentReference) -> Environment:
        """The environment that a run manifest names; raises `UserError`."""
        key = msgspec.json.encode(
            (reference.name, reference.version, reference.options), order="sorted"
        )
        if key not in self._loaded:
            self._loaded[key] = load_named(reference, self._allowed)
        return self._loaded[key]

    def tasks(self, order: SubmissionOrder, room: PromptRoom) -> list[GroupTask | None]:
        """The tasks of a submission's groups, derived from its seed and the weights, or those of
        the states that they continue; None for a group of a served environment.

        A task that `room` does not take is passed over, and the seed draws another.
        Raises `UserError` for an environment that is not installed or fails to draw a task."""
        references, seed = order.environments, order.seed()
        weights = [reference.weight for reference in references]
        continued = {each.group: each.state for each in order.continued}
        return [
            self._continued(references, continued[group], room)
            if group in continued
            else self.task(references, seed, group, room)
            if references[environment_of_group(seed, group, weights)].where == "local"
            else None
            for group in range(order.groups)
        ]

    def _continued(
        self, references: Sequence[EnvironmentReference], state: State, room: PromptRoom
    ) -> GroupTask:
        return replace(self.task(references, state.seed, state.group, room), prefix=state.prefix)

    def task(
        self, references: Sequence[EnvironmentReference], seed: bytes, group: int, room: PromptRoom
    ) -> GroupTask:
        """The task of one group; raises as `tasks`."""
        index = environment_of_group(seed, group, [reference.weight for reference in references])
        environment = self.of(references[index])
        room = room_for(references[index], room)
        task = task_of(environment, task_seed(seed, group), room=room)
        return GroupTask(index, environment, task, room.encode(task.prompt))
