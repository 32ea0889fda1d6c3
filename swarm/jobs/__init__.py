"""The work contract: typed requests and replies of every service that runs in a child process.

Each service is a `Protocol` and a `Setup`. The service in the child and the simulator's cost model
implement both, and the role's client (`swarm.world.client`) has the protocol's methods, so a
changed field is a type error in all three. Paths are absolute and name files on this machine.

For other rooms, by the names in docs/rooms.md: `__init__`, `averaging`, `environment`,
`evaluation`, `inference`, `memory`, `offline`, `outer`, `training`, `validation`
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import msgspec

from swarm.rollouts.continuations import Continued
from swarm.rollouts.seeds import environment_of_group, submission_seed
from swarm.wire.manifest import EnvironmentReference, Sampling, one_or_each
from swarm.wire.messages import CheckpointReference
from swarm.world import Job


class LoadingJob(Job, frozen=True, kw_only=True):
    """Base of jobs that read weights, which reports no progress: 60 GB from a disk of 100 MB/s."""

    patience_seconds: ClassVar[float] = 600.0


class TrainingJob(Job, frozen=True, kw_only=True):
    """Base of jobs of a learner, which reports progress per forward and backward pass; its ranks
    wait up to 600 s for each other."""

    patience_seconds: ClassVar[float] = 1800.0


class SavingJob(Job, frozen=True, kw_only=True):
    """Base of jobs that write a state. No progress is reported; ranks wait up to 3,600 s."""

    patience_seconds: ClassVar[float] = 4200.0


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware a service computes on: the role's settings of these names, which say what each
    does (`swarm.settings.ComputeSettings`, `peers.inference.settings`)."""

    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    memory_share: float = 0.9
    slots: int = 0
    length_max: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    cuda_graphs: bool = False
    devices: list[str] = []
    adapters: Literal["auto", "merged", "unmerged"] = "auto"

    def in_run(self, measured_dtypes: Sequence[str]) -> "Hardware":
        """The settings in a run, whose thresholds were measured for some dtypes: where bfloat16 is
        one, `auto` may be it on CPUs that compute in it, too."""
        if self.dtype == "auto" and "bfloat16" in measured_dtypes:
            return msgspec.structs.replace(self, dtype="fastest")
        return self


class SubmissionOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that determine one submission's prompts, noise and header."""

    run: str
    policy: CheckpointReference
    step: int
    nonce: bytes
    """The worker's nonce for this step (`swarm.rollouts.seeds.nonce_of`)."""
    worker: str
    number: int
    """Consecutive from 0 within the step."""
    groups: int
    environments: list[EnvironmentReference]
    """The run's environments; the seed and their weights determine the one of each group."""
    sampling: Sampling
    continued: list[Continued] = []
    """The groups that continue a state of another rollout, ascending; the others begin a task."""

    def seed(self) -> bytes:
        """The seed of all prompts and noise in the submission."""
        return submission_seed(self.run, self.nonce, self.worker, self.number)

    def header_fields(self) -> dict[str, Any]:
        """The fields that it determines of the header of the submission's file."""
        return {
            "run": self.run,
            "lineage": self.policy.lineage,
            "step": self.step,
            "policy": self.policy.step,
            "worker": self.worker,
            "number": self.number,
            "environments": [(each.name, each.version) for each in self.environments],
            "temperature": one_or_each(self.sampling.temperatures(self.environments)),
            "max_new_tokens": self.sampling.max_new_tokens,
            "stop_ids": self.sampling.stop_ids,
        }

    def environments_of_groups(self) -> list[int]:
        """[groups] Index of each group's environment."""
        if len(self.environments) == 1:
            return [0] * self.groups
        weights = [environment.weight for environment in self.environments]
        seed = self.seed()
        found = [environment_of_group(seed, group, weights) for group in range(self.groups)]
        for each in self.continued:
            found[each.group] = each.state.environment
        return found

    def served_groups(self) -> list[int]:
        """The groups whose environment is served."""
        found = self.environments_of_groups()
        return [n for n, index in enumerate(found) if self.environments[index].where == "served"]

    def temperatures(self) -> list[float]:
        """[groups] The temperature of each group's rollouts."""
        found = self.sampling.temperatures(self.environments)
        return [found[index] for index in self.environments_of_groups()]

    def prefixes(self) -> list[Sequence[int]]:
        """[groups] The tokens of each group's state after the task's prompt; mostly none."""
        found: list[Sequence[int]] = [()] * self.groups
        for each in self.continued:
            found[each.group] = each.state.prefix
        return found

    def may_begin_with(self, policy: CheckpointReference | None) -> bool:
        """Whether its first tokens may come from a policy."""
        return may_begin_with(policy, self.policy, self.sampling)

    def rows(self) -> int:
        """Completions in the submission."""
        return self.groups * self.sampling.group_size


def may_begin_with(
    policy: CheckpointReference | None, named: CheckpointReference, sampling: Sampling
) -> bool:
    """Whether a submission may begin with a policy: the one that the step order names, or, where
    the run allows swaps, a later one of its lineage."""
    if policy is None or policy == named:
        return policy is not None
    later = policy.lineage == named.lineage and policy.step > named.step
    return sampling.swaps_max > 0 and later


class Load(LoadingJob, frozen=True, kw_only=True):
    """Load the policy in a Hugging Face folder."""

    policy: CheckpointReference
    folder: str
