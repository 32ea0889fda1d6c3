"""What the ledger says about one submission or one peer, in words for a contributor."""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from swarm.ledger.archive import Archive
from swarm.ledger.entries import Evicted, Judged, Reinstated, expulsions_in
from swarm.ledger.evidence import WORDS, WorkerEvidence, evidence_in
from swarm.ledger.record import Rules
from swarm.ledger.state import Record, Totals
from swarm.look.dashboard.idle import why_worker
from swarm.look.onlooker import RunStatus
from swarm.look.prefixes import resolve
from swarm.look.refusals import REFUSALS, UNKNOWN
from swarm.run.run import Run
from swarm.terminal.figures import figure
from swarm.terminal.output import plain
from swarm.terminal.untrusted import printable
from swarm.wire.envelope import Envelope, readable
from swarm.wire.messages import Eviction, Reinstatement, Verdict

EVIDENCE_SHOWN_BELOW = 0.01
"""A weaker suspicion is only in the JSON: it befalls honest peers."""


def submission_named(archive: Archive, prefix: str) -> bytes:
    """The submission that a hexadecimal prefix names; raises `UserError`."""
    names = {
        record.entry.submission.hex()
        for record in archive.records
        if isinstance(record.entry, Judged)
    }
    return bytes.fromhex(resolve(prefix.lower(), names, "submission"))


def peer_named(archive: Archive, prefix: str, present: Iterable[str] = ()) -> str:
    """The worker, the evicted or the present peer that a prefix names; raises `UserError`."""
    names = {*archive.manifest.trusted_ids(), *present}
    for record in archive.records:
        if isinstance(record.entry, Judged):
            names.add(record.entry.worker)
        elif isinstance(record.entry, (Evicted, Reinstated)):
            names.add(record.entry.peer)
    return resolve(prefix, names, "peer")


# --- a submission ----------------------------------------------------------------------------


def about_submission(archive: Archive, submission: bytes) -> dict[str, Any]:
    """All verdicts on a submission, the final one, its credit and its use."""
    state = archive.state
    verdicts = [
        _verdict(archive, record)
        for record in archive.records
        if isinstance(record.entry, Judged) and record.entry.submission == submission
    ]
    final = state.verdicts.get(submission)
    credit = state.credits.get(submission)
    return {
        "submission": submission.hex(),
        "worker": verdicts[0]["worker"],
        "step": verdicts[0]["step"],
        "policy": verdicts[0]["policy"],
        "number": verdicts[0]["number"],
        "verdicts": verdicts,
        "final": None if final is None else final.outcome,
        "final_by": state.judges.get(submission),
        "credited_samples": 0 if credit is None else credit.samples,
        "credit": state.standings.get(submission),
        "used": dict(Counter(state.consumed.get(submission, []))),
    }


def _verdict(archive: Archive, record: Record) -> dict[str, Any]:
    entry = record.entry
    assert isinstance(entry, Judged)
    envelope = archive.logs[record.owner].verdicts.get(record.index)
    verdict = envelope.expect(Verdict) if envelope is not None else None
    refusal = REFUSALS.get(entry.failed, UNKNOWN) if entry.failed else None
    return {
        "by": record.owner,
        "index": record.index,
        "time": None if envelope is None else envelope.body.issued_ms / 1000,
        "worker": entry.worker,
        "step": entry.step,
        "policy": entry.policy,
        "number": entry.number,
        "outcome": entry.outcome,
        "failed": entry.failed,
        "proven_fault": entry.proven_fault,
        "recomputed_tokens": entry.evidence.tokens,
        "mismatches": entry.evidence.mismatches,
        "detail": None if verdict is None else verdict.detail,
        "checks": [] if verdict is None else plain(verdict.checks),
        "means": refusal.means if refusal else None,
        "do": refusal.do if refusal else None,
    }


