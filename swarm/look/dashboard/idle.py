"""Why the trainer or a worker does what it does now: a sentence for each."""

from collections import Counter

from swarm.look.dashboard.history import History
from swarm.look.onlooker import RunStatus
from swarm.terminal.untrusted import printable
from swarm.wire.messages import Present, StepOrder

INFERENCE = "inference"

OFTEN = 0.25
"""Share of refused submissions of the open step from which refusals are named as the cause."""

DOINGS_SHOWN = 4
"""Different things that several trainers do which are named, the most frequent."""

GOODBYE = {"left": "has left", "finished": "has finished"}
"""How a peer that said goodbye is spoken of, by its state."""


def why_trainer(status: RunStatus, history: History) -> str:
    """Why the trainer is idle, or that it is not."""
    order, manifest = status.order, status.run.manifest
    if order is None and manifest.outer.rounds:
        return _why_trainers(status)
    if order is None:
        return "No step has begun: the trainer has opened none yet."
    if order.final:
        return f"The run is over: step {order.step} was the last."
    trainers = [each for each in status.present.values() if manifest.is_trainer(each.peer)]
    if trainers and all(each.standing != "live" for each in trainers):
        newest = min(trainers, key=lambda each: each.age_seconds)
        seconds = newest.age_seconds
        if newest.state in GOODBYE:
            return f"The trainer {GOODBYE[newest.state]}: {seconds:.0f} s ago."
        return f"The trainer is silent: the last heartbeat came {seconds:.0f} s ago."
    doing = [text for each in trainers if (text := printable(each.heartbeat.doing))]
    if paused := next((text for text in doing if text.startswith("paused")), ""):
        return f"The trainer is {paused}."
    if busy := next((text for text in doing if not text.startswith("waiting")), ""):
        return f"The trainer is busy: {busy}."
    if not order.groups_wanted:
        return f"The trainer has all groups of step {order.step}."
    return _why_wanting(status, order, history)


def _why_trainers(status: RunStatus) -> str:
    trainers, present = status.run.manifest.trainer_ids(), status.present.values()
    live = [each for each in present if each.peer in trainers and each.standing == "live"]
    doing = Counter(printable(each.heartbeat.doing) for each in live).most_common(DOINGS_SHOWN)
    said = "; ".join(f"{text} ({count})" for text, count in doing)
    return f"{len(live)} of {len(trainers)} trainers are live: {said or 'none'}."


def _why_wanting(status: RunStatus, order: StepOrder, history: History) -> str:
    wants = f"The trainer waits for {order.groups_wanted:,} groups of step {order.step}"
    present, manifest = status.present.values(), status.run.manifest
    live = [
        each.heartbeat
        for each in present
        if INFERENCE in each.heartbeat.roles and each.standing == "live"
    ]
    if not live:
        return f"{wants}, and no inference worker is live."
    # A heartbeat may be 10 s old: tokens say more than its policy.
    lacking = [beat for beat in live if beat.policy < order.policy and not beat.tokens_per_second]
    if len(lacking) == len(live):
        return f"{wants}, and no worker holds policy {order.policy} yet."
    step = history.steps.get(order.step)
    if step is not None and step.refused > OFTEN * len(step.seen):
        return f"{wants}: {step.refused:,} of {len(step.seen):,} submissions were refused."
    validators = [each.standing for each in present if manifest.is_validator(each.peer)]
    if validators and "live" not in validators:
        return f"{wants}, and no validator is live to judge them."
    if len(lacking) > len(live) / 2:
        return (
            f"{wants}: {len(lacking):,} of {len(live):,} live workers still fetch policy "
            f"{order.policy}."
        )
    if not any(beat.tokens_per_second for beat in live):
        return f"{wants}, and no worker reports tokens."
    return f"{wants}; live workers that generate them: {len(live) - len(lacking):,}."


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
        arrival = beat.arrival
        if arrival is None or arrival.policy < order.policy:
            return f"{needs}, which it does not hold yet"
        sent = ", and no peer has sent it a piece"
        if arrival.sources:
            sent = f", from {arrival.sources:,} sources"
        return f"{needs}, of which it has {arrival.held / 10:.0f} %{sent}"
    if not order.groups_wanted:
        return f"step {order.step} wants no more groups"
    return ""
