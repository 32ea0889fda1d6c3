"""The learner: one policy, its optimiser, and the rollout step that improves it.

Policy k is the weights after k rollout steps, so step s turns policy s into policy s + 1. A
rollout of policy p that is trained on in step s has age s − p.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.trainer.learning import states
from peers.trainer.learning.batch import Group, informative
from peers.trainer.learning.past import PastPolicies
from peers.trainer.learning.policy import TrainedPolicy, load_model
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.settings import LearnerSettings
from peers.trainer.learning.step import GrpoStep


class Learner:
    """Holds the policy, its past, and the record of what it has learnt from."""

    def __init__(
        self,
        base: Path,
        settings: LearnerSettings,
        lineage: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        """Begin with the Hugging Face folder `base` as policy 0; raises `UserError`.

        `base` is also the reference of the KL term and where `export` finds the tokenizer. With
        several `ranks`, all make and call their learners alike.
        """
        settings.check()
        self.settings = settings
        self.step = 0
        """The next rollout step, which is also the number of the policy held."""
        self.lineage = lineage
        self.consumed: dict[int, list[str]] = {}
        """Submissions trained on, by step. Steps older than `max_staleness` are left out: what they
        consumed is too old to be offered again."""
        self.counters = {
            "optimiser_steps": 0,
            "skipped_steps": 0,
            "groups": 0,
            "groups_zero_advantage": 0,
            "completions": 0,
            "tokens": 0,
        }
        self._ranks = ranks or Ranks()
        model = load_model(base, settings, self._ranks)
        spare = copy.deepcopy(model)  # before either is spread over the ranks
        self.policy = TrainedPolicy(model, base, settings, self._ranks)
        self.past = PastPolicies(spare, self._ranks, settings.sharding)
        """Policies whose rollouts can be trained on."""
        self._saving: states.Saving | None = None
        self._generator = torch.Generator().manual_seed(settings.seed)
        if settings.objective.kl_coefficient:
            self.past.reference = self.policy.published()
        self._remember()

    @property
    def model(self) -> Any:
        """The policy's transformers model, in fp32."""
        return self.policy.model

    @property
    def policies(self) -> list[int]:
        """Numbers of the policies whose rollouts can be trained on, ascending."""
        return self.past.numbers()

    def follow(self, settings: LearnerSettings) -> None:
        """Learn by another version of the run from now on; raises `UserError`.

        Only objective, optimiser, schedule and length limit may differ.
        """
        settings.check()
        self.settings = settings
        self.policy.follow(settings.optimiser)
        if settings.objective.kl_coefficient and self.past.reference is None:
            self.past.reference = self.policy.read_base()

    # --- learning ----------------------------------------------------------------------------

    def train_step(
        self, groups: Sequence[Group], step: int, submissions: Sequence[str] = ()
    ) -> dict[str, float]:
        """Take rollout step `step` on these groups and return its metrics.

        `submissions` names what the groups came from; it is remembered as consumed. Groups whose
        rewards are all equal are dropped; if that leaves none, the policy stays as it is and the
        step counts all the same. An optimiser step with a non-finite loss or gradient is skipped
        and counted. Raises `ValueError` if it is not this step's turn, a group is older than
        `max_staleness`, or its policy is not held.
        """
        self._check_turn(groups, step)
        kept = informative(groups)
        metrics = _describe(groups, kept, step)
        parts = self._cut(kept)
        learnt, skipped = GrpoStep(self.policy, self.past, self.settings, step).take(parts)
        metrics.update(learnt)
        self.counters["optimiser_steps"] += len(parts) - skipped
        self.counters["skipped_steps"] += skipped
        self.counters["groups"] += len(groups)
        self.counters["groups_zero_advantage"] += len(groups) - len(kept)
        self.counters["completions"] += int(metrics["completions"])
        self.counters["tokens"] += int(metrics["tokens"])
        self.consumed[step] = [*self.consumed.get(step, []), *submissions]
        self.step += 1
        self._forget()
        self._remember()
        return metrics

    def _check_turn(self, groups: Sequence[Group], step: int) -> None:
        if step != self.step:
            raise ValueError(f"step {step} was asked for, but the learner is at step {self.step}")
        for policy in sorted({group.policy for group in groups}):
            if not 0 <= step - policy <= self.settings.schedule.max_staleness:
                raise ValueError(
                    f"a rollout of policy {policy} has age {step - policy} at step {step}; "
                    f"max_staleness is {self.settings.schedule.max_staleness}"
                )
            if policy not in self.past:
                raise ValueError(f"policy {policy} is not held; there are: {self.policies}")

    def _cut(self, groups: list[Group]) -> list[list[Group]]:
        """One part per optimiser step, as even as can be, in an order drawn from the seed."""
        count = min(self.settings.optimiser.optimiser_steps, len(groups))
        if count < 2:
            return [groups] if groups else []
        order = torch.randperm(len(groups), generator=self._generator).tolist()
        return [[groups[index] for index in order[part::count]] for part in range(count)]

    def _remember(self) -> None:
        """Hold the policy just reached among the past ones."""
        count = self.settings.schedule.max_staleness + 2
        self.past.keep(self.step, self.policy.published(), count)

    def _forget(self) -> None:
        oldest = self.step - self.settings.schedule.max_staleness
        self.consumed = {step: names for step, names in self.consumed.items() if step >= oldest}

    # --- the training state ------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write all that an exact resume needs, durably: safetensors and JSON, no pickle.

        Past policies are not written: their published folders are handed to `load`.
        """
        self.begin_save(folder)
        self.finish_save()

    def begin_save(self, folder: Path) -> None:
        """Copy the state and write it beside what follows, until `finish_save`."""
        self.finish_save()
        facts = {
            "step": self.step,
            "lineage": self.lineage,
            "consumed": {str(step): list(names) for step, names in self.consumed.items()},
            "counters": dict(self.counters),
        }
        self._saving = states.Saving(folder, states.stage(self._state()), facts, self._ranks)

    def finish_save(self) -> None:
        """Wait until what `begin_save` began is durable; raises what `states.write` raises."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def _state(self) -> dict[str, Tensor]:
        """Every tensor of the state, by its name on disk; filled in place by `load`."""
        return {**self.policy.state(), "generator": self._generator.get_state()}

    def load(self, folder: Path, policies: Mapping[int, Path]) -> None:
        """Continue exactly where `save` wrote `folder`; raises `UserError` if it does not fit.

        The state may come from another number of ranks. `policies` gives the exported folders of
        policies before that step, as far as they are on this disk; rollouts of a policy that is
        not held cannot be trained on.
        """
        facts = states.read_facts(folder)
        shapes = states.shapes(folder)
        self.policy.check_fit(
            {
                name.removeprefix("model."): shape
                for name, shape in shapes.items()
                if name.startswith("model.")
            },
            folder,
        )
        if any(name.startswith("optimiser.") for name in shapes):
            self.policy.make_optimiser_state()
        state = self._state()
        states.read(folder, state, self._ranks)
        self._generator.set_state(state["generator"])
        self.step = int(facts["step"])
        self.lineage = int(facts["lineage"])
        self.counters = {name: int(value) for name, value in facts["counters"].items()}
        self.consumed = {int(step): list(names) for step, names in facts["consumed"].items()}
        self.past.clear()
        held = self.settings.schedule.max_staleness + 2
        for policy, published in sorted(policies.items()):
            if self.step - held < policy < self.step:
                self.past.keep(policy, self.policy.read_weights(published), held)
        self._remember()

    def begin_lineage(self, lineage: int, consumed: Mapping[int, Sequence[str]]) -> None:
        """Make the policy held the first of a new lineage that also inherits `consumed`: what
        the lineage given up has trained on, its steps after this one among them."""
        self.lineage = lineage
        known = {name for names in self.consumed.values() for name in names}
        more = [name for names in consumed.values() for name in names if name not in known]
        if more:
            self.consumed.setdefault(self.step, []).extend(more)

    def export(self, folder: Path) -> None:
        """Write the policy as a plain Hugging Face folder, in the base's dtype, durably."""
        self.policy.export(folder)


def _describe(groups: Sequence[Group], kept: Sequence[Group], step: int) -> dict[str, float]:
    """What the step was given, before anything is computed."""
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [len(rollout.model_tokens) for group in groups for rollout in group.rollouts]
    return {
        "groups": float(len(groups)),
        "groups_zero_advantage": float(len(groups) - len(kept)),
        "completions": float(len(rewards)),
        "tokens": float(sum(lengths)),
        "reward": sum(rewards) / max(1, len(rewards)),
        "completion_length": sum(lengths) / max(1, len(lengths)),
        "age": sum(step - group.policy for group in groups) / max(1, len(groups)),
    }