def submission_lines(told: dict[str, Any]) -> list[str]:
    """Format what is known about a submission."""
    lines = [
        f"submission {told['submission']}",
        f"worker     {told['worker']}, step {told['step']}, number {told['number']}, "
        f"policy {told['policy']}",
    ]
    for each in told["verdicts"]:
        lines += ["", *_verdict_lines(each)]
    used = ", ".join(f"{count} {outcome}" for outcome, count in sorted(told["used"].items()))
    lines += [
        "",
        f"final: {told['final']} (the verdict of {told['final_by']}); credited: "
        f"{told['credited_samples']:,} completions ({told['credit'] or 'none'}); "
        f"groups used: {used or 'none yet'}",
    ]
    return lines


def _verdict_lines(told: dict[str, Any]) -> list[str]:
    when = "" if told["time"] is None else f" on {_date(told['time'])}"
    lines = [f"{told['outcome']} by {told['by']}{when} (entry {told['index']} of its log)"]
    failed = next((check for check in told["checks"] if not check["passed"]), None)
    if told["failed"]:
        what = printable(told["detail"] or f"the check {told['failed']} failed")
        if failed is not None:
            what += (
                f" ({printable(failed['name'])}: {figure(failed['figure'])} against "
                f"{figure(failed['threshold'])})"
            )
        lines += [
            f"  what happened:  {what}",
            f"  what it means:  {told['means']}",
            f"  what to do:     {told['do']}",
        ]
        if told["proven_fault"]:
            lines.append(
                "  this is a proven fault: swarm ledger check-eviction "
                f"{told['worker']} computes it again"
            )
        if told["detail"] is None:
            lines.append(f"  (the figures are in the receipt, which only {told['by']} keeps)")
    over = "failed" if told["failed"] else "over its limit, but only observed"
    for word, passes in ((over, False), ("passed", True)):
        names = ", ".join(
            f"{printable(check['name'])} {figure(check['figure'])}/{figure(check['threshold'])}"
            for check in told["checks"]
            if check["passed"] == passes
        )
        if names:
            lines.append(f"  {word} (figure/threshold): {names}")
    if told["recomputed_tokens"]:
        lines.append(
            f"  recomputed: {told['recomputed_tokens']:,} tokens, {told['mismatches']:,} of them "
            "not the recomputed sample (near ties are tolerated)"
        )
    return lines


# --- a peer ----------------------------------------------------------------------------------


def run_of(archive: Archive) -> Run:
    """A run with the evictions and reinstatements of the logs, as every peer applies them."""
    run = Run(archive.signed)
    for envelope in _expulsions(archive):
        run.expel(envelope)
    return run


def _expulsions(archive: Archive) -> list[Envelope]:
    """Signed evictions and reinstatements that count; `audit` reports the others."""
    found = []
    for envelope in readable(expulsions_in(record.entry for record in archive.records)):
        evicts = isinstance(envelope.message, Eviction)
        signers = archive.manifest.trusted_ids() if evicts else [archive.signed.sender]
        if envelope.sender in signers and envelope.body.run == archive.run:
            found.append(envelope)
    return found


def about_peer(archive: Archive, peer: str, status: RunStatus | None = None) -> dict[str, Any]:
    """A peer's verdicts, credits and evidence, its evictions, and what it does now."""
    state = archive.state
    failed: Counter[str] = Counter()
    for record in archive.records:
        if isinstance(record.entry, Judged) and record.entry.worker == peer and record.entry.failed:
            failed[record.entry.failed] += 1
    standing = evidence_against(archive, peer).standing()
    evictions = {}
    for envelope in _expulsions(archive):
        message = envelope.message
        assert isinstance(message, (Eviction, Reinstatement))
        if message.peer == peer:
            evictions[envelope.digest] = envelope
    eviction = run_of(archive).evicted(peer)
    return {
        "peer": peer,
        "totals": dataclasses.asdict(state.totals.get(peer) or Totals()),
        "failed": dict(sorted(failed.items())),
        "evidence": dataclasses.asdict(standing) | {"p_value": standing.p_value},
        "stake": _stake(archive, peer),
        "now": _now(peer, status) if status is not None else None,
        "evicted": eviction is not None,
        "history": [
            _expulsion(envelope)
            for envelope in sorted(evictions.values(), key=lambda each: each.body.issued_ms)
        ],
    }


