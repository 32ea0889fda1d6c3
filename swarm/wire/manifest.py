"""The run manifest: every term of a run, as the owner signs it.

Fields are bounded here, bounds that concern several fields in `swarm.run.bounds`. docs/protocol.md
explains every field (decision 71)."""

import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarm.wire import messages
from swarm.wire.protocol import ProtocolVersion

VERSION_MAX = 1 << 53
"""Highest version of a run's manifest."""

NotNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
OneOrMore = Annotated[float, Meta(ge=1, le=sys.float_info.max)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
WithinOne = Annotated[float, Meta(gt=0, lt=1)]


class TrustedKey(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A key that the owner trusts, from version `from_version` of the manifest on."""

    peer: messages.Key
    from_version: messages.Count = 1


OptionName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,39}\Z")]
OptionText = Annotated[str, Meta(max_length=1000)]
OptionScalar = bool | int | messages.Finite | OptionText
OptionValue = OptionScalar | Annotated[list[OptionScalar], Meta(max_length=256)]


class EnvironmentReference(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One of a run's environments, its share of the tasks, and its filter.

    Name, version, options and probe hash are fixed for the run."""

    name: messages.Name
    version: messages.Name
    probe_hash: messages.Digest = bytes(32)
    weight: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    options: Annotated[dict[OptionName, OptionValue], Meta(max_length=32)] = {}
    where: Literal["local", "served"] = "local"
    spread: Literal["task", "total"] = "task"
    accuracy_min: messages.Finite = 0.0
    accuracy_max: messages.Finite = 1.0
    max_staleness: Annotated[int, Meta(ge=-1, le=256)] = -1
    temperature: Annotated[float, Meta(gt=0, le=10)] | None = None

    def sampled_at(self, temperature: float) -> float:
        """The temperature of its rollouts where others have this one."""
        return self.temperature or temperature


Environments = Annotated[
    list[EnvironmentReference], Meta(min_length=1, max_length=messages.ENVIRONMENTS_MAX)
]


def labels(references: Sequence[EnvironmentReference]) -> list[str]:
    """Each environment's label in metrics: its name, with its index where two share a name."""
    names = [reference.name for reference in references]
    return [
        f"{name}-{index}" if names.count(name) > 1 else name for index, name in enumerate(names)
    ]


SUBMISSION_GROUPS_MAX = 1024
"""Their figures must fit a verdict's envelope."""


class Sampling(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How every rollout is sampled. No top-k, no top-p."""

    temperature: Annotated[float, Meta(gt=0, le=10)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    stop_ids: Annotated[list[messages.Count], Meta(min_length=1, max_length=16)]
    group_size: Annotated[int, Meta(ge=1, le=4096)] = 16
    groups_per_submission: Annotated[int, Meta(ge=1, le=SUBMISSION_GROUPS_MAX)] = 1
    swaps_max: Annotated[int, Meta(ge=0, le=64)] = 0

    def temperatures(self, environments: Sequence[EnvironmentReference]) -> list[float]:
        """The temperature of each environment's rollouts."""
        return [each.sampled_at(self.temperature) for each in environments]


def one_or_each(temperatures: list[float]) -> float | list[float]:
    """The temperature of all environments if it is one, else the list."""
    return temperatures if len(set(temperatures)) > 1 else temperatures[0]


class Schedule(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The number and size of the rollout steps, and how they overlap."""

    steps: Annotated[int, Meta(ge=1, le=1 << 30)] = 1000
    groups_per_step: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    asynchrony: Annotated[int, Meta(ge=0, le=64)] = 2
    max_staleness: Annotated[int, Meta(ge=0, le=256)] = 4
    old: Literal["generation", "step_start"] = "generation"


STEP_START_OBJECTIVES = ("icepop", "tis", "decoupled_ppo")
"""Objectives that weight tokens by the step's initial policy over the generating policy."""


class Optimiser(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """AdamW and its learning rate (defaults: the INTELLECT-2 recipe)."""

    learning_rate: messages.Share = 3e-7
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.99
    weight_decay: NotNegative = 0.0
    gradient_norm_max: Positive = 0.1
    warmup_steps: messages.Count = 25
    learning_rate_schedule: Literal["constant", "cosine", "linear", "wsd"] = "linear"
    decay_share: Annotated[float, Meta(gt=0, le=1)] = 0.2
    final_learning_rate_share: Fraction = 1.0
    optimiser_steps: Annotated[int, Meta(ge=1, le=1024)] = 1


class ProcessRewards(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Rewards of single tokens by a second model, which learns from outcomes alone (PRIME, arXiv
    2502.01456)."""

    weight: NotNegative = 0.0
    beta: Positive = 0.05
    learning_rate: messages.Share = 1e-6
    outcome_min: messages.Finite = 0.5


FormulaName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,39}\Z")]
FormulaOptions = Annotated[dict[OptionName, OptionValue], Meta(max_length=32)]

OF_COMPLETIONS = ("gspo", "gmpo", "luspo", "vespo", "synthesis")
"""Objectives that judge whole completions, or nothing."""

OBJECTIVES = (
    *("grpo", "dr_grpo", "dapo", "sapo", "cispo", "clip_cov", "kl_cov", "dppo"),
    *STEP_START_OBJECTIVES,
    *OF_COMPLETIONS,
)
"""Names of the objectives that are built in."""

OF_GROUPS = ("group", "rloo")
"""Advantages that divide by a number of the group."""

ADVANTAGES = (*OF_GROUPS, "maxrl", "batch", "reinforce_pp", "gdpo")
"""Names of the advantages that are built in."""


class Objective(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The objective and its coefficients (defaults: the INTELLECT-2 recipe)."""

    epsilon: WithinOne = 0.2
    """The ratio is clipped to 1 ± epsilon."""
    delta: messages.Finite = 4.0
    """Upper bound of the ratio for negative advantages; every objective but `cispo`."""
    kl_coefficient: NotNegative = 0.001
    entropy_coefficient: NotNegative = 0.0001
    normalise_by_std: bool = True
    name: FormulaName = "grpo"
    """One of `OBJECTIVES`, or the objective of a package that the trainers have. `synthesis` trains
    nothing: the policy stays as it is, and the trainer keeps the consumed rollouts."""
    epsilon_high: NotNegative = 0.0
    """The upper clip of the ratio is 1 + epsilon_high; 0 means epsilon."""
    weight_max: OneOrMore = 2.0
    """Upper bound of an importance weight; `cispo`, `tis`."""
    band_low: BelowOne = 0.5
    """Tokens with a smaller importance weight are masked; `icepop`."""
    band_high: OneOrMore = 5.0
    """Tokens with a larger importance weight are masked; `icepop`."""
    change_max: messages.Share = 0.2
    """Tokens whose probability has already changed by more in the advantage's direction are
    masked; `dppo`."""
    kl_by_ratio: bool = False
    """Weight the KL term by the ratio to the generating policy: its gradient is then the exact one,
    that of KL(policy ‖ base). By default it is that of KL(base ‖ policy)."""
    reserved: bool = False
    """False: earlier builds replayed the routing of mixtures of experts where it was true."""
    advantage: FormulaName = "group"
    """What a completion's reward is compared with: one of `ADVANTAGES`, or the advantage of a
    package that the trainers have."""
    process: ProcessRewards = ProcessRewards()
    behaviour: Literal["trainer", "engine"] = "trainer"
    """Whose log μ counts as the generating policy's. trainer: its own, computed with its own copy
    of that policy. engine: what the engine that sampled reported, where it lies within
    `thresholds.log_difference_max` of the trainer's; else the trainer's."""
    options: FormulaOptions = {}
    """Options of the formula `name`."""
    advantage_options: FormulaOptions = {}
    """Options of the formula `advantage`."""
    average: Literal["published", "tokens", "completions", "sums", "limit"] = "published"
    """Divisor of the policy loss: the batch's tokens; each completion's tokens, then completions;
    completions; completions times the length limit. published: the formula's, else tokens."""
    digest: Annotated[bytes, Meta(max_length=32)] = b""
    """Hash of the packages of `name` and `advantage`; empty: both are built in."""
    truncated: Literal["train", "leave_out"] = "train"
    """Whether completions that the length limit cut off are trained on. They count in their group
    either way (overlong filtering of DAPO, arXiv 2503.14476)."""
    overlong_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Tokens before the length limit over which a reward falls by `overlong_penalty` (DAPO)."""
    overlong_penalty: NotNegative = 1.0
    kl_estimate: Literal["k3", "k2"] = "k3"
    """The KL term of a token. k3: e^d - d - 1, d = log(base / policy). k2: d squared / 2."""
    sampler_kl_coefficient: NotNegative = 0.0
    """Coefficient of log²(π/μ) (Kimi K2.5, arXiv 2602.02276)."""
    drift_max: NotNegative = 0.0
    """Completions with A < 0 and a larger mean log(μ/π) per token are masked (DeepSeek-V3.2, arXiv
    2512.02556); 0: none."""
    teacher_weight: Fraction = 0.0
    """Share w of a teacher in each token's advantage: (1 - w)·A + w·log(teacher / policy), the
    reverse KL on the policy's own tokens. 0: no teacher; 1: rewards teach nothing."""
    teacher_prompt: Annotated[str, Meta(max_length=4096)] = ""
    """What the teacher reads for a prompt, or for its last message: text with `{prompt}`, and with
    `{answer}` or names of the task's data; empty: the same."""
    credit: Literal["rollout", "turns"] = "rollout"
    """rollout: every token has its rollout's advantage. turns: a turn's tokens have one of their
    own, where the environment says what each turn earned (parts `turn_1`, `turn_2` and so on)."""

    @property
    def learns(self) -> bool:
        """Whether the policy changes."""
        return self.name != "synthesis"

    @property
    def needs_spread(self) -> bool:
        """Whether groups whose rewards are all equal teach nothing."""
        return self.learns and not self.teacher_weight

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities under the base are needed."""
        return self.learns and bool(self.kl_coefficient or self.process.weight)

    @property
    def has_process(self) -> bool:
        """Whether a second model gives process rewards."""
        return self.learns and bool(self.process.weight)

    def problem(self, schedule: Schedule) -> str | None:
        """One sentence about the first invalid coefficient, or None."""
        high = self.epsilon_high or self.epsilon
        if not self.delta > 1 + high:
            return (
                f"objective.delta is {self.delta:g}; it must be greater than "
                f"1 + epsilon = {1 + high:g}"
            )
        if self.name in STEP_START_OBJECTIVES and schedule.old != "step_start":
            return (
                f"objective.name is {self.name!r} and schedule.old {schedule.old!r}; "
                "it weighs the step's start against the generating policy and needs step_start"
            )
        if self.reserved:
            return "objective.reserved is true; no build replays the routing of experts any more"
        if self.kl_by_ratio and self.kl_estimate == "k2":
            return 'objective.kl_by_ratio is for the estimate "k3": k2 has the exact gradient'
        if self.truncated != "train" and self.has_process:
            return 'objective.truncated is "leave_out", but process rewards need whole groups'
        if (self.process.weight or self.teacher_weight) and self.name in OF_COMPLETIONS:
            return (
                f"objective.name is {self.name!r}, which has no advantages of single tokens; make "
                "objective.process.weight and teacher_weight 0, or choose another objective"
            )
        if self.credit == "turns" and (
            self.name in OF_COMPLETIONS or self.has_process or self.advantage not in OF_GROUPS
        ):
            return (
                'objective.credit is "turns", which needs an objective of single tokens without '
                f"process rewards and one of the advantages {', '.join(OF_GROUPS)}; choose these, "
                'or make it "rollout"'
            )
        if self.teacher_prompt and not (self.teacher_weight and "{prompt}" in self.teacher_prompt):
            return (
                f"objective.teacher_prompt is {self.teacher_prompt!r:.60}; it must hold "
                "{prompt}, and needs a teacher_weight above 0"
            )
        return None


class Filters(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How a batch is filled when the online filter leaves groups out (by each environment's
    `spread`, `accuracy_min` and `accuracy_max`)."""

    fill: Literal["drop", "refill"] = "drop"
    refill_seconds: Annotated[float, Meta(gt=0, le=sys.float_info.max)] = 1800.0


ADAPTER_RANK_MAX = 512
"""Larger adapters save nothing: 256 and 512 are the largest in use."""

ADAPTER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer that can have an adapter."""


class Adapter(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """LoRA: train two thin matrices per target, and publish only those.

    A target's weight W counts as W + alpha / rank · B · A, with A [rank, inputs] and B [outputs,
    rank]. W is policy 0's, and never changes."""

    rank: Annotated[int, Meta(ge=0, le=ADAPTER_RANK_MAX)] = 0
    alpha: Annotated[float, Meta(gt=0, le=1e6)] = 32.0
    targets: Annotated[list[messages.Name], Meta(max_length=7)] = []

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def names(self) -> list[str]:
        """The targets, whether they are listed or not."""
        return self.targets or list(ADAPTER_TARGETS)

    def problem(self) -> str | None:
        """One sentence about targets that no model has, or None."""
        for name in self.targets:
            if name not in ADAPTER_TARGETS:
                known = ", ".join(ADAPTER_TARGETS)
                return f"adapter.targets names {name!r:.60}; there are: {known}"
            if self.targets.count(name) > 1:
                return f"adapter.targets names {name!r} twice; list each once"
        return None


class Thresholds(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Thresholds of a validator's statistical checks; `swarm run create` measures them.

    The defaults fit the demo's model on native engines. Every other model needs its own: until they
    are measured for it, statistics are reported and decide nothing."""

    proof_exponents_min: Annotated[int, Meta(ge=0, le=128)] = 113
    proof_mantissa_mean_max: NotNegative = 10.0
    proof_mantissa_median_max: NotNegative = 4.0
    proof_chunks_share_min: Fraction = 1.0
    honest_margin: WithinOne = 0.0002
    margin_max: Positive = 1.4
    honest_proof_error: WithinOne = 0.03
    eviction_p_value: BelowOne = 1e-9
    recompute_safety: OneOrMore = 3.0
    recompute_share_min: messages.Share = 0.05
    audit_share: Annotated[float, Meta(ge=0, le=1)] = 0.1
    stake_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    proven_tokens: messages.Count = 4096
    honest_outliers: WithinOne = 1e-5
    refusal_p_value: WithinOne = 1e-6
    second_share: Annotated[float, Meta(ge=0, le=1)] = 0.05
    reserved: Annotated[list[str], Meta(max_length=0)] = []
    measured_tokens: messages.Count = 0
    measured_dtypes: Annotated[list[messages.Name], Meta(max_length=16)] = []
    log_difference_max: Annotated[float, Meta(gt=0, le=20)] = 0.5

    @property
    def observes(self) -> bool:
        """Whether statistics are only reported."""
        return self.measured_tokens == 0


class Admissions(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Who may join the run, and how many."""

    policy: Literal["open", "allow-list", "invite"] = "open"
    allowed: Annotated[list[messages.Key], Meta(max_length=1000)] = []
    unproven_max: messages.Count = 100
    further_roles: Annotated[list[messages.Role], Meta(max_length=32)] = []
    helpers_max: messages.Count = 250
    range_max: messages.Count = 32
    trial: bool = True
    trial_seconds: messages.Seconds = 600.0


class Limits(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Bounds that protect peers from floods, and the deadlines of validators."""

    submission_bytes_max: messages.Count = 64 << 20
    submissions_unjudged_max: Annotated[int, Meta(ge=1, le=1 << 53)] = 8
    acknowledgement_seconds: Positive = 5.0
    verdict_seconds: Positive = 30.0
    epoch_entries: messages.Count = 20_000
    grading_seconds: Annotated[float, Meta(ge=1, le=86_400)] = 120.0


TRAINERS_MAX = 64
"""Trainers of one run."""

STRANGERS_MAX = 64
"""Strangers whose contributions one record can list."""

Compression = Literal["fp32", "int8"]
"""Form of a contribution. int8: one byte per parameter, with error feedback."""


SHARDS_MAX = 64
"""Most parts in which a round is merged."""


class Outer(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The outer loop of several trainers (DiLoCo; defaults: the INTELLECT-1 recipe)."""

    rounds: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    inner_steps: Annotated[int, Meta(ge=1, le=1 << 20)] = 100
    momentum: BelowOne = 0.9
    learning_rate: Annotated[float, Meta(gt=0, le=2)] = 0.7
    quorum: Annotated[int, Meta(ge=1, le=TRAINERS_MAX)] = 2
    grace_seconds: messages.Seconds = 120.0
    deadline_seconds: Positive = 3600.0
    staleness_max: Annotated[int, Meta(ge=0, le=16)] = 1
    compression: Compression = "int8"
    step_tokens_max: Annotated[int, Meta(ge=1, le=1 << 32)] = 1 << 22
    join: Literal["free", "blocking"] = "free"
    join_seconds: Positive = 600.0
    admission: Literal["named", "scored"] = "named"
    strangers_max: Annotated[int, Meta(ge=0, le=STRANGERS_MAX)] = 32
    strangers_share: Annotated[float, Meta(ge=0, le=0.9)] = 0.5
    shards: Annotated[int, Meta(ge=1, le=SHARDS_MAX)] = 1
    audit_share: Annotated[float, Meta(ge=0, le=1)] = 0.02

    @property
    def is_scored(self) -> bool:
        return self.admission == "scored"

    @property
    def contribution_tokens_max(self) -> int:
        """Most tokens that the inner steps of one contribution can train on."""
        return self.inner_steps * self.step_tokens_max

    def problem(self) -> str | None:
        """One sentence about terms that no run can have, or None."""
        if self.is_scored and self.shards > 1:
            return (
                f'outer.shards is {self.shards} and outer.admission "scored", but strangers\' '
                'contributions are measured whole; choose shards = 1, or admission = "named"'
            )
        return None


class Values(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How the values of states within a rollout are estimated (VinePPO, arXiv 2410.01679)."""

    estimate: Literal["group", "continuations"] = "group"
    share: Annotated[float, Meta(gt=0, le=0.9)] = 0.5
    segment_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 64
    boundary_ids: Annotated[list[messages.Count], Meta(max_length=64)] = []
    states_max: Annotated[int, Meta(ge=1, le=4096)] = 1024
    wait_seconds: messages.Seconds = 600.0

    def problem(self, sampling: Sampling, schedule: Schedule, objective: Objective) -> str | None:
        """One sentence about the first setting that continuations cannot work with, or None."""
        if self.estimate == "group":
            return None
        if schedule.asynchrony < 1:
            return (
                "schedule.asynchrony is 0, so a batch is due before the next step, which continues "
                'its rollouts, may open; make it at least 1, or values.estimate "group"'
            )
        if self.segment_tokens >= sampling.max_new_tokens:
            return (
                f"values.segment_tokens is {self.segment_tokens}, but a rollout has at most "
                f"{sampling.max_new_tokens} tokens (sampling.max_new_tokens), so no state would "
                'lie within one; make it smaller, or values.estimate "group"'
            )
        if objective.advantage not in OF_GROUPS:
            return (
                f'values.estimate is "continuations", but objective.advantage is '
                f"{objective.advantage!r}; it must be one of {', '.join(OF_GROUPS)}"
            )
        if objective.credit == "turns":
            return "values.estimate and objective.credit both divide a rollout; use one of the two"
        if objective.name in OF_COMPLETIONS or objective.has_process:
            also = " with process rewards" if objective.has_process else ""
            return (
                f'values.estimate is "continuations", but objective.name {objective.name!r}{also} '
                'does not take them; make it "group", or choose another objective'
            )
        return None


class RunManifest(messages.StateMessage, frozen=True, kw_only=True):
    """One training job, signed by its owner. Run id: `<owner peer id>/<name>`."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}\Z")]
    version: Annotated[int, Meta(ge=1, le=VERSION_MAX)]
    model: messages.Name
    tokenizer_hash: messages.Digest
    environments: Environments
    sampling: Sampling
    schedule: Schedule = Schedule()
    objective: Objective = Objective()
    optimiser: Optimiser = Optimiser()
    trainers: Annotated[list[TrustedKey], Meta(min_length=1, max_length=TRAINERS_MAX)]
    validators: Annotated[list[TrustedKey], Meta(min_length=1, max_length=256)]
    admissions: Admissions = Admissions()
    thresholds: Thresholds = Thresholds()
    limits: Limits = Limits()
    checkpoints_kept: Annotated[int, Meta(ge=2, le=1000)] = 5
    filters: Filters = Filters()
    broadcast_mode: Literal["open", "relay-only"] = "open"
    adapter: Adapter = Adapter()
    environment_peers: Annotated[list[TrustedKey], Meta(max_length=64)] = msgspec.field(
        default_factory=list
    )
    outer: Outer = Outer()
    values: Values = Values()
    needs: ProtocolVersion = 1
    standbys: Annotated[list[TrustedKey], Meta(max_length=8)] = msgspec.field(default_factory=list)
    successors: Annotated[list[messages.Key], Meta(max_length=8)] = msgspec.field(
        default_factory=list
    )
    delegation: Annotated[bytes, Meta(max_length=48 << 10)] = b""

    def order(self) -> tuple[int, ...]:
        return (self.version,)

    def is_trainer(self, peer: str) -> bool:
        return peer in self.trainer_ids()

    def trainer_ids(self) -> list[str]:
        """The trainers trusted in this version, in the manifest's order."""
        return [key.peer for key in self.trainers if key.from_version <= self.version]

    def is_validator(self, peer: str) -> bool:
        return peer in self.validator_ids()

    def validator_ids(self) -> list[str]:
        """The validators trusted in this version, in the manifest's order."""
        return [key.peer for key in self.validators if key.from_version <= self.version]

    def is_environment_peer(self, peer: str) -> bool:
        return peer in self.environment_ids()

    def environment_ids(self) -> list[str]:
        """The environment peers trusted in this version, in the manifest's order."""
        return [key.peer for key in self.environment_peers if key.from_version <= self.version]

    def is_standby(self, peer: str) -> bool:
        return peer in self.standby_ids()

    def may_train(self, peer: str) -> bool:
        """Whether a peer is a trainer, or may take a trainer's place."""
        return self.is_trainer(peer) or self.is_standby(peer)

    def standby_ids(self) -> list[str]:
        """The standbys trusted in this version, in the manifest's order."""
        return [key.peer for key in self.standbys if key.from_version <= self.version]

    def trusted_ids(self) -> list[str]:
        """The trainers, validators, environment peers and standbys of this version, once each."""
        named = (self.trainer_ids(), self.validator_ids(), self.environment_ids())
        return list(dict.fromkeys(peer for ids in (*named, self.standby_ids()) for peer in ids))


NEEDS_INDEX = RunManifest.__struct_fields__.index("needs")
"""Position of `needs` on the wire. It never changes: older ones find it in what they cannot
decode."""
