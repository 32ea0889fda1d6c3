"""The commands `swarm status` and `swarm ledger`: how a run is, and what one peer earned in it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.errors import UserError
from swarm.interrupt import run_until_interrupted
from swarm.output import print_json
from swarm.untrusted import printable

if TYPE_CHECKING:
    from rich.text import Text

    from swarm.messages import Present, StepOrder
    from swarm.onlooker import Record, RunStatus

WIDTH = 80
"""Columns of what `status` prints: a whole id, of 52, leaves room for roles and standing."""


# --- status ------------------------------------------------------------------------------------


def show_status(bootstrap: Sequence[str] | None, run: str | None, *, as_json: bool) -> None:
    """Ask a run's trusted peers how it is, and print it."""
    from swarm.cli import visit
    from swarm.onlooker import status_of

    async def ask() -> RunStatus:
        async with visit(bootstrap, run, looks_on=True) as (node, found):
            return await status_of(node, found)

    status = run_until_interrupted(ask)
    if as_json:
        print_json(status_object(status))
        return
    from rich.console import Console

    console = Console()
    for line in status_lines(status):
        console.print(line, soft_wrap=True)


def status_object(status: RunStatus) -> dict[str, Any]:
    """The status as plain data."""
    from swarm.cli import plain

    order, checkpoint = status.order, status.checkpoint
    return {
        "run": status.run.id,
        "step": order.step if order else None,
        "steps": status.run.manifest.schedule.steps,
        "policy": checkpoint.step if checkpoint else None,
        "reward": checkpoint.reward if checkpoint else None,
        "state": _state(order),
        "peers": {
            peer: {"standing": entry.standing, "age_seconds": round(entry.age_seconds, 1)}
            | plain(entry.heartbeat)
            for peer, entry in sorted(status.present.items())
        },
    }


def _state(order: StepOrder | None) -> str:
    if order is None:
        return "not begun"
    if order.final:
        return "over"
    return f"wants {order.groups_wanted} groups" if order.groups_wanted else "step closed"


def status_lines(status: RunStatus) -> list[Text]:
    """The status for the screen: the run, then two lines a peer. Ids are whole, to be copied."""
    from rich.text import Text

    told = status_object(status)
    step = "–" if told["step"] is None else f"{told['step']} of {told['steps']}"
    progress = f"step {step} · {told['state']}"
    if told["policy"] is not None:
        progress += f" · newest policy {told['policy']} · reward {told['reward']:.3f}"
    lines = [Text(f"run {status.run.id}", style="bold"), Text(progress), Text()]
    trusted = status.run.manifest.trusted_ids()
    for peer, entry in sorted(
        status.present.items(), key=lambda item: (item[1].heartbeat.roles, item[0])
    ):
        lines += _peer_lines(peer, entry, trusted=peer in trusted)
    return lines


def _peer_lines(peer: str, entry: Present, *, trusted: bool) -> list[Text]:
    from rich.text import Text

    from swarm.demo.view import DIM, ROLE_STYLES, STATE_STYLES, readable_bytes

    beat = entry.heartbeat
    roles = printable(", ".join(beat.roles), 14)
    first = Text(f"{printable(peer, 52):<52} ")
    first.append(roles, style=ROLE_STYLES.get(beat.roles[0] if beat.roles else "", ""))
    first.append(" ✓" if trusted else "")
    first.append(f" {entry.standing}", style=STATE_STYLES.get(entry.standing, ""))
    figures = [
        f"policy {beat.policy}" if beat.policy >= 0 else "",
        f"step {beat.step}" if beat.step >= 0 else "",
        f"sent {readable_bytes(beat.bytes_sent)}" if beat.bytes_sent else "",
        f"received {readable_bytes(beat.bytes_received)}" if beat.bytes_received else "",
        printable(beat.doing),
    ]
    second = printable("  " + " · ".join(figure for figure in figures if figure), WIDTH)
    return [first, Text(second, style=DIM)]


# --- ledger ------------------------------------------------------------------------------------