def _stake(archive: Archive, peer: str) -> int:
    work = archive.state.works.get(peer)
    if work is None:
        return 0
    newest = max(entry.step for entry in work.credited.values()) if work.credited else 0
    return work.stake(newest + 1, Rules.of(archive.manifest))


def _now(peer: str, status: RunStatus) -> dict[str, Any]:
    entry = status.present.get(peer)
    if entry is None:
        return {"standing": "unknown", "idle": "the trusted peers have heard nothing of it lately"}
    beat = entry.heartbeat
    return {
        "standing": entry.state,
        "roles": list(beat.roles),
        "doing": beat.doing,
        "policy": beat.policy,
        "tokens_per_second": beat.tokens_per_second,
        "age_seconds": entry.age_seconds,
        "idle": why_worker(entry, status.order),
    }


def evidence_against(
    archive: Archive, peer: str, before: Mapping[str, int] | None = None
) -> WorkerEvidence:
    """The evidence against a peer in the validators' logs; `before` cuts logs off at an index."""
    ends = before or {}
    return evidence_in(
        (
            record
            for record in archive.records
            if archive.manifest.is_validator(record.owner)
            and record.index < ends.get(record.owner, record.index + 1)
        ),
        peer,
    )


def _expulsion(envelope: Envelope) -> dict[str, Any]:
    message = envelope.message
    told: dict[str, Any] = {"by": envelope.sender, "time": envelope.body.issued_ms / 1000}
    if isinstance(message, Eviction):
        return told | {
            "what": "evicted",
            "reason": message.reason,
            "submission": message.submission.hex(),
            "figure": message.figure,
            "threshold": message.threshold,
        }
    assert isinstance(message, Reinstatement)
    return told | {"what": "reinstated", "reason": message.reason}


def peer_lines(told: dict[str, Any]) -> list[str]:
    """Format what is known about a peer."""
    totals = told["totals"]
    outcomes = ", ".join(
        f"{totals[name]:,} {name}"
        for name in ("accepted", "quarantined", "refused")
        if totals[name]
    )
    lines = [
        f"peer     {told['peer']}",
        f"work     {totals['samples']:,} completions in {totals['groups']:,} groups "
        f"({outcomes or 'nothing judged yet'})",
        f"credit   {totals['final']:,} tokens final, {totals['held']:,} held, "
        f"{totals['void']:,} void ({totals['verified']:,} recomputed)",
    ]
    for name, count in told["failed"].items():
        lines.append(f"         {count:,} × {printable(name)}: {REFUSALS.get(name, UNKNOWN).means}")
    if told["stake"]:
        lines.append(f"stake    {told['stake']:,} recomputed tokens")
    lines += _now_lines(told["now"])
    evidence = told["evidence"]
    if evidence["p_value"] < EVIDENCE_SHOWN_BELOW:
        lines.append(
            f"evidence p <= {evidence['p_value']:.1e} that an honest peer ever looks like this "
            f"(strongest: {WORDS[evidence['process']]})"
        )
    elif totals["verified"]:
        lines.append("evidence none against it")
    for each in told["history"]:
        lines.append(f"{each['what']} on {_date(each['time'])} by {each['by']}")
        lines.append(f"         {printable(each['reason'])}")
        if each.get("submission"):
            lines.append(f"         for submission {each['submission']}")
    if told["evicted"]:
        lines += [
            f"anyone can check the eviction: swarm ledger check-eviction {told['peer']}",
            f"only the run's owner can end it: swarm run reinstate {told['peer']} --reason …",
        ]
    return lines


def _now_lines(now: dict[str, Any] | None) -> list[str]:
    if now is None:
        return []
    if "doing" not in now:
        return [f"now      {now['idle']}"]
    doing = printable(now["doing"]) or "nothing that it tells"
    roles = printable(", ".join(now["roles"]))
    lines = [
        f"now      {now['standing']} as {roles}: {doing}; policy {now['policy']}, "
        f"{now['tokens_per_second']:,.0f} tokens/s, {now['age_seconds']:.0f} s ago"
    ]
    if now["idle"]:
        lines.append(f"idle     {now['idle']}")
    return lines


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
