"""Makes snapshots of a run; a row whose sources are unchanged is the row of the last snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm.look.dashboard.history import History, NotAccepted, WorkerFigures
from swarm.look.dashboard.idle import why_trainer, why_worker
from swarm.look.dashboard.snapshot import (
    ArrivalRow,
    Head,
    PeerRow,
    RefusalRow,
    Snapshot,
    StepRow,
)
from swarm.look.onlooker import RunStatus
from swarm.look.refusals import REFUSALS, UNKNOWN
from swarm.sentences import numbered
from swarm.shardcast.fetch.job import source_mark
from swarm.terminal.untrusted import printable
from swarm.wire.messages import Arrival, Present

PROBLEMS_SHOWN = 8

_NOTHING = WorkerFigures()


class Builder:
    """Makes one run's snapshots. It keeps the rows of the last one, and no others."""

    def __init__(self, *, rollouts: bool = False) -> None:
        self._rollouts = rollouts
        self._peers: dict[str, tuple[Any, PeerRow]] = {}
        """What each row was made from, and the row."""
        self._steps: dict[int, tuple[Any, StepRow]] = {}
        self._refusals: tuple[NotAccepted | None, list[RefusalRow]] = (None, [])
        self._marks: dict[bytes, str] = {}
        """Peers by their short names in heartbeats."""

    def snapshot(self, status: RunStatus, history: History, problems: list[str]) -> Snapshot:
        """The page's content now; `problems` are sentences on peers that did not answer."""
        if history.refusals and history.refusals[-1] is not self._refusals[0]:
            rows = [_refusal_row(each) for each in reversed(history.refusals)]
            self._refusals = (history.refusals[-1], rows)
        return Snapshot(
            head=self._head(status, history, problems),
            peers=self._peer_rows(status, history),
            steps=self._step_rows(history),
            refusals=self._refusals[1],
        )

    def _head(self, status: RunStatus, history: History, problems: list[str]) -> Head:
        order, checkpoint, evaluation = status.order, status.checkpoint, status.evaluation
        why, chain = why_trainer(status, history)
        return Head(
            run=printable(status.run.id),
            step=order.step if order else None,
            steps=status.run.manifest.schedule.steps,
            policy=checkpoint.step if checkpoint else order.policy if order else None,
            policy_bytes=checkpoint.total_bytes if checkpoint else 0,
            state=status.state,
            held_out=evaluation.reward if evaluation else None,
            held_out_policy=evaluation.reference.step if evaluation else None,
            trainer=numbered(why),
            chain=[numbered(each) for each in chain],
            problems=[printable(numbered(each)) for each in problems][:PROBLEMS_SHOWN],
            signs=_signs(status),
            counted_from=history.complete_from,
            rollouts=self._rollouts,
        )

    def _peer_rows(self, status: RunStatus, history: History) -> dict[str, PeerRow]:
        trusted = frozenset(status.run.manifest.trusted_ids())
        order = status.order
        opened = (order.step, order.policy, not order.groups_wanted, order.final) if order else None
        if self._peers.keys() != status.present.keys():
            self._marks = {source_mark(peer): printable(peer) for peer in status.present}
        kept: dict[str, tuple[Any, PeerRow]] = {}
        for peer, entry in status.present.items():
            worker = history.workers.get(peer, _NOTHING)
            made_from = (
                entry.heartbeat,
                entry.standing,
                entry.age_seconds if entry.standing != "live" else 0.0,
                (worker.accepted, worker.refused, worker.credited),
                peer in trusted,
                opened,
            )
            held = self._peers.get(peer)
            if held is None or held[0] != made_from:
                row = _peer_row(status, entry, worker, self._marks, trusted=peer in trusted)
                held = (made_from, row)
            kept[peer] = held
        self._peers = kept
        return {printable(peer): row for peer, (_, row) in kept.items()}

    def _step_rows(self, history: History) -> dict[int, StepRow]:
        kept: dict[int, tuple[Any, StepRow]] = {}
        for number in sorted(history.steps.keys() | history.trained.keys()):
            step, trained = history.steps.get(number), history.trained.get(number)
            held_out = history.evaluations.get(number + 1)
            made_from = (step and (step.lineage, len(step.seen)), trained, held_out)
            held = self._steps.get(number)
            if held is None or held[0] != made_from:
                held = (made_from, _step_row(history, number))
            kept[number] = held
        self._steps = kept
        return {number: row for number, (_, row) in kept.items()}


def _signs(status: RunStatus) -> dict[str, str]:
    found: dict[str, str] = {}
    forks = [f"the log of {peer} is forked: {why}" for peer, why in status.forks.items()]
    if forks:
        found["log_forked"] = printable("; ".join(forks))
    if status.contradicting:
        found["validators_disagree"] = numbered(
            f"validators disagree about {status.contradicting:,} submissions: see swarm status"
        )
    return found


def _peer_row(
    status: RunStatus,
    entry: Present,
    figures: WorkerFigures,
    marks: Mapping[bytes, str],
    *,
    trusted: bool,
) -> PeerRow:
    beat = entry.heartbeat
    return PeerRow(
        roles=[printable(role) for role in beat.roles],
        trusted=trusted,
        state=entry.state,
        region=printable(beat.region),
        policy=beat.policy,
        step=beat.step,
        speed=float(f"{beat.tokens_per_second:.3g}"),
        doing=printable(beat.doing),
        idle=why_worker(entry, status.order),
        arrival=None if beat.arrival is None else _arrival_row(beat.arrival, marks),
        reached=printable(beat.reached),
        accepted=figures.accepted,
        refused=figures.refused,
        completions=figures.completions,
        tokens=figures.tokens,
        credited=figures.credited,
    )


def _arrival_row(arrival: Arrival, marks: Mapping[bytes, str]) -> ArrivalRow:
    return ArrivalRow(
        policy=arrival.policy,
        held=arrival.held / 1000,
        source=marks.get(arrival.source, ""),
        source_share=arrival.source_share / 1000,
        sources=arrival.sources,
    )


def _step_row(history: History, number: int) -> StepRow:
    step, trained = history.steps.get(number), history.trained.get(number)
    found: dict[str, Any] = {"held_out": history.evaluations.get(number + 1)}
    if step is not None:
        found |= {
            "accepted": step.accepted,
            "refused": step.refused,
            "quarantined": step.quarantined,
            "reward": _short(step.reward_sum / step.rewarded) if step.rewarded else None,
            "length": _short(step.tokens / step.completions) if step.completions else None,
        }
    if trained is not None:
        told = trained.figures
        found |= {
            "batch_reward": _short(told.reward),
            "batch_length": _short(told.length),
            "entropy": _short(told.entropy),
            "kl": _short(told.kl),
            "kl_reference": _short(told.kl_reference),
            "clipped": _short(told.clipped),
            "gradient_norm": _short(told.gradient_norm),
            "learning_rate": _short(told.learning_rate),
            "loss": _short(told.loss),
            "seconds": _short(told.seconds),
        }
    return StepRow(**found)


def _short(value: float | None) -> float | None:
    """A figure with five digits: a chart shows no more, and a page of 512 steps has thousands."""
    return None if value is None else float(f"{value:.5g}")


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
