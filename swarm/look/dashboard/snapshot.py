"""What the page shows, as typed structures; all text from peers is one printable line."""

from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

import msgspec

from swarm.ledger.entries import RoundFigures, TrainingFigures
from swarm.look.dashboard.history import AHEAD_MAX, History, WorkerFigures
from swarm.look.dashboard.idle import why_trainer, why_worker
from swarm.look.onlooker import RunStatus
from swarm.look.refusals import REFUSALS, UNKNOWN
from swarm.sentences import numbered
from swarm.shardcast.fetch.job import source_mark
from swarm.terminal.untrusted import printable
from swarm.wire.manifest import labels
from swarm.wire.messages import EnvironmentEvaluation, Evaluation, Present, Verdict

PROBLEMS_SHOWN = 12

Readable = Literal["", "newest", "any"]
"""Which rollouts the page can read: none, those of the newest steps, or those of any step."""


class _Part(msgspec.Struct, frozen=True):
    """Sent to the page as a JSON object."""


class Head(_Part, frozen=True):
    run: str
    step: int | None = None
    steps: int = 0
    round: int = 0
    """Of several trainers: the round that most of them have contributed to last."""
    rounds: int = 0
    """0: the run has no outer loop."""
    policy: int | None = None
    policy_bytes: int = 0
    state: str = ""
    held_out: float | None = None
    """Mean reward on held-out tasks, of `held_out_policy`."""
    held_out_policy: int | None = None
    held_out_tasks: int = 0
    evaluator: str = ""
    """Peer id of the one that signed the evaluation."""
    evaluated: list[EnvironmentEvaluation] = []
    trainer: str = ""
    """Why the trainer is idle, or what it does."""
    begun: dict[int, int] = {}
    """The policy that the newest lineage began with, where it is not the first."""
    environments: list[str] = []
    problems: list[str] = []
    """What is wrong with the run, and what of it could not be read."""
    counted_from: int = 0
    """Step from which on the counts of each worker are complete."""
    rollouts: Readable = ""


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
    credited: int
    sent: int
    """Bytes since it started, by its own count, as the next."""
    received: int


class StepRow(_Part, frozen=True, omit_defaults=True):
    """One step: the verdicts on its submissions, and the trainer's own figures."""

    accepted: int = 0
    refused: int = 0
    quarantined: int = 0
    reward: float | None = None
    """Mean over the completions of accepted submissions."""
    length: float | None = None
    """Mean sampled tokens of such a completion."""
    tokens: int = 0
    """Sampled tokens of accepted submissions."""
    size: int = 0
    """Bytes of accepted submissions."""
    workers: int = 0
    """Those whose submissions were judged."""
    held_out: float | None = None
    """Mean reward on held-out tasks, of the policy that the step made."""
    evaluated: list[EnvironmentEvaluation] = []
    """The same for each environment."""
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
    repetition: float | None = None
    truncated: float | None = None
    of_each: list[list[float | None]] = []
    """As in `TrainingFigures`."""


TRAINERS_FIGURES = set(TrainingFigures.__struct_fields__) - {"reward", "length", "of_each"}


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
    rounds: dict[int, dict[str, float]] = {}
    """Of several trainers, by round and the names of `RoundFigures`: the medians over those that
    have contributed to it."""
    trainers: dict[str, dict[str, float]] = {}
    """Of several trainers, by peer id: each one's newest round, and what it says of it."""


def snapshot_of(
    status: RunStatus, history: History, problems: list[str], *, rollouts: Readable = ""
) -> Snapshot:
    """The page's content; `problems`: sentences on silent peers."""
    trusted = frozenset(status.run.manifest.trusted_ids())
    marks = {source_mark(peer): printable(peer) for peer in status.present}
    return Snapshot(
        head=_head(status, history, problems, rollouts=rollouts),
        peers={
            printable(peer): _peer_row(status, entry, history, marks, trusted=peer in trusted)
            for peer, entry in status.present.items()
        },
        steps={
            number: _step_row(history, number)
            for number in sorted(history.steps.keys() | history.trained.keys())
        },
        refusals=[_refusal_row(*each) for each in reversed(history.refusals)],
        rounds={
            number: _medians(told) for number, told in sorted(history.figures_by_round().items())
        },
        trainers={
            printable(peer): {"round": max(told), **_medians([told[max(told)]])}
            for peer, told in sorted(history.rounds.items())
        },
    )