def own_id(home: Path) -> str:
    """The id of the peer whose home this is; raises `UserError` if there is none yet."""
    from swarm.identity import load_or_create

    key = home.expanduser() / "identity.key"
    if not key.exists():
        raise UserError(f"whose record? no peer has used {home} yet; give --peer ID or its --home")
    return load_or_create(key).peer_id


def show_record(
    peer: str, bootstrap: Sequence[str] | None, run: str | None, *, last: int, as_json: bool
) -> int:
    """Print what a run's trusted peers hold about one peer; the exit status."""
    from swarm.cli import visit
    from swarm.identity import InvalidPeerId, public_key_of
    from swarm.onlooker import record_of

    try:
        public_key_of(peer)
    except InvalidPeerId as error:
        raise UserError(f"--peer: {error}") from error

    async def ask() -> Record:
        async with visit(bootstrap, run, looks_on=True) as (node, found):
            return await record_of(node, found, peer)

    record = run_until_interrupted(ask)
    told = record_object(peer, record)
    if as_json:
        print_json(told)
    else:
        print("\n".join(record_lines(told, last)))
    for problem in record.problems:
        print(f"not complete: {printable(problem)}", file=sys.stderr)
    return 1 if record.problems else 0


def record_object(peer: str, record: Record) -> dict[str, Any]:
    """A record as plain data. Credit is the completions of accepted and quarantined submissions,
    each counted once."""
    credited: dict[bytes, tuple[int, int]] = {}
    outcomes: dict[str, int] = {}
    rows = []
    for receipt in record.receipts:
        verdict = receipt.verdict
        outcomes[verdict.outcome] = outcomes.get(verdict.outcome, 0) + 1
        if verdict.outcome in ("accepted", "quarantined"):
            completions = sum(len(group) for group in verdict.rewards)
            credited[verdict.submission] = (len(verdict.rewards), completions)
        failed = next((check for check in verdict.checks if not check.passed), None)
        rows.append(
            {
                "index": receipt.index,
                "step": verdict.step,
                "policy": verdict.policy,
                "number": verdict.number,
                "outcome": verdict.outcome,
                "failed": verdict.failed,
                "figure": failed.figure if failed else None,
                "threshold": failed.threshold if failed else None,
                "credit": credited.get(verdict.submission, (0, 0))[1],
                "submission": verdict.submission.hex(),
                "by": receipt.envelope.sender,
                "proven_under_size": receipt.log_size,
            }
        )
    return {
        "peer": peer,
        "groups": sum(groups for groups, _ in credited.values()),
        "credit": sum(completions for _, completions in credited.values()),
        "outcomes": outcomes,
        "evicted": record.eviction.reason if record.eviction is not None else None,
        "receipts": rows,
    }


def record_lines(told: dict[str, Any], last: int) -> list[str]:
    """A record for the screen."""
    from swarm.demo.view import figure

    outcomes = ", ".join(f"{count:,} {name}" for name, count in sorted(told["outcomes"].items()))
    lines = [
        f"peer    {told['peer']}",
        f"credit  {told['credit']:,} completions in {told['groups']:,} groups "
        f"({outcomes or 'nothing judged yet'})",
    ]
    if told["evicted"] is not None:
        lines.append(f"evicted {printable(told['evicted'])}")
    rows = told["receipts"][len(told["receipts"]) - min(last, len(told["receipts"])) :]
    if rows:
        lines.append(f"\n{'log':>7} {'step':>6} {'#':>4} {'policy':>7} {'credit':>7}  outcome")
    for row in rows:
        failed = ""
        if row["failed"]:
            failed = f"  {printable(row['failed'])}"
            if row["figure"] is not None:
                failed += f" {figure(row['figure'])} against {figure(row['threshold'])}"
        lines.append(
            f"{row['index']:>7} {row['step']:>6} {row['number']:>4} {row['policy']:>7} "
            f"{row['credit']:>7}  {row['outcome']}{failed}"
        )
    if rows:
        lines.append(f"\n{len(told['receipts']):,} receipts, every inclusion proof verified")
    return lines
