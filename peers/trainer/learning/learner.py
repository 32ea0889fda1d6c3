"""The learner: one policy, its optimiser, and the rollout step that improves it.

Policy k is the weights after k rollout steps, so step s turns policy s into policy s + 1. A
rollout of policy p that is trained on in step s has age s − p.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.policy import model as policy_model
from peers.trainer.learning import objective as objectives
from peers.trainer.learning import schedule, states
from peers.trainer.learning.batch import Batch, Group, informative, make_batch
from peers.trainer.learning.durable import whole_folder
from peers.trainer.learning.objective import Tokens, Totals
from peers.trainer.learning.packing import (
    Rows,
    Scorer,
    empty_rows,
    fastest_attention,
    lay_out,
    lay_out_flat,
)
from peers.trainer.learning.ranks import Ranks
from peers.trainer.learning.sharding import Sharding, assign, local, part_of, rest, shard, whole
from swarm.errors import UserError
from swarm.messages import Objective, Optimiser, Schedule

ENGINE_DIFFERENCE_MAX = 0.1
"""Nats between an engine's log-probability and the trainer's beyond which a token is counted."""

Weights = dict[str, Tensor]
"""Of a policy, by parameter: this rank's part of each."""


@dataclass(frozen=True)
class LearnerSettings:
    """What a run's manifest says about learning, and the seed of the trainer's own choices."""

    objective: Objective
    schedule: Schedule
    seed: int = 0
    optimiser: Optimiser = field(default_factory=Optimiser)
    completion_tokens_max: int = 0
    """The run's length limit; only the objective `dr_grpo` needs it."""
    sharding: Sharding = field(default_factory=Sharding)
    attention: str | None = None
    """One of `packing.ATTENTIONS`; None: the fastest on the device."""
    flat: bool = False
    """Pack one long row a pass on a CPU too, as on CUDA; it is slower there."""