def _head(status: RunStatus, history: History, problems: list[str], *, rollouts: Readable) -> Head:
    order, checkpoint, evaluation = status.order, status.checkpoint, status.evaluation
    wrong = [f"the log of {peer} is forked: {reason}" for peer, reason in status.forks.items()]
    wrong += _lost_branches(history)
    return Head(
        run=printable(status.run.id),
        step=order.step if order else None,
        steps=status.run.manifest.schedule.steps,
        round=history.round(),
        rounds=status.run.manifest.outer.rounds,
        policy=checkpoint.step if checkpoint else order.policy if order else None,
        policy_bytes=checkpoint.total_bytes if checkpoint else 0,
        state=status.state,
        held_out=evaluation.reward if evaluation else None,
        held_out_policy=evaluation.reference.step if evaluation else None,
        held_out_tasks=evaluation.tasks if evaluation else 0,
        evaluator=printable(status.evaluator),
        evaluated=_of_each(evaluation),
        trainer=numbered(why_trainer(status, history)),
        begun=history.begun,
        environments=[printable(each) for each in labels(status.run.manifest.environments)],
        problems=[printable(numbered(each)) for each in (*wrong, *problems)][:PROBLEMS_SHOWN],
        counted_from=history.complete_from,
        rollouts=rollouts,
    )


def _lost_branches(history: History) -> list[str]:
    """A sentence on each trainer that gave up a branch of its own not long ago."""
    return [
        f"Trainer {trainer} was cut off from the others and went on alone: its {told.rounds_lost} "
        f"rounds with {told.tokens_lost:,} tokens are lost. Since round {number} it follows the "
        "others' branch again."
        for trainer, rounds in sorted(history.rounds.items())
        for number, told in rounds.items()
        if told.rounds_lost and number > max(rounds) - AHEAD_MAX
    ]


def _peer_row(
    status: RunStatus,
    entry: Present,
    history: History,
    marks: Mapping[bytes, str],
    *,
    trusted: bool,
) -> PeerRow:
    beat, figures = entry.heartbeat, history.workers.get(entry.peer, WorkerFigures())
    arrival = None
    if (told := beat.arrival) is not None:
        arrival = ArrivalRow(
            policy=told.policy,
            held=told.held / 1000,
            source=marks.get(told.source, ""),
            source_share=told.source_share / 1000,
            sources=told.sources,
        )
    return PeerRow(
        roles=[printable(role) for role in beat.roles],
        trusted=trusted,
        state=entry.state,
        region=printable(beat.region),
        policy=beat.policy,
        step=beat.step,
        speed=float(f"{beat.tokens_per_second:.3g}") if entry.state == "live" else 0.0,
        doing=printable(beat.doing),
        idle=why_worker(entry, status.order),
        arrival=arrival,
        reached=printable(beat.reached),
        accepted=figures.accepted,
        refused=figures.refused,
        credited=figures.credited,
        sent=beat.bytes_sent,
        received=beat.bytes_received,
    )


def _of_each(evaluation: Evaluation | None) -> list[EnvironmentEvaluation]:
    told = evaluation.environments if evaluation else []
    return [msgspec.structs.replace(each, label=printable(each.label)) for each in told]


def _step_row(history: History, number: int) -> StepRow:
    step, trained = history.steps.get(number), history.trained.get(number)
    found: dict[str, Any] = {}
    if evaluation := history.evaluations.get(number + 1):
        found = {"held_out": evaluation.reward, "evaluated": _of_each(evaluation)}
    if step is not None:
        found |= {
            "accepted": step.accepted,
            "refused": step.refused,
            "quarantined": step.quarantined,
            "reward": _short(step.reward_sum / step.rewarded) if step.rewarded else None,
            "length": _short(step.tokens / step.completions) if step.completions else None,
            "tokens": step.tokens,
            "size": step.size,
            "workers": len(step.workers),
        }
    if trained is not None:
        _, told = trained
        found |= {"batch_reward": _short(told.reward), "batch_length": _short(told.length)}
        found |= {name: _short(getattr(told, name)) for name in TRAINERS_FIGURES}
        found["of_each"] = [list(map(_short, each)) for each in told.of_each]
    return StepRow(**found)


def _medians(told: list[RoundFigures]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in RoundFigures.__struct_fields__:
        values = [value for each in told if (value := getattr(each, name)) is not None]
        if values:
            found[name] = median(values)
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def _short(value: float | None) -> float | None:
    """A figure with five digits: a chart shows no more, and a page of 512 steps has thousands."""
    return None if value is None else float(f"{value:.5g}")


def _refusal_row(by: str, verdict: Verdict) -> RefusalRow:
    refusal = REFUSALS.get(verdict.failed, UNKNOWN)
    return RefusalRow(
        worker=printable(verdict.worker),
        by=printable(by),
        step=verdict.step,
        submission=verdict.submission.hex(),
        outcome=verdict.outcome,
        check=printable(verdict.failed),
        detail=printable(verdict.detail),
        means=refusal.means,
        do=refusal.do,
    )
