"""What the ledger says about one step."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

from swarm.errors import UserError
from swarm.ledger.archive import Archive
from swarm.ledger.entries import Consumed, Judged
from swarm.ledger.state import Record
from swarm.look.onlooker import RunStatus
from swarm.look.refusals import REFUSALS, UNKNOWN
from swarm.terminal.untrusted import printable
from swarm.wire.messages import StepOrder, Verdict

STEP_DIGITS_MAX = 6
"""A word of at most so many digits is a step; a hash that begins with digits needs more."""


def is_step(what: str) -> bool:
    """Whether a word names a step."""
    return what.isascii() and what.isdecimal() and len(what) <= STEP_DIGITS_MAX


def about_step(archive: Archive, step: int, status: RunStatus | None = None) -> dict[str, Any]:
    """Who delivered, what was judged how and when, and what was trained on; raises `UserError`."""
    judged = [
        (record, record.entry)
        for record in archive.records
        if isinstance(record.entry, Judged) and record.entry.step == step
    ]
    order = status.order if status is not None else None
    open_now = order is not None and order.step == step
    trained = _trained_on(archive, step)
    if not judged and not open_now and not trained:
        raise UserError(f"{archive.where} has no work of step {step}; {_known(archive, order)}")
    first = {
        entry.submission: archive.state.verdicts.get(entry.submission, entry) for _, entry in judged
    }
    failed: Counter[str] = Counter()
    by_worker: dict[str, Counter[str]] = {}
    for entry in first.values():
        by_worker.setdefault(entry.worker, Counter())[entry.outcome] += 1
        if entry.failed:
            failed[entry.failed] += 1
    rewards = [
        reward
        for record, entry in judged
        if entry.outcome == "accepted"
        for reward in _rewards(archive, record.owner, record.index)
    ]
    return {
        "step": step,
        "open": open_now,
        "groups_wanted": order.groups_wanted if open_now and order is not None else None,
        "policies": sorted({entry.policy for entry in first.values()}),
        "submissions": dict(Counter(entry.outcome for entry in first.values())),
        "groups": sum(entry.groups for entry in first.values() if entry.outcome == "accepted"),
        "failed": dict(sorted(failed.items())),
        "workers": {worker: dict(counts) for worker, counts in sorted(by_worker.items())},
        "verdict_times": _verdict_times(archive, [record for record, _ in judged]),
        "reward": statistics.fmean(rewards) if rewards else None,
        "used": _used(archive, set(first)),
        "trained": trained,
    }


def _known(archive: Archive, order: StepOrder | None) -> str:
    steps = {record.entry.step for record in archive.records if isinstance(record.entry, Judged)}
    known = f"it has steps {min(steps)} to {max(steps)}" if steps else "it has none yet"
    return known + (f"; step {order.step} is open" if order is not None else "")


def _verdict_times(archive: Archive, judged: list[Record]) -> list[float] | None:
    """Wall times of the first and the last verdict, as signed."""
    times = [
        envelope.body.issued_ms / 1000
        for record in judged
        if (envelope := archive.logs[record.owner].verdicts.get(record.index)) is not None
    ]
    return [min(times), max(times)] if times else None


def _rewards(archive: Archive, owner: str, index: int) -> Iterator[float]:
    envelope = archive.logs[owner].verdicts.get(index)
    if envelope is not None and isinstance(envelope.message, Verdict):
        for group in envelope.message.rewards:
            yield from group


def _used(archive: Archive, submissions: set[bytes]) -> dict[str, int]:
    """Outcomes of the groups of this step's submissions."""
    used: Counter[str] = Counter()
    for submission in submissions:
        used.update(archive.state.consumed.get(submission, []))
    return dict(sorted(used.items()))


def _trained_on(archive: Archive, step: int) -> dict[str, int]:
    """Groups that the step's training took, by the step that asked for them."""
    steps = {
        record.entry.submission: record.entry.step
        for record in archive.records
        if isinstance(record.entry, Judged)
    }
    found: Counter[int] = Counter()
    seen: set[bytes] = set()
    for record in archive.records:
        entry = record.entry
        if isinstance(entry, Consumed) and entry.step == step and entry.submission not in seen:
            seen.add(entry.submission)
            found[steps.get(entry.submission, -1)] += entry.outcomes.count("consumed")
    return {str(asked): groups for asked, groups in sorted(found.items()) if groups}


def step_lines(told: dict[str, Any]) -> list[str]:
    """Format what is known about a step."""
    policies = ", ".join(map(str, told["policies"])) or "not known"
    outcomes = ", ".join(f"{count:,} {name}" for name, count in sorted(told["submissions"].items()))
    generated = f"generated with policy {policies}"
    if not told["submissions"] and not told["open"]:
        generated = "which asked for no work: enough groups were left from earlier steps"
    lines = [
        f"step     {told['step']}, {generated}"
        + (f"; it is open, and wants {told['groups_wanted']:,} groups" if told["open"] else ""),
        f"arrived  {outcomes or 'nothing'}; {told['groups']:,} groups accepted",
    ]
    for name, count in told["failed"].items():
        lines.append(f"         {count:,} × {printable(name)}: {REFUSALS.get(name, UNKNOWN).means}")
    for worker, counts in told["workers"].items():
        each = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counts.items()))
        lines.append(f"         {worker}: {each}")
    if told["verdict_times"]:
        first, last = told["verdict_times"]
        lines.append(f"verdicts within {last - first:.1f} s, by their signatures")
    if told["reward"] is not None:
        lines.append(f"reward   {told['reward']:.3f} over its accepted completions")
    used = ", ".join(f"{count:,} {name}" for name, count in told["used"].items())
    lines.append(f"used     its groups: {used or 'none yet'}")
    asked = ", ".join(f"{groups:,} of step {step}" for step, groups in told["trained"].items())
    lines.append(f"trained  on groups of: {asked or 'nothing yet'}")
    return lines