class Learner:
    """Holds the policy in fp32, AdamW, and the last policies that rollouts may come from."""

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
        objectives.check(settings.objective, settings.schedule)
        self.settings = settings
        self.step = 0
        """The next rollout step, which is also the number of the policy held."""
        self.lineage = lineage
        self.consumed: dict[int, list[str]] = {}
        """Submissions trained on, by step. Steps further back than `max_staleness` are left out:
        what they consumed is too old to be offered again."""
        self.counters = {
            "optimiser_steps": 0,
            "skipped_steps": 0,
            "groups": 0,
            "groups_zero_advantage": 0,
            "completions": 0,
            "tokens": 0,
        }
        self._base = base
        self._ranks = ranks or Ranks()
        loaded = policy_model.load(base)
        self._published_dtype: torch.dtype = loaded.dtype
        # eval: dropout would make the ratio between two passes over the same weights differ from 1.
        self.model: Any = loaded.eval()
        self.model.set_attn_implementation(
            settings.attention
            or fastest_attention(self._ranks.device, settings.sharding.mixed_precision)
        )
        self._scratch: Any = copy.deepcopy(self.model).requires_grad_(False)  # older policies
        self._scorer = Scorer(self.model)
        self._scratch_scorer = Scorer(self._scratch)
        for scorer in (self._scorer, self._scratch_scorer):
            shard(scorer, scorer.model.model.layers, self._ranks, settings.sharding)
        self._saving: _Saving | None = None
        goal = settings.objective
        self._optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.optimiser.learning_rate,
            betas=(settings.optimiser.beta1, settings.optimiser.beta2),
            weight_decay=settings.optimiser.weight_decay,
            fused=True,
        )
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._policies: dict[int, Weights] = {}
        self._reference = self._published() if goal.kl_coefficient else None
        self._remember()

    def follow(
        self,
        objective: Objective,
        optimiser: Optimiser,
        schedule: Schedule,
        completion_tokens_max: int,
    ) -> None:
        """Learn by other numbers from now on; raises `UserError` if they contradict each other."""
        objectives.check(objective, schedule)
        self.settings = dataclasses.replace(
            self.settings,
            objective=objective,
            optimiser=optimiser,
            schedule=schedule,
            completion_tokens_max=completion_tokens_max,
        )
        self._optimiser.param_groups[0].update(
            betas=(optimiser.beta1, optimiser.beta2), weight_decay=optimiser.weight_decay
        )
        if objective.kl_coefficient and self._reference is None:
            self._reference = self._read_weights(self._base)

    @property
    def policies(self) -> list[int]:
        """The policies whose rollouts can be trained on, ascending."""
        return sorted(self._policies)

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
        if step != self.step:
            raise ValueError(f"step {step} was asked for, but the learner is at step {self.step}")
        for policy in sorted({group.policy for group in groups}):
            if not 0 <= step - policy <= self.settings.schedule.max_staleness:
                raise ValueError(
                    f"a rollout of policy {policy} has age {step - policy} at step {step}; "
                    f"max_staleness is {self.settings.schedule.max_staleness}"
                )
            if policy not in self._policies:
                raise ValueError(f"policy {policy} is not held; there are: {self.policies}")

        kept = informative(groups)
        metrics = _describe(groups, kept, step)
        parts = self._cut(kept)
        # All before the first weights move; the first part is trained with the weights as they are.
        prepared = [self._prepare(part, first=index == 0) for index, part in enumerate(parts)]
        shares: dict[str, float] = {}
        for index, part in enumerate(prepared):
            share = self._optimise(part, step * self.settings.optimiser.optimiser_steps + index)
            for name, value in share.items():
                shares[name] = shares.get(name, 0.0) + value / len(prepared)
        if shares:
            metrics.update(objectives.describe(shares))
        metrics.update(self._compare_engines(prepared))

        self.counters["groups"] += len(groups)
        self.counters["groups_zero_advantage"] += len(groups) - len(kept)
        self.counters["completions"] += int(metrics["completions"])
        self.counters["tokens"] += int(metrics["tokens"])
        self.consumed[step] = [*self.consumed.get(step, []), *submissions]
        self.step += 1
        self._forget()
        self._remember()
        return metrics

    def _cut(self, groups: list[Group]) -> list[list[Group]]:
        """One part per optimiser step, as even as can be, in an order drawn from the seed."""
        count = min(self.settings.optimiser.optimiser_steps, len(groups))
        if count < 2:
            return [groups] if groups else []
        order = torch.randperm(len(groups), generator=self._generator).tolist()
        return [[groups[index] for index in order[part::count]] for part in range(count)]

    def _prepare(self, groups: list[Group], first: bool) -> _Prepared:
        """The batch and what does not change while the optimiser steps: log μ, old, reference.

        `first`: no weights move before this batch is trained on. Whatever the learner's own
        weights would say is then left out, since the training pass says it too.
        """
        device = self._ranks.device
        everything = make_batch(groups, self.settings.objective)
        mine = self._ranks.share(everything.lengths())
        batch = everything.rows(mine)
        rows = self._passes(batch)
        policy_of_token = batch.per_token(batch.policy).to(device)
        exact = self._published_dtype == torch.float32  # policies are the learner, unrounded
        known_later = self.step if first and exact else -1
        own = policy_of_token == known_later
        log_mu = torch.zeros(batch.token_count(), device=device)
        for policy in sorted({group.policy for group in groups} - {known_later}):
            part = batch.rows(batch.policy == policy)
            found = self._log_probabilities(self._policies[policy], self._passes(part))
            log_mu[policy_of_token == policy] = found
        log_old = None
        if self.settings.schedule.old == "step_start" and not first:
            # Not as published: that may be rounded.
            now = {name: local(value) for name, value in self.model.named_parameters()}
            log_old = self._log_probabilities(now, rows)
        taken = torch.zeros(len(everything), dtype=torch.bool)
        taken[mine] = True
        tokens, completions = self._ranks.sum([batch.token_count(), len(batch)])
        return _Prepared(
            batch=batch,
            totals=Totals(int(tokens), int(completions), self.settings.completion_tokens_max),
            reported=_reported(groups)[everything.per_token(taken)],
            rows=rows,
            log_mu=log_mu,
            own=own,
            log_old=log_old,
            log_reference=(
                self._log_probabilities(self._reference, rows)
                if self._reference and self.settings.objective.kl_coefficient
                else None
            ),
        )

    def _passes(self, batch: Batch) -> list[Rows]:
        """The forward passes over a batch, on this rank's device: equally many on every rank, of
        which those that have fewer compute empty ones, since each pass is a collective."""
        device = self._ranks.device
        passes: list[Rows] = []
        if len(batch):
            flat = device.type == "cuda" or self.settings.flat
            passes = lay_out_flat(batch) if flat else lay_out(batch)
        (most,) = self._ranks.max([len(passes)])
        passes += [empty_rows()] * (int(most) - len(passes))
        return [rows.to(device) for rows in passes]

    @torch.no_grad()
    def _log_probabilities(self, weights: Weights, passes: Sequence[Rows]) -> Tensor:
        """fp32 [n]: a batch's completion tokens under an older policy."""
        assign(self._scratch, weights)
        values = torch.empty(sum(len(rows.index) for rows in passes), device=self._ranks.device)
        for rows in passes:
            values[rows.index] = self._scratch_scorer(rows, entropy=False)[0]
        rest(self._scratch_scorer)
        return values

    def _optimise(self, prepared: _Prepared, optimiser_step: int) -> dict[str, float]:
        """One optimiser step on one batch."""
        goal = self.settings.objective
        batch = prepared.batch
        advantage = batch.per_token(batch.advantage).to(self._ranks.device)
        completion = batch.per_token(torch.arange(len(batch))).to(self._ranks.device)
        sums: dict[str, Tensor] = {}
        self._optimiser.zero_grad()
        for part in prepared.rows:
            here = part.index
            log_pi, entropy = self._scorer(part, entropy_gradient=bool(goal.entropy_coefficient))
            own = prepared.own[here]
            prepared.log_mu[here[own]] = log_pi.detach()[own]
            log_mu = prepared.log_mu[here]
            if self.settings.schedule.old == "generation":
                log_old = log_mu
            else:
                log_old = log_pi.detach() if prepared.log_old is None else prepared.log_old[here]
            loss, metrics = objectives.loss(
                goal,
                Tokens(
                    log_pi=log_pi,
                    log_old=log_old,
                    log_mu=log_mu,
                    advantage=advantage[here],
                    entropy=entropy,
                    completion=completion[here],
                    log_reference=(
                        None if prepared.log_reference is None else prepared.log_reference[here]
                    ),
                ),
                prepared.totals,
            )
            # Each rank's loss is its share of the batch's; FSDP takes the mean of the gradients.
            (loss * self._ranks.world).backward()  # type: ignore[no-untyped-call]
            for name, value in metrics.items():
                sums[name] = sums.get(name, torch.zeros(())) + value

        norm = whole(
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.settings.optimiser.gradient_norm_max
            )
        )
        rate = self.learning_rate(optimiser_step)
        names = sorted(sums)
        figures = dict(zip(names, self._ranks.sum([float(sums[n]) for n in names]), strict=True))
        finite = bool(torch.isfinite(norm)) and math.isfinite(figures["loss"])
        if finite:
            self._optimiser.param_groups[0]["lr"] = rate
            self._optimiser.step()
        self.counters["optimiser_steps" if finite else "skipped_steps"] += 1
        return {
            **figures,
            "gradient_norm": float(norm),
            "learning_rate": rate,
            "skipped": float(not finite),
        }

    def _compare_engines(self, prepared: Sequence[_Prepared]) -> dict[str, float]:
        """How far the engines' own log-probabilities are from log μ, recomputed: figures, no more.

        `engine_log_probability_difference`: the largest, in nats. `engine_kl`: KL(engine ‖
        trainer) per token. `engine_outside_share`: tokens further off than
        `ENGINE_DIFFERENCE_MAX`. Empty where none were reported.
        """
        if not prepared:
            return {}
        ours = torch.cat([part.log_mu.cpu() for part in prepared])
        theirs = torch.cat([part.reported for part in prepared])
        ours, theirs = ours[~theirs.isnan()], theirs[~theirs.isnan()]
        difference = (ours - theirs).abs()
        kl = float(objectives.k3(ours, theirs).sum())
        outside = float((difference > ENGINE_DIFFERENCE_MAX).sum())
        count, kl, outside = self._ranks.sum([len(ours), kl, outside])
        (largest,) = self._ranks.max([float(difference.max()) if len(difference) else 0.0])
        if not count:
            return {}
        return {
            "engine_log_probability_difference": largest,
            "engine_kl": kl / count,
            "engine_outside_share": outside / count,
        }

    def learning_rate(self, optimiser_step: int) -> float:
        """Of one optimiser step, from 0; see `peers.trainer.learning.schedule`."""
        optimiser = self.settings.optimiser
        total = self.settings.schedule.steps * optimiser.optimiser_steps
        return schedule.learning_rate(optimiser, total, optimiser_step)

    # --- older policies ----------------------------------------------------------------------

    def _remember(self) -> None:
        self._policies[self.step] = self._published()
        for policy in self.policies[: -(self.settings.schedule.max_staleness + 2)]:
            del self._policies[policy]

    def _forget(self) -> None:
        oldest = self.step - self.settings.schedule.max_staleness
        self.consumed = {step: names for step, names in self.consumed.items() if step >= oldest}

    def _published(self) -> Weights:
        """A copy of the weights as `export` writes them, which is what inference peers load."""
        return {
            name: local(parameter).detach().to(self._published_dtype, copy=True)
            for name, parameter in self.model.named_parameters()
        }

    # --- checkpoints -------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write all that an exact resume needs, durably: safetensors and JSON, no pickle.

        Older policies are not written: their published folders are handed to `load`.
        """
        self.begin_save(folder)
        self.finish_save()

    def begin_save(self, folder: Path) -> None:
        """Copy the state and write it beside what follows; `finish_save` says when it is there."""
        self.finish_save()
        facts = {
            "step": self.step,
            "lineage": self.lineage,
            "consumed": {str(step): list(names) for step, names in self.consumed.items()},
            "counters": dict(self.counters),
        }
        self._saving = _Saving(folder, states.stage(self._state()), facts, self._ranks)

    def finish_save(self) -> None:
        """Wait until what `begin_save` began is durable; raises what `states.write` raises."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def _state(self) -> dict[str, Tensor]:
        """Every tensor of the state, by its name on disk; filled in place by `load`."""
        state = {f"model.{name}": value for name, value in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self._optimiser.state[parameter].items():
                state[f"optimiser.{name}.{key}"] = value
        state["generator"] = self._generator.get_state()
        return state

    def load(self, folder: Path, policies: Mapping[int, Path]) -> None:
        """Continue exactly where `save` wrote `folder`; raises `UserError` if it does not fit.

        The state may come from another number of ranks. `policies` gives the exported folders of
        policies before that step, as far as they are still there; rollouts of a policy that is
        not held cannot be trained on.
        """
        facts = states.read_facts(folder)
        shapes = states.shapes(folder)
        self._check_fit(
            {
                name.removeprefix("model."): shape
                for name, shape in shapes.items()
                if name.startswith("model.")
            },
            folder,
        )
        if any(name.startswith("optimiser.") for name in shapes):
            self._make_optimiser_state()
        state = self._state()
        states.read(folder, state, self._ranks)
        self._generator.set_state(state["generator"])
        self.step = int(facts["step"])
        self.lineage = int(facts["lineage"])
        self.counters = {name: int(value) for name, value in facts["counters"].items()}
        self.consumed = {int(step): list(names) for step, names in facts["consumed"].items()}
        self._policies.clear()
        oldest = self.step - self.settings.schedule.max_staleness - 1
        for policy, published in sorted(policies.items()):
            if oldest <= policy < self.step:
                self._policies[policy] = self._read_weights(published)
        self._remember()

    def _read_weights(self, folder: Path) -> Weights:
        """This rank's part of a published policy."""
        found = policy_model.read_weights(folder)
        self._check_fit({name: tuple(value.shape) for name, value in found.items()}, folder)
        return {
            name: part_of(found[name], parameter)
            for name, parameter in self.model.named_parameters()
        }

    def begin_lineage(self, lineage: int, consumed: Mapping[int, Sequence[str]]) -> None:
        """Make the policy held the first of a new lineage that also inherits `consumed`: what
        the lineage given up has trained on, its steps after this one among them."""
        self.lineage = lineage
        there = {name for names in self.consumed.values() for name in names}
        more = [name for names in consumed.values() for name in names if name not in there]
        if more:
            self.consumed.setdefault(self.step, []).extend(more)

    def _make_optimiser_state(self) -> None:
        """What AdamW makes in its first step, for `load` to fill."""
        for parameter in self.model.parameters():
            self._optimiser.state[parameter] = {
                "step": torch.zeros((), device=local(parameter).device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _check_fit(self, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
        for name, parameter in self.model.named_parameters():
            found = shapes.get(name)
            if found != tuple(parameter.shape):
                raise UserError(
                    f"{folder} holds another model than {self._base}: {name} has shape {found}, "
                    f"not {tuple(parameter.shape)}"
                )

    def export(self, folder: Path) -> None:
        """Write the policy as a plain Hugging Face folder, in the base's dtype, durably.

        With several ranks each gathers all parameters and writes its share of them.
        """
        mine: Weights = {}
        owners: dict[str, int] = {}
        loads = [0] * self._ranks.world
        for name, parameter in self.model.named_parameters():
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += parameter.numel()
            full = whole(parameter.detach().to(self._published_dtype))
            if owners[name] == self._ranks.rank:
                mine[name] = full.cpu()
        with whole_folder(folder, self._ranks) as aside:
            policy_model.save_share(
                mine, aside, self.model.config, self._base, self._ranks.rank, owners
            )


class _Saving:
    """A state on its way to the disk, in a thread."""

    def __init__(
        self, folder: Path, tensors: dict[str, Tensor], facts: Mapping[str, Any], ranks: Ranks
    ) -> None:
        self._error: BaseException | None = None

        def run() -> None:
            try:
                states.write(folder, tensors, facts, ranks)
            except BaseException as error:  # raised by `finish`, where somebody hears it
                self._error = error

        self._thread = threading.Thread(target=run, name="saving")
        self._thread.start()

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class _Prepared:
    """One optimiser step's batch, with what older policies say about its n tokens, fp32 [n]."""

    batch: Batch
    """This rank's sequences."""
    totals: Totals
    """Of all ranks'."""
    rows: list[Rows]
    log_mu: Tensor
    """Of the generating policy. Filled in by the training pass where `own`."""
    own: Tensor
    """bool [n]: the generating policy is the learner as it is when this batch is trained on."""
    log_old: Tensor | None
    """At the start of the rollout step; None: the learner itself, or not asked for."""
    log_reference: Tensor | None
    reported: Tensor
    """What the engines said of the tokens, NaN where they said nothing; never trained on."""


def _describe(groups: Sequence[Group], kept: Sequence[Group], step: int) -> dict[str, float]:
    """What the step was given, before anything is computed."""
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [len(completion) for group in groups for completion in group.completions]
    return {
        "groups": float(len(groups)),
        "groups_zero_advantage": float(len(groups) - len(kept)),
        "completions": float(len(rewards)),
        "tokens": float(sum(lengths)),
        "reward": sum(rewards) / max(1, len(rewards)),
        "completion_length": sum(lengths) / max(1, len(lengths)),
        "age": sum(step - group.policy for group in groups) / max(1, len(groups)),
    }


def _reported(groups: Sequence[Group]) -> Tensor:
    """fp32 [n]: the engines' own log-probabilities; NaN for the groups that have none."""
    values: list[float] = []
    for group in groups:
        count = sum(map(len, group.completions))
        reported = group.log_probabilities
        found = [math.nan] * count if reported is None else [v for row in reported for v in row]
        if len(found) != count:
            raise ValueError(f"{len(found)} log-probabilities for {count} tokens")
        values += found
    return torch.tensor(values)
