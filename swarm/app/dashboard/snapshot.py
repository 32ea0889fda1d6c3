"""What the page shows, as typed structures; all text from peers is one printable line."""

from __future__ import annotations

from typing import Any

import msgspec

from swarm.app.commands.status import status_object
from swarm.app.dashboard.history import History, NotAccepted, StepFigures, WorkerFigures
from swarm.app.dashboard.idle import why_trainer, why_worker
from swarm.app.onlooker import RunStatus
from swarm.app.refusals import REFUSALS, UNKNOWN
from swarm.messages import Present
from swarm.untrusted import printable

PROBLEMS_SHOWN = 8


class _Part(msgspec.Struct, frozen=True):
    """Sent to the page as a JSON object."""


class Head(_Part, frozen=True):
    """The run as a whole."""

    run: str
    step: int | None = None
    steps: int = 0
    policy: int | None = None
    state: str = ""
    held_out: float | None = None
    """Mean reward on held-out tasks, of `held_out_policy`."""
    held_out_policy: int | None = None
    trainer: str = ""
    """Why the trainer is idle, or what it does."""
    chain: list[str] = []
    """The facts behind `trainer`."""
    problems: list[str] = []
    """Sentences on what is wrong: forked logs, validators that disagree, silent trusted peers."""


class PeerRow(_Part, frozen=True):
    """A peer, as the trusted peers report it, with the verdicts on its work."""

    roles: list[str]
    trusted: bool
    state: str
    policy: int
    step: int
    speed: float
    """Sampled tokens a second, by its own figures, with three digits."""
    doing: str
    idle: str
    """Why it generates nothing; empty if it does, or is no worker."""
    accepted: int
    refused: int
    completions: int
    tokens: int


class StepRow(_Part, frozen=True):
    """Verdicts on the submissions of a step."""

    accepted: int
    refused: int
    quarantined: int
    reward: float | None
    """Mean over the completions of accepted submissions."""
    length: float | None
    """Mean sampled tokens of such a completion."""


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


def snapshot_of(status: RunStatus, history: History, problems: list[str]) -> Snapshot:
    """The page's content now; `problems` are sentences on peers that did not answer."""
    trusted = frozenset(status.run.manifest.trusted_ids())
    nothing = WorkerFigures()
    return Snapshot(
        head=_head(status, history, problems),
        peers={
            printable(peer): _peer_row(
                status, entry, history.workers.get(peer, nothing), trusted=peer in trusted
            )
            for peer, entry in status.present.items()
        },
        steps={number: _step_row(step) for number, step in sorted(history.steps.items())},
        refusals=[_refusal_row(each) for each in reversed(history.refusals)],
    )


def _head(status: RunStatus, history: History, problems: list[str]) -> Head:
    told = status_object(status)
    why, chain = why_trainer(status, history)
    evaluation = status.evaluation
    found = [f"The log of {peer} is forked: {why}." for peer, why in told["forks"].items()]
    if status.contradicting:
        found.append(
            f"Validators disagree about {status.contradicting:,} submissions: see swarm status."
        )
    return Head(
        run=printable(told["run"]),
        step=told["step"],
        steps=told["steps"],
        policy=told["policy"],
        state=told["state"],
        held_out=None if evaluation is None else evaluation.reward,
        held_out_policy=None if evaluation is None else evaluation.reference.step,
        trainer=why,
        chain=chain,
        problems=[printable(each) for each in (*found, *problems)][:PROBLEMS_SHOWN],
    )


def _peer_row(
    status: RunStatus, entry: Present, figures: WorkerFigures, *, trusted: bool
) -> PeerRow:
    beat = entry.heartbeat
    return PeerRow(
        roles=[printable(role) for role in beat.roles],
        trusted=trusted,
        state=entry.standing,
        policy=beat.policy,
        step=beat.step,
        speed=float(f"{beat.tokens_per_second:.3g}"),
        doing=printable(beat.doing),
        idle=why_worker(entry, status.order),
        accepted=figures.accepted,
        refused=figures.refused,
        completions=figures.completions,
        tokens=figures.tokens,
    )


def _step_row(step: StepFigures) -> StepRow:
    return StepRow(
        accepted=step.accepted,
        refused=step.refused,
        quarantined=step.quarantined,
        reward=round(step.reward_sum / step.rewarded, 6) if step.rewarded else None,
        length=round(step.tokens / step.completions, 3) if step.completions else None,
    )


def _refusal_row(found: NotAccepted) -> RefusalRow:
    verdict = found.verdict
    refusal = REFUSALS.get(verdict.failed, UNKNOWN)
    return RefusalRow(
        worker=printable(verdict.worker),
        by=printable(found.by),
        step=verdict.step,
        submission=verdict.submission.hex(),
        outcome=verdict.outcome,
        check=printable(verdict.failed),
        detail=printable(verdict.detail),
        means=refusal.means,
        do=refusal.do,
    )


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
    changed = {key: row for key, row in new.items() if old.get(key) != row}
    return changed | {key: None for key in old if key not in new}
