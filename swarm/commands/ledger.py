"""`swarm ledger`: one peer's credits in a run, with proofs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from swarm.errors import UserError
from swarm.run.heard_verdicts import failed_check, nearest
from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.figures import figure
from swarm.terminal.options import AsJson, Bootstrap, Home, LedgerSource, WhichRun, explained
from swarm.terminal.output import print_json
from swarm.terminal.untrusted import printable

if TYPE_CHECKING:
    from swarm.ledger.archive import Archive

app = typer.Typer()


@app.callback(invoke_without_command=True)
@explained(__file__)
def ledger(
    context: typer.Context,
    peer: str | None = None,
    home: Home = Path("~/.swarm"),
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    source: LedgerSource = None,
    limit: int = 20,
    as_json: AsJson = False,
) -> None:
    """Show one peer's credits and receipts, each in its validator's log, which is checked.

    The evidence against the peer is computed again from the logs."""
    if context.invoked_subcommand is None:
        _show_record(peer, home, bootstrap, run, source, limit, as_json=as_json)


@exits
def _show_record(
    peer: str | None,
    home: Path,
    bootstrap: list[str] | None,
    run: str | None,
    source: Path | None,
    limit: int,
    *,
    as_json: bool,
) -> int:
    from swarm.commands.ledger_checks import asked, report
    from swarm.look.archives import leave_out_unsound
    from swarm.look.prefixes import PREFIX_MIN
    from swarm.look.why import about_peer, peer_lines, peer_named
    from swarm.wire.identity import InvalidPeerId, public_key_of

    named = peer or _own_id(source or home)
    is_whole = True
    try:
        public_key_of(named)
    except InvalidPeerId as error:
        if len(named.removeprefix("…")) < PREFIX_MIN:
            raise UserError(f"--peer: {error}") from error
        is_whole = False
    worker = named if is_whole else ""
    archive, status = asked(source, bootstrap, run, home=home, worker=worker)
    leave_out_unsound(archive)
    present = status.present if status is not None else ()
    worker = worker or peer_named(archive, named, present)
    told = about_peer(archive, worker, status) | {"receipts": receipt_rows(worker, archive)}
    if as_json:
        print_json(told)
    else:
        print(numbered("\n".join([*peer_lines(told), *receipt_lines(told["receipts"], limit)])))
    report(archive)
    return 1 if archive.problems else 0


def _own_id(home: Path) -> str:
    """Read the id of the peer in a home; raises `UserError` if it has none."""
    from swarm.wire.identity import load_or_create

    key = home.expanduser() / "identity.key"
    if not key.exists():
        raise UserError(f"whose record? no peer has used {home} yet; give --peer ID or its --home")
    return load_or_create(key).peer_id


def receipt_rows(peer: str, archive: Archive) -> list[dict[str, Any]]:
    """One peer's receipts as plain data, with the credits that follow from the logs."""
    from swarm.wire.messages import Verdict

    state = archive.state
    receipts = [
        (validator, index, envelope.expect(Verdict))
        for validator in archive.manifest.validator_ids()
        for index, envelope in sorted(archive.log(validator).verdicts.items())
    ]
    rows = []
    for validator, index, verdict in receipts:
        if verdict.worker != peer:
            continue
        credit = state.credits.get(verdict.submission)
        counts = state.judges.get(verdict.submission) == validator
        failed = failed_check(verdict.checks, verdict.failed)
        rows.append(
            {
                "index": index,
                "step": verdict.step,
                "policy": verdict.policy,
                "number": verdict.number,
                "outcome": verdict.outcome,
                "failed": verdict.failed,
                "figure": failed.figure if failed else None,
                "threshold": failed.threshold if failed else None,
                "nearest": nearest(verdict.checks),
                "credit": credit.tokens if credit is not None and counts else 0,
                "standing": state.standings.get(verdict.submission) if counts else None,
                "recomputed": bool(verdict.recomputed),
                "submission": verdict.submission.hex(),
                "by": validator,
                "proven_under_size": archive.log(validator).size,
            }
        )
    return rows


def receipt_lines(receipts: list[dict[str, Any]], last: int) -> list[str]:
    """Format the last of a peer's receipts as lines of text."""
    rows = receipts[max(0, len(receipts) - last) :]
    if not rows:
        return []
    lines = [f"\n{'log':>7} {'step':>6} {'#':>4} {'policy':>7} {'tokens':>7}  {'':<5}  outcome"]
    for row in rows:
        failed = ""
        if row["failed"]:
            failed = f"  {printable(row['failed'])}"
            if row["figure"] is not None:
                failed += f" {figure(row['figure'])} against {figure(row['threshold'])}"
        elif row["nearest"]:
            failed = f"  {printable(row['nearest'])}"
        lines.append(
            f"{row['index']:>7} {row['step']:>6} {row['number']:>4} {row['policy']:>7} "
            f"{row['credit']:>7}  {row['standing'] or '':<5}  {row['outcome']}{failed}"
        )
    return [*lines, f"\n{len(receipts):,} receipts, each of them in its validator's log"]
