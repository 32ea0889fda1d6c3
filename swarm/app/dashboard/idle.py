"""Why the trainer or a worker does what it does now: a sentence, and the facts behind it."""

from __future__ import annotations

from collections import Counter

from swarm.app.dashboard.history import History
from swarm.app.onlooker import RunStatus
from swarm.app.refusals import REFUSALS, UNKNOWN
from swarm.messages import Present, StepOrder
from swarm.untrusted import printable

INFERENCE = "inference"

OFTEN = 0.25
"""Share of refused submissions of the open step from which refusals are named as the cause."""


def why_trainer(status: RunStatus, history: History) -> tuple[str, list[str]]:
    """Why the trainer is idle, or that it is not; and the chain of facts behind the sentence."""
    order = status.order
    if order is None:
        return "No step has begun: the trainer has opened none yet.", _trainers(status)
    if order.final:
        return f"The run is over: step {order.step} was the last.", []
    chain = _trainers(status)
    trainers = [each for each in status.present.values() if _is_trainer(status, each.peer)]
    if trainers and all(each.standing != "live" for each in trainers):
        seconds = min(each.age_seconds for each in trainers)
        return f"The trainer is silent: the last heartbeat came {seconds:.0f} s ago.", chain
    busy = [doing for each in trainers if not _waits(doing := printable(each.heartbeat.doing))]
    if busy and busy[0]:
        return f"The trainer is busy: {busy[0]}.", chain
    if not order.groups_wanted:
        return f"The trainer has all groups of step {order.step}.", chain
    return _why_wanting(status, order, history, chain)


def _why_wanting(
    status: RunStatus, order: StepOrder, history: History, chain: list[str]
) -> tuple[str, list[str]]:
    wants = f"The trainer waits for {order.groups_wanted:,} groups of step {order.step}"
    workers = [each for each in status.present.values() if INFERENCE in each.heartbeat.roles]
    live = [each for each in workers if each.standing == "live"]
    holding = [each for each in live if each.heartbeat.policy >= order.policy]
    speed = sum(each.heartbeat.tokens_per_second for each in live)
    chain += [
        f"{len(live):,} of {len(workers):,} inference workers are live",
        f"{len(holding):,} of them held policy {order.policy} at their last heartbeat",
        f"together they generate {speed:,.0f} tokens/s, by their own figures",
    ]
    step = history.steps.get(order.step)
    if step is not None:
        chain.append(
            f"verdicts of this step: {step.accepted:,} accepted, {step.refused:,} refused, "
            f"{step.quarantined:,} quarantined"
        )
    if not live:
        return f"{wants}, and no inference worker is live.", chain
    if not holding and not speed:
        return f"{wants}, and no worker holds policy {order.policy} yet.", chain
    if step is not None and step.refused > OFTEN * len(step.seen):
        failed = Counter(
            each.verdict.failed for each in history.refusals if each.verdict.step == order.step
        )
        check = printable(failed.most_common(1)[0][0]) if failed else ""
        chain.append(f"most fail the check {check}: {REFUSALS.get(check, UNKNOWN).means}")
        return f"{wants}: {step.refused:,} of {len(step.seen):,} submissions were refused.", chain
    if not speed:
        return f"{wants}, and no worker reports tokens.", chain
    return f"{wants}, which {len(live):,} live workers generate.", chain


def _trainers(status: RunStatus) -> list[str]:
    return [
        f"the trainer says: {printable(each.heartbeat.doing)}"
        for each in status.present.values()
        if _is_trainer(status, each.peer) and each.heartbeat.doing
    ]


def _waits(doing: str) -> bool:
    return doing.startswith(("waiting", "paused"))


def _is_trainer(status: RunStatus, peer: str) -> bool:
    return status.run.manifest.is_trainer(peer)


def why_worker(entry: Present, order: StepOrder | None) -> str:
    """Why an inference worker generates nothing; empty if it generates, or is no worker."""
    beat = entry.heartbeat
    if INFERENCE not in beat.roles:
        return ""
    if entry.standing == "evicted":
        return "it was evicted: its work counts no more"
    if entry.standing != "live":
        return f"its last heartbeat came {entry.age_seconds:.0f} s ago"
    if order is None:
        return "no step has begun"
    if order.final:
        return "the run is over"
    if beat.tokens_per_second:  # a heartbeat may be 10 s old: its policy says less
        return ""
    if beat.policy < order.policy:
        return f"step {order.step} needs policy {order.policy}, which it does not hold yet"
    if not order.groups_wanted:
        return f"step {order.step} wants no more groups"
    return ""
