"""The messages of the protocol, as typed, bounded structures; `swarm.wire.manifest` has the run's.

A message is the payload of a signed envelope (`swarm.wire.envelope`). *State* messages are monotone
per sender and kind: only the highest is valid. Each *event* message is valid by itself; events are
deduplicated by hash, and their durable effects are keyed by content. Sizes are bounded here, at
decoding, so that no later code meets longer lists. docs/protocol.md explains every field."""

import sys
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarm.wire.protocol import ProtocolVersion

Name = Annotated[str, Meta(max_length=200)]
Line = Annotated[str, Meta(max_length=500)]
Key = Annotated[str, Meta(min_length=46, max_length=64)]
"""A peer id."""
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
RunDigest = Annotated[bytes, Meta(max_length=32)]
"""Hash of a run manifest's content; empty in a message of an older version of Swarm."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
Addresses = Annotated[list[Annotated[str, Meta(max_length=300)]], Meta(max_length=16)]
ROLE_PATTERN = r"^[a-z][a-z0-9-]{0,19}\Z"
Role = Annotated[str, Meta(pattern=ROLE_PATTERN)]
"""A word that is safe to display and to sort by. The run's manifest lists the roles it knows."""
Roles = Annotated[list[Role], Meta(max_length=8)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A number that is neither NaN nor infinite. Every float of a message is one, or has narrower
bounds, so that decoding refuses all others."""
Speed = Annotated[float, Meta(ge=0, le=1e12)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

DOING_CHARACTERS_MAX = 80
"""Longest description of what a peer is doing, in its own heartbeat."""

DOING_REPEATED_MAX = 40
"""Characters of that description that a trusted peer forwards: the text is a stranger's."""


Build = Annotated[str, Meta(pattern=r"^[0-9A-Za-z.+-]{0,20}\Z")]
"""Version of a peer's Swarm, for people."""


class Message(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Base of every message. Fields are encoded in order; new fields go last, with a default."""

    def order(self) -> tuple[int, ...]:
        """Sort key of states, compared before the envelope's sequence number."""
        return ()


class StateMessage(Message, frozen=True, kw_only=True):
    """A message of which only the newest per sender is valid."""


# --- peers -----------------------------------------------------------------------------------


class PeerRecord(StateMessage, frozen=True, kw_only=True):
    """A peer's roles and addresses, stored in the DHT under `/swarm-peer/<peer id>`."""

    roles: Roles
    addresses: Addresses
    bulk_addresses: Addresses = []
    agent: Name = ""


Region = Annotated[str, Meta(pattern=r"^[a-z0-9-]{0,24}\Z")]
"""Where a peer says it is, such as `eu-west`; empty if it says nothing. For display only."""

Reached = Annotated[str, Meta(pattern=r"^[a-z ]{0,16}\Z")]
"""How others reach a peer, by its own word: `public`, `port mapped`, `punched`, `relay only`; empty
if it does not know. For display only."""

SOURCE_BYTES = 8

Permille = Annotated[int, Meta(ge=0, le=1000)]


class Arrival(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How the newest policy comes, or came, to a peer; its own word, for display."""

    policy: Count
    held: Permille
    source: Annotated[bytes, Meta(max_length=SOURCE_BYTES)] = b""
    source_share: Permille = 0
    sources: Annotated[int, Meta(ge=0, le=10_000)] = 0


class Heartbeat(StateMessage, frozen=True, kw_only=True):
    """Sent every 10 s to one trusted peer, which answers with a renewed admission."""

    roles: Roles
    policy: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    step: Annotated[int, Meta(ge=-1, le=2**53)] = -1
    doing: Annotated[str, Meta(max_length=DOING_CHARACTERS_MAX)] = ""
    tokens_per_second: Speed = 0.0
    bytes_sent: Count = 0
    bytes_received: Count = 0
    protocol: ProtocolVersion = 1
    build: Build = ""
    region: Region = ""
    arrival: Arrival | None = None
    reached: Reached = ""
    leaving: Literal["", "left", "finished"] = ""


Entry = Annotated[bytes, Meta(max_length=16)]
"""Random bytes that a trusted peer draws for a peer when it first admits it. With the step's nonce
they determine the peer's prompts and noise."""

LOST_MAX = 200
"""Most peers in one presence digest whose slots were taken."""


class Slot(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A member's slot, which every trusted peer knows."""

    network: Annotated[str, Meta(max_length=50)] = ""
    admitted_ms: Count = 0
    entry: Entry = b""
    idle_seconds: Seconds = 0.0
    stake: Count = 0


PeerState = Literal["live", "suspected", "gone", "left", "finished", "evicted"]


class Present(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The last heartbeat of one peer, as a trusted peer received it."""

    peer: Key
    heartbeat: Heartbeat
    age_seconds: Seconds
    standing: Literal["live", "suspected", "gone", "evicted"]
    slot: Slot | None = None

    @property
    def state(self) -> PeerState:
        """What people read: whoever is gone may have said goodbye."""
        return self.heartbeat.leaving or "gone" if self.standing == "gone" else self.standing


class Presence(StateMessage, frozen=True, kw_only=True):
    """The peers that one trusted peer has heard from. In a large run a message holds one page of
    them; the next page follows a tick later."""

    peers: Annotated[list[Present], Meta(max_length=200)]
    lost: Annotated[list[Key], Meta(max_length=LOST_MAX)] = []


# --- admission -------------------------------------------------------------------------------


class AdmissionRequest(Message, frozen=True, kw_only=True):
    """Asks a trusted peer for admission to the run."""

    roles: Roles
    protocol: ProtocolVersion = 1
    build: Build = ""


INVITE_ID_BYTES = 16

InviteId = Annotated[bytes, Meta(min_length=INVITE_ID_BYTES, max_length=INVITE_ID_BYTES)]


class Invite(Message, frozen=True, kw_only=True):
    """The owner's permission for one peer to join. The envelope's expiry ends its redemption."""

    id: InviteId


class Admission(Message, frozen=True, kw_only=True):
    """A trusted peer's permission for `peer` to take part until the envelope expires (a lease)."""

    peer: Key
    roles: Roles
    admitted_ms: Count = 0
    entry: Entry = b""
    trial: bool = False


class AdmissionRefused(Message, frozen=True, kw_only=True):
    """The refusal of an admission, with its reason in one sentence.

    A validator also refuses a submission with it while another validator comes first in rank."""

    peer: Key
    reason: Line
    later: bool = False


# --- the trainer's messages ------------------------------------------------------------------


class CheckpointReference(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A checkpoint: policy `step` of a lineage, and the manifest that lists its pieces."""

    lineage: Count
    step: Count
    digest: Digest
    size_bytes: Annotated[int, Meta(ge=1, le=256 << 20)]

    def __str__(self) -> str:
        return f"policy {self.step} of lineage {self.lineage}"


class Checkpoint(StateMessage, frozen=True, kw_only=True):
    """Announces a policy, published as a manifest of pieces."""

    reference: CheckpointReference
    total_bytes: Count
    reward: Finite = 0.0
    base_bytes: Count = 0

    @property
    def lineage(self) -> int:
        return self.reference.lineage

    @property
    def step(self) -> int:
        return self.reference.step

    def order(self) -> tuple[int, ...]:
        return (self.lineage, self.step)


ENVIRONMENTS_MAX = 16
"""Environments that one run may mix."""


class StepOrder(StateMessage, frozen=True, kw_only=True):
    """Opens step `step`: workers must use exactly this policy and this nonce."""

    step: Count
    revision: Count
    checkpoint: CheckpointReference
    nonce: Digest
    groups_wanted: Count
    submissions_max: Count
    final: bool = False
    run_version: Count = 0
    run_digest: RunDigest = b""
    reserved: Annotated[list[Count], Meta(max_length=0)] = []
    states: RunDigest = b""
    states_bytes: Annotated[int, Meta(ge=0, le=8 << 20)] = 0

    @property
    def lineage(self) -> int:
        return self.checkpoint.lineage

    @property
    def policy(self) -> int:
        return self.checkpoint.step

    def order(self) -> tuple[int, ...]:
        return (self.lineage, self.step, self.revision)


class EnvironmentEvaluation(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Figures of a policy on the held-out tasks of one environment."""

    label: Name
    reward: Finite
    low: Finite
    high: Finite
    tokens: Annotated[float, Meta(ge=0, le=1e9)]


class Evaluation(StateMessage, frozen=True, kw_only=True):
    """A trainer or validator has evaluated a policy on held-out tasks during the run."""

    reference: CheckpointReference
    state: Literal["begun", "done", "failed"]
    tasks: Count = 0
    reward: Finite = 0.0
    environments: Annotated[list[EnvironmentEvaluation], Meta(max_length=ENVIRONMENTS_MAX)] = []

    def order(self) -> tuple[int, ...]:
        return (self.reference.lineage, self.reference.step, int(self.state != "begun"))


# --- rollouts --------------------------------------------------------------------------------


class Submission(Message, frozen=True, kw_only=True):
    """Announces one file of rollout groups, named by its hash, to a validator."""

    lineage: Count
    step: Count
    policy: Count
    number: Count
    digest: Digest
    size_bytes: Count
    groups: Annotated[int, Meta(ge=1, le=4096)]
    run_digest: RunDigest = b""
    entry: Entry = b""


class Acknowledgement(Message, frozen=True, kw_only=True):
    """Says that a validator holds the file durably and owes a verdict within the run's limit.

    It settles which file the worker's number stands for, so the worker's next number may follow.
    The trainer includes its groups in the batch forecast. The announcement is not forwarded."""

    submission: Digest
    worker: Key
    lineage: Count = 0
    groups: Annotated[int, Meta(ge=0, le=4096)] = 0
    step: Count = 0
    number: Count = 0


class Check(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The result of one check of a submission: its figure and its threshold."""

    name: Annotated[str, Meta(max_length=40)]
    figure: Finite
    threshold: Finite
    passed: bool


StateIndex = Annotated[int, Meta(ge=-1, le=4095)]

GroupIndex = Annotated[int, Meta(ge=0, le=4095)]
EnvironmentIndex = Annotated[int, Meta(ge=0, le=ENVIRONMENTS_MAX - 1)]
Reward = Annotated[float, Meta(ge=-1e6, le=1e6)]
Rewards = Annotated[list[Annotated[list[Reward], Meta(max_length=4096)]], Meta(max_length=4096)]


Share = Annotated[float, Meta(gt=0, le=1)]

Bets = Annotated[list[Annotated[int, Meta(ge=-(10**12), le=10**12)]], Meta(max_length=32)]


class Evidence(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a recomputed submission adds to the evidence against its worker.

    Each list has the gains of a process's bets in thousandths of a nat
    (`peers.validator.evidence`)."""

    tokens: Count = 0
    mismatches: Count = 0
    sampler: Bets = []
    policy: Bets = []
    text: Bets = []
    selection: Bets = []


REWARD_PARTS_MAX = 16
"""Most parts of rewards that a verdict or a grade names."""

REWARD_VALUES_MAX = 4096
"""Most rewards and values of parts together in one verdict, so that it fits an envelope."""


class RewardParts(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a submission's rewards are made of; for display only."""

    names: Annotated[list[Name], Meta(max_length=REWARD_PARTS_MAX)] = []
    values: Annotated[bytes, Meta(max_length=4 * REWARD_VALUES_MAX)] = b""


class Verdict(Message, frozen=True, kw_only=True):
    """A validator's judgement of a submission, which is also the worker's receipt.

    The trainer uses no other rewards than those in verdicts."""

    submission: Digest
    size_bytes: Count
    worker: Key
    lineage: Count
    step: Count
    policy: Count
    number: Count
    outcome: Literal["accepted", "refused", "quarantined"]
    failed: Annotated[str, Meta(max_length=40)] = ""
    detail: Line = ""
    proven_fault: bool = False
    checks: Annotated[list[Check], Meta(max_length=32)] = []
    rewards: Rewards = []
    log_index: int = -1
    task_means: Annotated[list[Reward], Meta(max_length=4096)] = []
    task_spreads: Annotated[list[Reward], Meta(max_length=4096)] = []
    environments: Annotated[list[EnvironmentIndex], Meta(max_length=4096)] = []
    rollouts_digest: Annotated[bytes, Meta(max_length=32)] = b""
    rollouts_bytes: Count = 0
    evidence: Evidence = Evidence()
    tokens: Count = 0
    share: Share = 1.0
    policies: Annotated[list[Count], Meta(max_length=65)] = []
    quarantined: Annotated[list[GroupIndex], Meta(max_length=4096)] = []
    parts: RewardParts = RewardParts()
    continued: Annotated[list[StateIndex], Meta(max_length=4096)] = []
    seed: RunDigest = b""

    def continues(self, group: int) -> bool:
        """Whether a group continues a state, and so is not to be trained on."""
        return group < len(self.continued) and self.continued[group] >= 0

    @property
    def recomputed(self) -> int:
        """Tokens that were recomputed with the policy; 0 if the content was not checked."""
        return self.evidence.tokens


class Eviction(Message, frozen=True, kw_only=True):
    """A trusted peer excludes a peer from the run; only the owner can reinstate it."""

    peer: Key
    reason: Line
    submission: Annotated[bytes, Meta(max_length=32)] = b""
    figure: Finite = 0.0
    threshold: Finite = 0.0


class Reinstatement(Message, frozen=True, kw_only=True):
    """The owner readmits an evicted peer; overrules evictions issued before it."""

    peer: Key
    reason: Line = ""


# --- ledger ----------------------------------------------------------------------------------


class LogHead(StateMessage, frozen=True, kw_only=True):
    """Signed head of a trusted peer's append-only log (RFC 6962).

    The newest head is valid, not the largest, so that peers detect a log that shrank."""

    size: Count
    root: Digest
