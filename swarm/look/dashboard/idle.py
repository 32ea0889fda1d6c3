"""Why the trainer or a worker does what it does now: a sentence, and the facts behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from swarm.look.dashboard.history import History
from swarm.look.onlooker import RunStatus
from swarm.look.refusals import REFUSALS, UNKNOWN
from swarm.terminal.untrusted import printable
from swarm.wire.messages import Arrival, Heartbeat, Present, StepOrder

INFERENCE = "inference"

OFTEN = 0.25
"""Share of refused submissions of the open step from which refusals are named as the cause."""

LATE_SECONDS, LATE_TIMES = 30.0, 5
"""A step that has lasted for longer than both, the second in usual steps, is late."""

GOODBYE = {"left": "has left", "finished": "has finished"}
"""How a peer that said goodbye is spoken of, by its state."""

SLOWEST_SHOWN = 3
"""Workers that are named one by one, those that have the least of a policy."""


def why_trainer(status: RunStatus, history: History) -> tuple[str, list[str]]:
    """Why the trainer is idle, or that it is not; and the chain of facts behind the sentence.

    A trainer may hang, too: the sentence also says when a step takes far longer than usual.
    """
    sentence, chain = _why_trainer(status, history)
    usual, seconds = history.usual_seconds(), history.open_seconds
    over = status.order is None or status.order.final
    if over or usual is None or seconds <= max(LATE_SECONDS, LATE_TIMES * usual):
        return sentence, chain
    since = f"no step has ended for {_lasting(seconds)}; one usually takes {_lasting(usual)}"
    return f"{sentence.removesuffix('.')}, and {since}.", chain


def _lasting(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _why_trainer(status: RunStatus, history: History) -> tuple[str, list[str]]:
    order = status.order
    if order is None:
        return "No step has begun: the trainer has opened none yet.", _trainers(status)
    if order.final:
        return f"The run is over: step {order.step} was the last.", []
    chain = _trainers(status)
    trainers = [each for each in status.present.values() if _is_trainer(status, each.peer)]
    if trainers and all(each.standing != "live" for each in trainers):
        newest = min(trainers, key=lambda each: each.age_seconds)
        seconds = newest.age_seconds
        if newest.state in GOODBYE:
            return f"The trainer {GOODBYE[newest.state]}: {seconds:.0f} s ago.", chain
        return f"The trainer is silent: the last heartbeat came {seconds:.0f} s ago.", chain
    doing = [text for each in trainers if (text := printable(each.heartbeat.doing))]
    if paused := next((text for text in doing if text.startswith("paused")), ""):
        return f"The trainer is {paused}.", chain
    if busy := next((text for text in doing if not text.startswith("waiting")), ""):
        return f"The trainer is busy: {busy}.", chain
    if not order.groups_wanted:
        return f"The trainer has all groups of step {order.step}.", chain
    return _why_wanting(status, order, history, chain)


def _why_wanting(
    status: RunStatus, order: StepOrder, history: History, chain: list[str]
) -> tuple[str, list[str]]:
    wants = f"The trainer waits for {order.groups_wanted:,} groups of step {order.step}"
    workers = [each for each in status.present.values() if INFERENCE in each.heartbeat.roles]
    live = [each for each in workers if each.standing == "live"]
    chain.append(f"{len(live):,} of {len(workers):,} inference workers are live")
    if not live:
        return f"{wants}, and no inference worker is live.", chain
    lacking = [each for each in live if not _can_work(each.heartbeat, order)]
    speed = sum(each.heartbeat.tokens_per_second for each in live)
    chain += _fetching(lacking, order)
    chain.append(f"together they generate {speed:,.0f} tokens/s, by their own figures")
    chain += _judging(status, history, order)
    if len(lacking) == len(live) and not speed:
        return f"{wants}, and no worker holds policy {order.policy} yet.", chain
    step = history.steps.get(order.step)
    if step is not None and step.refused > OFTEN * len(step.seen):
        failed = Counter(
            each.verdict.failed for each in history.refusals if each.verdict.step == order.step
        )
        check = printable(failed.most_common(1)[0][0]) if failed else ""
        chain.append(f"most fail the check {check}: {REFUSALS.get(check, UNKNOWN).means}")
        return f"{wants}: {step.refused:,} of {len(step.seen):,} submissions were refused.", chain
    if _silent_validators(status):
        return f"{wants}, and no validator is live to judge them.", chain
    if len(lacking) > len(live) / 2:
        return (
            f"{wants}: {len(lacking):,} of {len(live):,} live workers still fetch policy "
            f"{order.policy}.",
            chain,
        )
    if not speed:
        return f"{wants}, and no worker reports tokens.", chain
    seconds = _seconds_needed(status, history, order, speed)
    if seconds is not None:
        chain.append(f"at that speed the missing groups take about {seconds:,.0f} s")
    at_work = len(live) - len(lacking)
    return f"{wants}; live workers that generate them: {at_work:,}.", chain


def _can_work(beat: Heartbeat, order: StepOrder) -> bool:
    """A heartbeat may be 10 s old: tokens say more than its policy."""
    return beat.policy >= order.policy or beat.tokens_per_second > 0


def _fetching(lacking: Sequence[Present], order: StepOrder) -> list[str]:
    """How far the workers are that lack the policy, the slowest one by one."""
    if not lacking:
        return [f"all of them held policy {order.policy}, or generated, at their last heartbeat"]
    under_way = sorted(
        (arrival.held, each.peer, arrival)
        for each in lacking
        if (arrival := _arriving(each.heartbeat, order)) is not None
    )
    found = [f"{len(lacking):,} of them lacked policy {order.policy} at their last heartbeat"]
    if under_way:
        middle = under_way[len(under_way) // 2][0] / 10
        found[0] += f"; {len(under_way):,} fetch it, and have {middle:.0f} % (median)"
    for held, peer, arrival in under_way[:SLOWEST_SHOWN]:
        found.append(f"…{printable(peer)[-10:]} has {held / 10:.0f} %{_from(arrival)}")
    return found


def _arriving(beat: Heartbeat, order: StepOrder) -> Arrival | None:
    arrival = beat.arrival
    return arrival if arrival is not None and arrival.policy >= order.policy else None


def _from(arrival: Arrival) -> str:
    if not arrival.sources:
        return ", and no peer has sent it a piece"
    return f", from {arrival.sources:,} sources"


def _judging(status: RunStatus, history: History, order: StepOrder) -> list[str]:
    validators = [
        each
        for each in status.present.values()
        if status.run.manifest.is_validator(each.peer) and each.standing == "live"
    ]
    found = [f"{len(validators):,} validators are live"]
    step = history.steps.get(order.step)
    if step is not None:
        found.append(
            f"verdicts of this step: {step.accepted:,} accepted, {step.refused:,} refused, "
            f"{step.quarantined:,} quarantined"
        )
    return found


def _silent_validators(status: RunStatus) -> bool:
    """Whether validators were heard of, and none of them lately."""
    standings = [
        each.standing
        for each in status.present.values()
        if status.run.manifest.is_validator(each.peer)
    ]
    return bool(standings) and "live" not in standings


def _seconds_needed(
    status: RunStatus, history: History, order: StepOrder, speed: float
) -> float | None:
    """Time to generate the groups still wanted, at the length of the last judged step."""
    judged = [step for step in history.steps.values() if step.completions]
    if not judged or not speed:
        return None
    length = judged[-1].tokens / judged[-1].completions
    return order.groups_wanted * status.run.manifest.sampling.group_size * length / speed


def _trainers(status: RunStatus) -> list[str]:
    return [
        f"the trainer {'says' if each.standing == 'live' else 'said last'}: "
        f"{printable(each.heartbeat.doing)}"
        for each in status.present.values()
        if _is_trainer(status, each.peer) and each.heartbeat.doing
    ]


def _is_trainer(status: RunStatus, peer: str) -> bool:
    return status.run.manifest.is_trainer(peer)


def why_worker(entry: Present, order: StepOrder | None) -> str:
    """Why an inference worker generates nothing; empty if it generates, or is no worker."""
    beat = entry.heartbeat
    if INFERENCE not in beat.roles:
        return ""
    if entry.standing == "evicted":
        return "it was evicted: its work counts no more"
    if entry.state in GOODBYE:
        return f"it {GOODBYE[entry.state]}, {entry.age_seconds:.0f} s ago"
    if entry.standing != "live":
        return f"its last heartbeat came {entry.age_seconds:.0f} s ago"
    if order is None:
        return "no step has begun"
    if order.final:
        return "the run is over"
    if beat.tokens_per_second:  # a heartbeat may be 10 s old: its policy says less
        return ""
    if beat.policy < order.policy:
        needs = f"step {order.step} needs policy {order.policy}"
        arrival = _arriving(beat, order)
        if arrival is None:
            return f"{needs}, which it does not hold yet"
        return f"{needs}, of which it has {arrival.held / 10:.0f} %{_from(arrival)}"
    if not order.groups_wanted:
        return f"step {order.step} wants no more groups"
    return ""
