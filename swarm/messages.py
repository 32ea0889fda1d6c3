"""Every message there is, as typed, bounded structures.

A message travels as the payload of a signed envelope (`swarm.envelope`). *State* messages are
monotone per sender and kind: only the highest counts. *Event* messages stand for themselves; they
are deduplicated by hash and their durable effects are keyed by content. Sizes are bounded here, at
decoding, so that nothing later meets a list longer than it expects.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(max_length=200)]
Line = Annotated[str, Meta(max_length=500)]
Key = Annotated[str, Meta(min_length=46, max_length=64)]
"""A peer id."""
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
RunDigest = Annotated[bytes, Meta(max_length=32)]
"""Of a run manifest's content; empty where an older version of Swarm says nothing of it."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
Addresses = Annotated[list[Annotated[str, Meta(max_length=300)]], Meta(max_length=16)]
ROLE_PATTERN = r"^[a-z][a-z0-9-]{0,19}\Z"
Role = Annotated[str, Meta(pattern=ROLE_PATTERN)]
"""A word that is safe to show and to sort by. Which ones a run knows, its manifest says."""
Roles = Annotated[list[Role], Meta(max_length=8)]
Speed = Annotated[float, Meta(ge=0, le=1e12)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

DOING_CHARACTERS_MAX = 80
"""Of the few words in which a peer says what it is doing."""

DOING_REPEATED_MAX = 40
"""Of them a trusted peer tells others so many: they are a stranger's."""


class Message(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Base of every message. Fields are encoded in order; new ones go last, with a default."""

    def order(self) -> tuple[int, ...]:
        """What orders states before the envelope's sequence; a trainer's: (lineage, step)."""
        return ()


class StateMessage(Message, frozen=True, kw_only=True):
    """A message of which only the newest per sender counts."""


# --- peers -----------------------------------------------------------------------------------


class PeerRecord(StateMessage, frozen=True, kw_only=True):
    """Where a peer is and what it does: stored in the DHT under `/swarm-peer/<peer id>`."""

    roles: Roles
    addresses: Addresses
    """Multiaddrs."""
    bulk_addresses: Addresses = []
    """`http://host:port` roots."""
    agent: Name = ""


class Heartbeat(StateMessage, frozen=True, kw_only=True):
    """Said every 10 s to one trusted peer, which answers with a renewed admission."""

    roles: Roles
    policy: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    """Step of the newest policy held; -1 for none."""
    step: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    """Step being worked on."""
    doing: Annotated[str, Meta(max_length=DOING_CHARACTERS_MAX)] = ""
    tokens_per_second: Speed = 0.0
    bytes_sent: Count = 0
    bytes_received: Count = 0


class Present(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One peer as a trusted peer last heard of it."""

    peer: Key
    heartbeat: Heartbeat
    """Its `doing` cut to `DOING_REPEATED_MAX` characters."""
    age_seconds: Seconds
    standing: Literal["live", "suspected", "gone", "evicted"]


class Presence(StateMessage, frozen=True, kw_only=True):
    """What one trusted peer knows of who is there: in a large run a page of it, the next one a
    tick later."""

    peers: Annotated[list[Present], Meta(max_length=200)]


# --- runs ------------------------------------------------------------------------------------


class TrustedKey(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A key the owner trusts, from a version of the manifest on."""

    peer: Key
    from_version: Count = 1


ENVIRONMENTS_MAX = 16
"""Environments that one run may mix."""

OptionName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,39}\Z")]
OptionText = Annotated[str, Meta(max_length=1000)]
OptionScalar = bool | int | float | OptionText
OptionValue = OptionScalar | Annotated[list[OptionScalar], Meta(max_length=256)]


class EnvironmentReference(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One of a run's environments: what it is, its share of the tasks, and its filter.

    Name, version, options and a hash that shows both sides render alike are fixed for the run.
    """

    name: Name
    version: Name
    probe_hash: Digest = bytes(32)
    """BLAKE3 over the token ids of 64 rendered probe tasks; computed by `swarm run create`."""
    weight: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    """Its share of the groups is this by the sum over all of the run's environments."""
    options: Annotated[dict[OptionName, OptionValue], Meta(max_length=32)] = {}
    """What the environment is made with; which ones there are, the environment says."""
    where: Literal["local", "served"] = "local"
    """local: each worker renders its tasks. served: a trusted peer does."""
    spread: Literal["task", "total"] = "task"
    """Rewards that must differ within a group: those of the task, or with the length penalty."""
    accuracy_min: float = 0.0
    """Groups whose mean task reward is lower are left out."""
    accuracy_max: float = 1.0
    """Likewise higher. (PRIME keeps 0.2 to 0.8.)"""


Environments = Annotated[
    list[EnvironmentReference], Meta(min_length=1, max_length=ENVIRONMENTS_MAX)
]


class Sampling(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How every rollout is sampled. No top-k, no top-p."""

    temperature: Annotated[float, Meta(gt=0, le=10)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    stop_ids: Annotated[list[Count], Meta(min_length=1, max_length=16)]
    """The tokenizer's; there is no default that fits every model."""
    group_size: Annotated[int, Meta(ge=1, le=4096)] = 16
    groups_per_submission: Annotated[int, Meta(ge=1, le=4096)] = 1


class Schedule(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How steps are cut and overlapped."""

    steps: Annotated[int, Meta(ge=1, le=1 << 30)] = 1000
    """Rollout steps in all; the run is over after the last."""
    groups_per_step: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    asynchrony: Annotated[int, Meta(ge=0, le=64)] = 2
    max_staleness: Annotated[int, Meta(ge=0, le=256)] = 4
    old: Literal["generation", "step_start"] = "generation"


STEP_START_OBJECTIVES = ("icepop", "tis", "decoupled_ppo")
"""Objectives that weigh the policy at the step's start against the one that generated."""


class Optimiser(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """AdamW and its learning rate (defaults: the INTELLECT-2 recipe)."""

    learning_rate: float = 3e-7
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    gradient_norm_max: float = 0.1
    """Larger gradients are scaled down to this norm."""
    warmup_steps: Count = 25
    """Optimiser steps over which the rate rises."""
    learning_rate_schedule: Literal["constant", "cosine", "linear", "wsd"] = "linear"
    """What follows the warm-up. wsd: constant, then linear decay over the last `decay_share`."""
    decay_share: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """Share of all optimiser steps that wsd decays over."""
    final_learning_rate_share: float = 1.0
    """Decay ends at this share of the rate; 1 keeps it constant."""
    optimiser_steps: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Optimiser steps per rollout step."""


class Objective(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The objective and its numbers (defaults: the INTELLECT-2 recipe)."""

    epsilon: float = 0.2
    """The ratio is clipped to 1 ± epsilon."""
    delta: float = 4.0
    """Upper bound of the ratio where the advantage is negative; `grpo` only."""
    kl_coefficient: float = 0.001
    entropy_coefficient: float = 0.0001
    normalise_by_std: bool = True
    name: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "icepop",
        "tis",
        "decoupled_ppo",
        "dppo",
    ] = "grpo"
    """Formula and source of each: `peers/trainer/learning/objective.py`."""
    epsilon_high: float = 0.0
    """Clips the ratio to 1 + this above; 0 means epsilon."""
    weight_max: float = 2.0
    """Upper bound of an importance weight; `cispo`, `tis`."""
    band_low: float = 0.5
    """Tokens whose importance weight lies below are left out; `icepop`."""
    band_high: float = 5.0
    """Likewise above."""
    change_max: float = 0.2
    """Tokens whose probability has moved further the way they are pushed are left out; `dppo`."""
    kl_by_ratio: bool = False
    """Weight the KL term by the ratio to the generating policy: unbiased on stale rollouts."""

    def problem(self, schedule: Schedule) -> str | None:
        """What is wrong with these numbers, in one sentence, or None."""
        high = self.epsilon_high or self.epsilon
        if not 0 < self.epsilon < 1 or self.epsilon_high < 0:
            return (
                f"objective.epsilon is {self.epsilon:g} and objective.epsilon_high "
                f"{self.epsilon_high:g}; epsilon must lie in (0, 1), and epsilon_high be 0 or more"
            )
        if not self.delta > 1 + high:
            return (
                f"objective.delta is {self.delta:g}; it must be greater than "
                f"1 + epsilon = {1 + high:g}"
            )
        if not 0 <= self.band_low < 1 < self.band_high:
            return (
                f"objective.band_low is {self.band_low:g} and objective.band_high "
                f"{self.band_high:g}; the band must hold 1, the weight of an unchanged token"
            )
        if not (self.weight_max >= 1 and 0 < self.change_max <= 1):
            return (
                f"objective.weight_max is {self.weight_max:g} and objective.change_max "
                f"{self.change_max:g}; weight_max must be at least 1, change_max lie in (0, 1]"
            )
        if self.name in STEP_START_OBJECTIVES and schedule.old != "step_start":
            return (
                f"objective.name is {self.name!r} and schedule.old {schedule.old!r}; "
                "it weighs the step's start against the generating policy and needs step_start"
            )
        return None


class Filters(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What happens when too few of a step's accepted groups are worth training on (which of them
    are, each environment's `spread` and bounds say)."""

    fill: Literal["drop", "refill"] = "drop"
    """drop: a batch is `groups_per_step` accepted groups, less what is left out. refill: more are
    asked for until as many remain."""
    refill_seconds: Annotated[float, Meta(gt=0)] = 1800.0
    """A batch with anything in it is trained on after this, full or not (a published step's
    rollouts take 22 to 29 minutes)."""


class Thresholds(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Where a validator's statistical checks refuse (design §7).

    The defaults fit runs in which everybody uses the native engine. Engines whose kernels round
    differently need more room: TOPLOC's authors found 90 exponents enough for any of theirs.
    """

    proof_exponents_min: Annotated[int, Meta(ge=0, le=128)] = 120
    """Exponents of a proof's 128 that must agree. Measured on the demo's policy: honest fp32 128,
    honest bf16 at least 122, weights altered by 2 % at most 119."""
    proof_mantissa_mean_max: float = 10.0
    proof_mantissa_median_max: float = 8.0
    proof_chunks_share_min: float = 1.0
    """Share of a submission's checked chunks that must pass."""
    margin_mean_max: float = 0.01
    """Pooled score: mean of min(margin, 1) over positions with p_max < 0.99. Honest bf16 at most
    0.0019, another policy five steps older 0.025 on average."""
    margin_max: float = 2.0
    """Hard bound on any single margin, the ending included. Honest bf16 at most 0.34."""
    honest_mismatch_rate: float = 0.01
    """Upper bound on an honest peer's share of tokens that are not the recomputed argmax."""
    eviction_p_value: float = 1e-9
    """A worker whose pooled mismatches are less probable than this is evicted."""
    prefill_share_new: float = 1.0
    """Share of submissions prefilled while a worker is new."""
    prefill_share_proven: float = 0.25
    """Share once it has a record."""
    proven_after: Count = 8
    """Accepted submissions until a worker is proven."""


class Admissions(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Who may take part."""

    policy: Literal["open", "allow-list"] = "open"
    allowed: Annotated[list[Key], Meta(max_length=1000)] = []
    unproven_max: Count = 100
    """Peers with the role `inference` and without a record admitted at once. Each trusted peer
    admits an even share of these and of the next."""
    further_roles: Annotated[list[Role], Meta(max_length=32)] = []
    """Roles that peers may be admitted with beside `swarm.run.admission.ROLES`."""
    helpers_max: Count = 250
    """Peers without the role `inference` admitted at once."""
    range_max: Count = 32
    """Of either sort within one /24 (IPv6: /48); private and loopback ranges are not bounded."""


class Limits(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Bounds that keep a run's peers from being flooded, and its deadlines."""

    submission_bytes_max: Count = 64 << 20
    submissions_unjudged_max: Count = 8
    """A worker's submissions that may wait for a verdict."""
    acknowledgement_seconds: float = 5.0
    verdict_seconds: float = 30.0
    """Without an acknowledgement or a verdict by then, the next validator in rank is asked."""


class RunManifest(StateMessage, frozen=True, kw_only=True):
    """One training job, signed by its owner. Run id: `<owner peer id>/<name>`."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,62}\Z")]
    version: Annotated[int, Meta(ge=1, le=2**53)]
    model: Name
    tokenizer_hash: Digest
    environments: Environments
    sampling: Sampling
    schedule: Schedule = Schedule()
    objective: Objective = Objective()
    optimiser: Optimiser = Optimiser()
    trainers: Annotated[list[TrustedKey], Meta(min_length=1, max_length=16)]
    validators: Annotated[list[TrustedKey], Meta(min_length=1, max_length=256)]
    admissions: Admissions = Admissions()
    thresholds: Thresholds = Thresholds()
    limits: Limits = Limits()
    checkpoints_kept: Annotated[int, Meta(ge=2, le=1000)] = 5
    filters: Filters = Filters()
    broadcast_mode: Literal["open", "relay-only"] = "open"
    """open: every peer passes pieces on. relay-only: relays and trusted peers do, and the others
    deal with nobody else (`swarm.run.run.Run.serves`)."""

    def order(self) -> tuple[int, ...]:
        return (self.version,)

    def is_trainer(self, peer: str) -> bool:
        return any(key.peer == peer and key.from_version <= self.version for key in self.trainers)

    def is_validator(self, peer: str) -> bool:
        return peer in self.validator_ids()

    def validator_ids(self) -> list[str]:
        """Validators in force, in the manifest's order."""
        return [key.peer for key in self.validators if key.from_version <= self.version]

    def trusted_ids(self) -> list[str]:
        """Trainers and validators in force, without repeats."""
        trainers = [key.peer for key in self.trainers if key.from_version <= self.version]
        return list(dict.fromkeys(trainers + self.validator_ids()))


# --- admission -------------------------------------------------------------------------------


class AdmissionRequest(Message, frozen=True, kw_only=True):
    """Asks a trusted peer to be let into the run."""

    roles: Roles
    invite: Name = ""


class Admission(Message, frozen=True, kw_only=True):
    """A trusted peer's word that `peer` takes part, until the envelope expires (a short lease)."""

    peer: Key
    roles: Roles


class AdmissionRefused(Message, frozen=True, kw_only=True):
    """Why a peer was not admitted, in one sentence."""

    peer: Key
    reason: Line
    later: bool = False
    """Whether asking again later may help: the run is full."""


# --- the trainer's word ----------------------------------------------------------------------


class CheckpointReference(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A checkpoint: policy `step` of a lineage, and the manifest that lists its pieces."""

    lineage: Count
    step: Count
    digest: Digest
    """BLAKE3-256 of the checkpoint manifest."""
    size_bytes: Annotated[int, Meta(ge=1, le=256 << 20)]
    """Of the checkpoint manifest."""

    def __str__(self) -> str:
        return f"policy {self.step} of lineage {self.lineage}"


class Checkpoint(StateMessage, frozen=True, kw_only=True):
    """Policy `step` of a lineage is published as a manifest of pieces."""

    lineage: Count
    step: Count
    manifest_digest: Digest
    manifest_bytes: Annotated[int, Meta(ge=1, le=256 << 20)]
    total_bytes: Count
    reward: float = 0.0
    """Mean reward of the batch that made it."""

    @property
    def reference(self) -> CheckpointReference:
        return CheckpointReference(
            lineage=self.lineage,
            step=self.step,
            digest=self.manifest_digest,
            size_bytes=self.manifest_bytes,
        )

    def order(self) -> tuple[int, ...]:
        return (self.lineage, self.step)


class StepOrder(StateMessage, frozen=True, kw_only=True):
    """Step `step` is open: use exactly this policy, with this nonce."""

    lineage: Count
    step: Count
    revision: Count
    """Grows when the order for the same step changes."""
    policy: Count
    manifest_digest: Digest
    """Checkpoint manifest of that policy, so that a newcomer needs no older announcement."""
    manifest_bytes: Annotated[int, Meta(ge=1, le=256 << 20)]
    nonce: Digest
    groups_wanted: Count
    """Still wanted when this was signed; 0 closes the step."""
    submissions_max: Count
    """Submissions one worker may make for this step."""
    final: bool = False
    """The run is over: nothing will be opened after this."""
    run_version: Count = 0
    """Of the run manifest that everything about this step follows."""
    run_digest: RunDigest = b""
    """Names that manifest (`swarm.run.manifest.content_digest`). The same over all revisions."""

    @property
    def checkpoint(self) -> CheckpointReference:
        """The policy to use."""
        return CheckpointReference(
            lineage=self.lineage,
            step=self.policy,
            digest=self.manifest_digest,
            size_bytes=self.manifest_bytes,
        )

    def order(self) -> tuple[int, ...]:
        return (self.lineage, self.step, self.revision)


# --- rollouts --------------------------------------------------------------------------------


class Submission(Message, frozen=True, kw_only=True):
    """A worker offers one file of rollout groups, named by its hash."""

    lineage: Count
    step: Count
    policy: Count
    number: Count
    """Consecutive from 0 within the step."""
    digest: Digest
    size_bytes: Count
    groups: Annotated[int, Meta(ge=1, le=4096)]
    run_digest: RunDigest = b""
    """Of the run manifest it was made under: the step order's."""


class Acknowledgement(Message, frozen=True, kw_only=True):
    """A validator has the file, durably, and owes a verdict within the run's limit: so the trainer
    counts on its groups. What the worker itself said is told to nobody else."""

    submission: Digest
    worker: Key
    lineage: Count = 0
    groups: Annotated[int, Meta(ge=0, le=4096)] = 0


class Check(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """One check of a submission: its figure against its threshold."""

    name: Annotated[str, Meta(max_length=40)]
    figure: float
    threshold: float
    passed: bool


EnvironmentIndex = Annotated[int, Meta(ge=0, le=ENVIRONMENTS_MAX - 1)]
Reward = Annotated[float, Meta(ge=-1e6, le=1e6)]
Rewards = Annotated[list[Annotated[list[Reward], Meta(max_length=4096)]], Meta(max_length=4096)]


class Verdict(Message, frozen=True, kw_only=True):
    """A validator's judgement: the worker's receipt, and the only rewards ever trained on."""

    submission: Digest
    size_bytes: Count
    worker: Key
    lineage: Count
    step: Count
    policy: Count
    number: Count
    outcome: Literal["accepted", "refused", "quarantined"]
    failed: Annotated[str, Meta(max_length=40)] = ""
    """Name of the check that failed; empty when accepted."""
    detail: Line = ""
    proven_fault: bool = False
    """Anyone can recompute the fault exactly from signed bytes."""
    checks: Annotated[list[Check], Meta(max_length=32)] = []
    rewards: Rewards = []
    """[groups][group size], computed by the validator; empty unless accepted or quarantined."""
    log_index: int = -1
    """Where this verdict stands in the validator's log; -1: in none."""
    task_means: Annotated[list[Reward], Meta(max_length=4096)] = []
    """Mean reward of each group without the length penalty; empty: there is no penalty."""
    task_spreads: Annotated[list[Reward], Meta(max_length=4096)] = []
    """Likewise largest less smallest."""
    environments: Annotated[list[EnvironmentIndex], Meta(max_length=4096)] = []
    """Of each group, the index among the run's environments; empty: all are the first's."""
    rollouts_digest: Annotated[bytes, Meta(max_length=32)] = b""
    """BLAKE3-256 of the rollouts in canonical form, which the validator serves and the trainer
    trains on; empty unless accepted."""
    rollouts_bytes: Count = 0


class Eviction(Message, frozen=True, kw_only=True):
    """A trusted peer puts a peer out of the run; only the owner can reinstate it."""

    peer: Key
    reason: Line
    submission: Annotated[bytes, Meta(max_length=32)] = b""
    figure: float = 0.0
    threshold: float = 0.0


class Reinstatement(Message, frozen=True, kw_only=True):
    """The owner takes an evicted peer back; overrules evictions issued before it."""

    peer: Key
    reason: Line = ""


# --- ledger ----------------------------------------------------------------------------------


class LogHead(StateMessage, frozen=True, kw_only=True):
    """Signed head of a trusted peer's append-only log (RFC 6962).

    The newest counts, not the largest: a log that shrank must show.
    """

    size: Count
    root: Digest


KINDS: dict[str, type[Message]] = {
    "peer_record": PeerRecord,
    "heartbeat": Heartbeat,
    "presence": Presence,
    "run_manifest": RunManifest,
    "admission_request": AdmissionRequest,
    "admission": Admission,
    "admission_refused": AdmissionRefused,
    "checkpoint": Checkpoint,
    "step_order": StepOrder,
    "submission": Submission,
    "acknowledgement": Acknowledgement,
    "verdict": Verdict,
    "eviction": Eviction,
    "reinstatement": Reinstatement,
    "log_head": LogHead,
}
"""Wire name of every kind."""

_KIND_OF = {message_type: kind for kind, message_type in KINDS.items()}


def kind_of(message: Message) -> str:
    """The wire name of a message's kind."""
    return _KIND_OF[type(message)]
