"""What the page shows, as typed structures; all text from peers is one printable line."""

from __future__ import annotations

from typing import Any

import msgspec

from swarm.look.alarms.board import Alarm


class _Part(msgspec.Struct, frozen=True):
    """Sent to the page as a JSON object."""


class Head(_Part, frozen=True):
    """The run as a whole."""

    run: str
    step: int | None = None
    steps: int = 0
    policy: int | None = None
    policy_bytes: int = 0
    state: str = ""
    held_out: float | None = None
    """Mean reward on held-out tasks, of `held_out_policy`."""
    held_out_policy: int | None = None
    trainer: str = ""
    """Why the trainer is idle, or what it does."""
    chain: list[str] = []
    """The facts behind `trainer`."""
    problems: list[str] = []
    """Sentences on what could not be read: trusted peers that do not answer, for example."""
    signs: dict[str, str] = {}
    """What is wrong with the run itself, by the name of the alarm that it raises."""
    alarms: list[Alarm] = []
    """Alarms that are raised now, the worst first."""
    counted_from: int = 0
    """Step from which on the counts of each worker are complete."""
    rollouts: bool = False
    """Whether rollouts can be read here."""


class ArrivalRow(_Part, frozen=True):
    """How a policy comes to a peer, by its own word."""

    policy: int
    held: float
    """Share of its pieces on the disk."""
    source: str
    """The peer that sent most of it; empty if unknown."""
    source_share: float
    sources: int


class PeerRow(_Part, frozen=True):
    """A peer, as the trusted peers report it, with the verdicts on its work."""

    roles: list[str]
    trusted: bool
    state: str
    region: str
    policy: int
    step: int
    speed: float
    """Sampled tokens a second, by its own figures, with three digits."""
    doing: str
    idle: str
    """Why it generates nothing; empty if it does, or is no worker."""
    arrival: ArrivalRow | None
    reached: str
    """How others reach it; empty if unknown."""
    accepted: int
    refused: int
    completions: int
    tokens: int
    credited: int


class StepRow(_Part, frozen=True, omit_defaults=True):
    """One step: the verdicts on its submissions, and the trainer's own figures."""

    accepted: int = 0
    refused: int = 0
    quarantined: int = 0
    reward: float | None = None
    """Mean over the completions of accepted submissions."""
    length: float | None = None
    """Mean sampled tokens of such a completion."""
    held_out: float | None = None
    """Mean reward on held-out tasks, of the policy that the step made."""
    batch_reward: float | None = None
    """This and what follows: by the trainer's word, of its batch."""
    batch_length: float | None = None
    entropy: float | None = None
    kl: float | None = None
    kl_reference: float | None = None
    clipped: float | None = None
    gradient_norm: float | None = None
    learning_rate: float | None = None
    loss: float | None = None
    seconds: float | None = None


class RefusalRow(_Part, frozen=True):
    """A verdict other than accepted."""

    worker: str
    by: str
    step: int
    submission: str
    outcome: str
    check: str
    detail: str
    means: str
    do: str


class Snapshot(_Part, frozen=True):
    """All that the page shows."""

    head: Head
    peers: dict[str, PeerRow] = {}
    steps: dict[int, StepRow] = {}
    refusals: list[RefusalRow] = []
    """The newest first."""


def changes(old: Snapshot, new: Snapshot) -> dict[str, Any]:
    """What turns `old` into `new`: whole parts, rows of tables, None for a row that is gone."""
    found: dict[str, Any] = {}
    if old.head != new.head:
        found["head"] = new.head
    peers = _rows(old.peers, new.peers)
    steps = _rows(old.steps, new.steps)
    found |= {name: rows for name, rows in (("peers", peers), ("steps", steps)) if rows}
    if old.refusals != new.refusals:
        found["refusals"] = new.refusals
    return found


def _rows(old: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    changed = {
        key: row for key, row in new.items() if (held := old.get(key)) is not row and held != row
    }
    return changed | {key: None for key in old if key not in new}
