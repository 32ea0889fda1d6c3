"""The learner: one policy, its optimiser, and the rollout step that improves it.

Policy k is the weights after k rollout steps, so step s turns policy s into policy s + 1. A
rollout of policy p that is trained on in step s has age s − p."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.learning import states
from peers.learning.batch import AcceptedGroups
from peers.learning.implicit import ProcessModel
from peers.learning.installed import FormulaError
from peers.learning.past import PastPolicies, Teacher
from peers.learning.policy import TrainedPolicy, blank_model
from peers.learning.ranks import RankError, Ranks
from peers.learning.scoring import Part, score
from peers.learning.settings import LearnerSettings
from peers.learning.step import GrpoStep
from peers.learning.values import give_turns
from peers.learning.work import NO_WORK, stability
from swarm.errors import UserError


class Learner:
    """Holds the policy, its past versions, and the list of submissions that it has consumed."""

    def __init__(self, base: Path, settings: LearnerSettings, ranks: Ranks | None = None) -> None:
        """Begin with the Hugging Face folder `base` as policy 0; raises `UserError`.

        `base` is also the KL term's reference, and the source of the tokenizer for `export`. With
        several `ranks`, every rank makes the same calls in the same order."""
        self.settings = settings
        self.step = 0
        """The next rollout step; also the number of the policy held."""
        self.lineage = 0
        self.consumed: dict[int, list[str]] = {}
        """Submissions trained on, by step. Steps older than `max_staleness` are left out: their
        submissions are too old to be offered again."""
        self._base = base
        self._ranks = ranks or Ranks()
        model = blank_model(base, settings, self._ranks)
        self.policy = TrainedPolicy(model, base, settings, self._ranks)
        # Adapters are exchanged in the policy itself: their base never changes.
        spare = None if settings.adapter.rank else blank_model(base, settings, self._ranks)
        self.past = PastPolicies(spare, self.policy, settings.sharding)
        """The policies whose rollouts can be trained on."""
        self.past.scorer.share_tokens(self._ranks.sharing)
        self._saver = ThreadPoolExecutor(1, "saving")
        self._saving: Future[None] | None = None
        self._generator = torch.Generator().manual_seed(settings.seed)
        self.process: ProcessModel | None = None
        """The model of process rewards, if the objective has them; part of the state."""
        self.problems: list[str] = []
        """Why formulas of other packages failed in the last step, whose parts were skipped."""
        self._refer()
        self._remember()

    @property
    def model(self) -> Any:
        """The policy's transformers model, in fp32."""
        return self.policy.model

    @property
    def policies(self) -> list[int]:
        """Numbers of the policies whose rollouts can be trained on, ascending."""
        return sorted(self.past.held)

    def follow(self, settings: LearnerSettings) -> None:
        """Follow another version of the run from now on; raises `UserError`.

        Only objective, optimiser, schedule and length limit may differ."""
        self.settings = settings
        self.policy.follow(settings.optimiser)
        self._refer()

    def _refer(self) -> None:
        """Hold what the objective needs beside the policy: the reference, and the model of process
        rewards, which begins with the base's weights."""
        objective = self.settings.objective
        if objective.needs_reference and self.past.reference is None:
            self.past.reference = self.past.copy(self.policy.read_weights(self._base))
        if objective.teacher_weight and not (self.settings.teacher or objective.teacher_prompt):
            raise UserError(
                "the run's objective.teacher_weight needs a teacher; set teacher under [trainer] "
                "to a model with the same tokenizer"
            )
        if objective.teacher_weight and self.past.teacher is None:
            self.past.teacher = Teacher(self._base, self.settings, self.policy, self.past)
        if not objective.has_process:
            self.process = None
        elif self.process is None:
            self.process = ProcessModel(self._base, self.settings, self._ranks)
        else:
            self.process.follow(self.settings)

    # --- learning ----------------------------------------------------------------------------

    def score(self, given: Sequence[AcceptedGroups]) -> None:
        """Compute ahead what is known of groups before their step, the same to the last bit."""
        if self.settings.objective.learns:
            score(given, self.policy, self.past, self.settings, self.step)

    def train_step(self, given: Sequence[AcceptedGroups], step: int) -> dict[str, float]:
        """Take rollout step `step` on these groups and return its metrics.

        The submissions are recorded as consumed. Groups whose rewards are all equal are dropped; if
        none is left, the policy stays the same, but the step still counts. An optimiser step with a
        non-finite loss or gradient is skipped and counted. Raises `ValueError` if `step` is not the
        next step, or if a group is older than `max_staleness` or of a policy that is not held."""
        self._check_turn(given, step)
        if self.settings.objective.credit == "turns":
            for each in given:
                give_turns(each, self.settings.objective)
        metrics = _describe(given, step)
        metrics |= NO_WORK
        taken = GrpoStep(self.policy, self.past, self.settings, step, self.process)
        metrics |= taken.take(self._cut(given))
        *self.environments, whole = stability(given, taken.trained, self._ranks)
        metrics = whole | metrics
        self.problems = list(dict.fromkeys(taken.problems))
        try:
            self._ranks.agree(FormulaError("; ".join(taken.problems)) if taken.problems else None)
        except (RankError, FormulaError) as error:  # rank 0, which is asked, may have seen nothing
            self.problems = self.problems or [str(error)]
        names = dict.fromkeys(each.name for each in given if each.name)
        self.consumed[step] = [*self.consumed.get(step, []), *names]
        self.step += 1
        oldest = self.step - self.settings.schedule.max_staleness
        self.consumed = {step: names for step, names in self.consumed.items() if step >= oldest}
        self._remember()
        return metrics

    def _check_turn(self, given: Sequence[AcceptedGroups], step: int) -> None:
        if step != self.step:
            raise ValueError(f"step {step} was asked for, but the learner is at step {self.step}")
        for policy in sorted({policy for each in given for policy in each.policies}):
            if not 0 <= step - policy <= self.settings.schedule.max_staleness:
                raise ValueError(
                    f"a rollout of policy {policy} has age {step - policy} at step {step}; "
                    f"max_staleness is {self.settings.schedule.max_staleness}"
                )
            if policy not in self.past.held:
                raise ValueError(f"policy {policy} is not held; held policies: {self.policies}")

    def _cut(self, given: Sequence[AcceptedGroups]) -> list[Part]:
        """Split the informative groups evenly into one part per optimiser step, at random."""
        if not self.settings.objective.learns:
            return []
        kept = [(each, group) for each in given for group in each.informative]
        count = min(self.settings.optimiser.optimiser_steps, len(kept))
        order = list(range(len(kept)))
        if count > 1:
            order = torch.randperm(len(kept), generator=self._generator).tolist()
        parts: list[Part] = []
        for part in range(count):
            groups: dict[AcceptedGroups, list[int]] = {}
            for each, group in (kept[index] for index in sorted(order[part::count])):
                groups.setdefault(each, []).append(group)
            parts.append(list(groups.items()))
        return parts

    def _remember(self) -> None:
        """Add the policy just reached to the past policies."""
        self.past.keep(self.step, self.policy.weights(), self.settings.schedule.max_staleness + 2)

    # --- the training state ------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write all that an exact resume needs, durably: safetensors and JSON, no pickle.

        Past policies are not written: `load` reads them from their published folders."""
        self.begin_save(folder)
        self.finish_save()

    def export(self, folder: Path, *, base: bool = False) -> None:
        """Write the policy's folder in the base's dtype, durably. `base`: policy 0, unadapted."""
        self.begin_save(None, folder, base=base)
        self.finish_save()

    def begin_save(
        self, state: Path | None, policy: Path | None = None, *, base: bool = False
    ) -> None:
        """Copy state and policy for the folders given, to be written until `finish_save`."""
        self._wait_for_saving()
        writes: list[Callable[[], None]] = []
        if state is not None:
            facts = {
                "step": self.step,
                "lineage": self.lineage,
                "consumed": {str(step): list(names) for step, names in self.consumed.items()},
            }
            tensors = {
                name: tensor.detach().to("cpu", copy=True) for name, tensor in self._state().items()
            }
            writes.append(partial(states.write, state, tensors, facts, self._ranks))
        if policy is not None:
            snapshot = self.policy.snapshot(is_base=base or self.step == 0)
            writes.append(partial(self.policy.write, policy, snapshot))

        def write() -> None:
            for each in writes:
                each()

        self._saving = self._saver.submit(write)

    def finish_save(self) -> None:
        """Wait, in any thread, for `begin_save`'s copies to be durable; raises its errors."""
        saving = self._saving
        if saving is not None:
            saving.result()

    def _wait_for_saving(self) -> None:
        """Wait for the writes before, whose failure rank 0 has reported for all ranks."""
        if self._saving is not None:
            wait([self._saving])

    def _state(self, has_process: bool = True) -> dict[str, Tensor]:
        """Every tensor of the state, by its name on disk; `load` fills them in place."""
        process = self.process.state() if self.process is not None and has_process else {}
        return {**self.policy.state(), **process, "generator": self._generator.get_state()}

    def load(self, folder: Path, policies: Mapping[int, Path]) -> None:
        """Continue exactly from a state that `save` wrote; raises `UserError` if it does not fit.

        Another number of ranks may have written it. `policies`: the folders on this disk of
        policies before that step; rollouts of others cannot be trained on."""
        self._wait_for_saving()
        facts = states.read_facts(folder)
        shapes = states.shapes(folder)
        weights = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
        self.policy.check_fit(
            {name.removeprefix("model."): shape for name, shape in weights.items()}, folder
        )
        self.policy.optimiser.state.clear()
        if any(name.startswith("optimiser.") for name in shapes):
            self.policy.make_optimiser_state(shapes, folder)
        state = self._state(self.process is not None and self.process.expects(shapes, folder))
        states.read(folder, state, self._ranks)
        self._generator.set_state(state["generator"])
        self.step = int(facts["step"])
        self.lineage = int(facts["lineage"])
        self.consumed = {int(step): list(names) for step, names in facts["consumed"].items()}
        for policy in self.policies:
            self.past.forget(policy)
        held = self.settings.schedule.max_staleness + 2
        for policy, published in sorted(policies.items()):
            if self.step - held < policy < self.step:
                self.past.keep(policy, self.policy.read_weights(published), held)
        self._remember()

    def begin_with(self, published: Path, step: int, lineage: int) -> None:
        """Begin at `step` with a published policy and a new optimiser; raises `UserError`."""
        self.past.forget(self.step)
        self.policy.assign(self.policy.read_weights(published))
        self.step, self.lineage = step, lineage
        self._remember()

    def matches(self, published: Path) -> bool:
        """Whether a published policy is the one held, bit for bit, on all ranks."""
        found = self.policy.read_weights(published)
        dtype = self.policy.published_dtype
        differ = any(
            not torch.equal(value.to(dtype), found[name].to(value.device))
            for name, value in self.policy.weights().items()
        )
        return not any(self._ranks.max([float(differ)]))

    def begin_lineage(self, lineage: int, consumed: Mapping[int, Sequence[str]]) -> None:
        """Begin a lineage with the policy held; `consumed`: all that the old one trained on."""
        self.lineage = lineage
        known = {name for names in self.consumed.values() for name in names}
        more = [name for names in consumed.values() for name in names if name not in known]
        if more:
            self.consumed.setdefault(self.step, []).extend(more)


def _describe(given: Sequence[AcceptedGroups], step: int) -> dict[str, float]:
    """Metrics of the step's input, before any computation."""
    rewards = [
        reward
        for each in given
        for group, rewards in enumerate(each.rewards)
        if group not in each.ungraded
        for reward in rewards
    ]
    completions = sum(len(each.all_completion_lengths) for each in given)
    groups = sum(len(each.rewards) for each in given)
    tokens = sum(int(each.all_completion_lengths.sum()) for each in given)
    return {
        "groups": float(groups),
        "groups_zero_advantage": float(groups - sum(len(each.informative) for each in given)),
        "completions": float(completions),
        "tokens": float(tokens),
        "reward": sum(rewards) / max(1, len(rewards)),
        "completion_length": tokens / max(1, completions),
        "age": sum((step - each.oldest) * len(each.rewards) for each in given) / max(1, groups),
    }
