"""`swarm ledger verify`, `prove`, `export`: checking whole logs."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from swarm.errors import PeerError, UserError, file_errors
from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.options import AsJson, Bootstrap, LedgerSource, WhichRun, explained
from swarm.terminal.output import check_writable, print_json, write_text
from swarm.terminal.untrusted import printable

if TYPE_CHECKING:
    from swarm.ledger.archive import Archive
    from swarm.ledger.audit import Audited
    from swarm.look.onlooker import RunStatus


@exits
@explained(__file__)
def verify(
    file: Path | None = None,
    source: LedgerSource = None,
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    owner: str | None = None,
    as_json: AsJson = False,
) -> int:
    """Check all trusted logs: signed heads, entries, verdicts, forks. Exit status 1: not sound.

    With FILE, works offline. A proof is checked with the run manifest in it, which its owner
    signed: give --owner, or compare the id that is printed. With --from or --bootstrap it is also
    held against the log as it is now, by the seals if the entry is pruned."""
    if file is not None and file.suffix == ".json":
        archive = _archive(source, bootstrap, run, owner) if source or bootstrap else None
        return _verify_proof(file, owner, archive, as_json=as_json)
    if file is not None and source is not None:
        raise UserError("give either FILE or --from PATH, not both; they go together for a proof")
    from swarm.ledger.audit import audit

    archive = _archive(file or source, bootstrap, run, owner)
    found = audit(archive)
    sound = all(each.sound for each in found) and not archive.problems
    if as_json:
        print_json(
            {
                "run": archive.run,
                "sound": sound,
                "logs": [dataclasses.asdict(each) for each in found],
                "problems": archive.problems,
            }
        )
    else:
        print(f"run {archive.run}, manifest version {archive.manifest.version}")
        print(numbered("\n".join([*audit_lines(found), *tally_lines(archive)])))
    report(archive)
    return 0 if sound else 1


def audit_lines(found: list[Audited]) -> list[str]:
    """One line per log, and one per finding."""
    lines = []
    for log in found:
        state = "sound" if log.sound else "FORKED" if log.forks else "NOT SOUND"
        lines.append(
            f"{log.owner} ({', '.join(log.roles)}): {state}, {log.entries:,} entries, "
            f"{log.heads:,} signed heads, {log.verdicts:,} signed verdicts"
        )
        for label, sentences in (
            ("forked", log.forks),
            ("wrong", log.problems),
            ("note", log.notes),
        ):
            lines += [f"  {label}: {printable(sentence)}" for sentence in sentences]
    return lines


def tally_lines(archive: Archive) -> list[str]:
    """One line per validator: a liar stands out by verdicts that others contradict."""
    return [
        f"validator {validator}: {each.accepted:,} accepted, {each.refused:,} refused, "
        f"{each.quarantined:,} quarantined, {each.recomputed:,} of them recomputed; "
        f"{each.shared:,} judged by others too, of which it alone refuses {each.refuses_alone:,} "
        f"and others refuse {each.accepts_alone:,}"
        for validator, each in archive.state.tallies.items()
    ]


def _verify_proof(file: Path, owner: str | None, archive: Archive | None, *, as_json: bool) -> int:
    from swarm.ledger import audit, proof_file

    try:
        with file_errors(file):
            proven = proof_file.read(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is no proof: {error}") from error
    problem = proven.problem()
    if problem is None and owner is not None and proven.signed.sender != owner:
        problem = f"its run belongs to {proven.signed.sender}, not to {owner}"
    if problem is not None:
        print(f"not proven: {printable(problem)}", file=sys.stderr)
        return 1
    receipt = proven.receipt
    verdict = receipt.verdict
    told = {
        "proven": True,
        "owner": proven.signed.sender,
        "run": proven.signed.body.run,
        "submission": verdict.submission.hex(),
        "worker": verdict.worker,
        "step": verdict.step,
        "number": verdict.number,
        "outcome": verdict.outcome,
        "by": receipt.envelope.sender,
        "index": receipt.index,
        "log_size": receipt.log_size,
    }
    now = audit.anchor(proven, readable_archive(archive)) if archive is not None else None
    if now is not None:
        told |= {"holds": now.holds, "now": now.sentence}
    if as_json:
        print_json(told)
        return 0 if now is None or now.holds else 1
    print(f"proven: submission {told['submission']} of {told['worker']}")
    print(f"was {told['outcome']} by {told['by']}, a validator of the run {told['run']}")
    print(f"and is entry {told['index']} of the {told['log_size']} that this validator signed")
    if now is None:
        return 0
    print(printable(now.line))
    return 0 if now.holds else 1


@exits
@explained(__file__)
def prove(submission: str, out: Path = Path("-"), home: Path = Path("~/.swarm")) -> None:
    """Write the proof, kept by the worker, that a verdict on its work is in its validator's log.

    `swarm ledger verify FILE.json` checks it offline. The validator may have deleted the entry."""
    from swarm.ledger.proof_file import file_of
    from swarm.look.archives import kept_proof

    check_writable("--out", out, () if out == Path("-") else (".json",))
    proof = file_of(kept_proof(home.expanduser(), submission))
    write_text("--out", msgspec.json.format(msgspec.json.encode(proof)).decode(), out)


@exits
@explained(__file__)
def export(
    out: Path, source: LedgerSource = None, bootstrap: Bootstrap = None, run: WhichRun = None
) -> int:
    """Write the entries of all logs, signed heads and verdicts, and credits as lines of JSON.

    Each row has the signed or hashed bytes, so `swarm ledger verify FILE` can check it again."""
    from swarm.look.archives import write_export

    check_writable("--out", out, (".jsonl",))
    archive = readable(source, bootstrap, run)
    rows = write_export(archive, out)
    print(numbered(f"{rows:,} rows in {out}"))
    report(archive)
    return 1 if archive.problems else 0


def readable(source: Path | None, bootstrap: list[str] | None, run: str | None) -> Archive:
    """The logs, with entries that this version of Swarm can read; raises `UserError`."""
    return readable_archive(_archive(source, bootstrap, run))


def readable_archive(archive: Archive) -> Archive:
    """The logs, unless an entry cannot be read; raises `UserError`."""
    try:
        archive.state  # noqa: B018 - decodes the entries
    except ValueError as error:
        raise UserError(
            f"a log holds {error}; `swarm ledger verify` names the log and the entry"
        ) from error
    return archive


def _archive(
    source: Path | None, bootstrap: list[str] | None, run: str | None, owner: str | None = None
) -> Archive:
    from swarm.look.archives import find_archive

    archive = find_archive(source, bootstrap, run)
    if owner is not None and archive.signed.sender != owner:
        raise UserError(f"the run {archive.run} belongs to {archive.signed.sender}, not to {owner}")
    return archive


def asked(
    source: Path | None,
    bootstrap: list[str] | None,
    run: str | None,
    *,
    home: Path | None = None,
    worker: str = "",
) -> tuple[Archive, RunStatus | None]:
    """The logs and, from the network, the run's state now.

    `home`: of the peer whose last bootstrap addresses are asked. `worker`: whose signed verdicts to
    fetch from the network, all by default."""
    from swarm.look.archives import fetch_archive, find_archive
    from swarm.look.onlooker import status_of
    from swarm.node.local import last_bootstrap, visit
    from swarm.run.run import Run
    from swarm.terminal.interrupt import run_until_interrupted

    if source is not None:
        return find_archive(source, bootstrap, run), None

    async def ask() -> tuple[Archive, RunStatus | None]:
        entry = bootstrap or last_bootstrap(home)
        async with visit(entry, run, looks_on=True) as (node, found):
            archive = await fetch_archive(node, found, worker)
            try:
                return archive, await status_of(node, Run(found.manifest_envelope))
            except PeerError:
                return archive, None  # the logs of those that answered will do

    return run_until_interrupted(ask, waiting="reading the logs of the trusted peers")


def report(archive: Archive) -> None:
    """Say which logs are missing."""
    for problem in archive.problems:
        print(f"not complete: {printable(problem)}", file=sys.stderr)
