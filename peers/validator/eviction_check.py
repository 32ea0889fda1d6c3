"""Computing the reason of an eviction again, from the logs and the evidence that is kept."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio
from blake3 import blake3

from peers.environments.run_probe import probe_hashes
from peers.validator.inspector import InspectorService
from swarm.errors import PeerError, UserError
from swarm.jobs.validation import Grade, Inspect, InspectionSetup, Report
from swarm.ledger.archive import Archive
from swarm.ledger.client import LedgerClient
from swarm.ledger.entries import Evicted, Judged
from swarm.ledger.evidence import WORDS
from swarm.ledger.faults import Fault, decode_record, path_of
from swarm.ledger.state import Record
from swarm.look.archives import home_rows
from swarm.look.onlooker import ask_all
from swarm.look.why import evidence_against
from swarm.node.local import last_bootstrap, visit
from swarm.node.node import Node
from swarm.run.run import Run
from swarm.run.work import submission_order
from swarm.terminal.interrupt import run_until_interrupted
from swarm.wire.envelope import Dropped, open_envelope
from swarm.wire.messages import Eviction
from swarm.world.tasks import alongside

Evidence = tuple[Fault, bytes]
"""The signed messages of a fault, and the file."""


@dataclass
class Checked:
    """An eviction, its place in the log of the peer that evicted, and the result of a check."""

    record: Record
    eviction: Eviction
    issued_ms: int
    confirmed: bool = False
    lines: list[str] = field(default_factory=list)
    """What was computed, a sentence each."""


def newest_eviction(archive: Archive, peer: str) -> Checked:
    """The newest eviction of a peer by a trusted peer; raises `UserError` if there is none."""
    found: list[Checked] = []
    for record in archive.records:
        if isinstance(record.entry, Evicted) and record.entry.peer == peer:
            try:
                envelope = open_envelope(record.entry.envelope)
            except Dropped:
                continue  # `audit` reports it
            message = envelope.message
            if envelope.sender == record.owner and isinstance(message, Eviction):
                found.append(Checked(record, message, envelope.body.issued_ms))
    if not found:
        raise UserError(f"no log has an eviction of {peer}")
    return max(found, key=lambda each: each.issued_ms)


def is_proven_fault(archive: Archive, found: Checked) -> bool:
    """Whether the log of the evicting peer calls the submission a proven fault."""
    return any(
        isinstance(record.entry, Judged)
        and record.owner == found.record.owner
        and record.entry.submission == found.eviction.submission
        and record.entry.proven_fault
        for record in archive.records
    )


def check_statistics(archive: Archive, checked: Checked) -> None:
    """Sum the evidence twice, with the others' logs and without them, since nobody knows how far
    the evicting peer had read them. Either sum alone exceeds the threshold for an honest worker
    with the probability `eviction_p_value` at most."""
    peer, owner, index = checked.eviction.peer, checked.record.owner, checked.record.index
    limit = archive.manifest.thresholds.eviction_p_value
    alone = {other: 0 for other in archive.manifest.validator_ids()}
    for whose, before in (
        ("all logs", {owner: index}),
        ("the log of the evicting validator", alone | {owner: index}),
    ):
        standing = evidence_against(archive, peer, before).standing()
        checked.lines.append(
            f"evidence in {whose}: p <= {standing.p_value:.1e} (threshold {limit:.0e}), most of "
            f"it of {WORDS[standing.process]}"
        )
        if standing.p_value <= limit:
            checked.confirmed = True
            break


async def check_fault(
    archive: Archive, checked: Checked, evidence: Evidence, tokenizer: Path | None
) -> None:
    """Run the exact checks again on the file that the evicted worker signed."""
    fault, file = evidence
    problem = _problem(archive, checked.eviction, fault, file)
    if problem is not None:
        checked.lines.append(f"the evidence does not belong to this eviction: {problem}")
        return
    checked.lines.append(
        f"the worker signed the hash of this file of {len(file):,} bytes for step "
        f"{fault.order.step}, number {fault.submission.number}; {fault.ordered.sender} signed the "
        "order of that step"
    )
    with tempfile.TemporaryDirectory(prefix="swarm-recheck-") as name:
        aside = Path(name)
        await trio.Path(aside / "submission").write_bytes(file)
        result = await recheck(fault, _model(fault, tokenizer), aside)
    if result.failed and result.proven_fault:
        failed = next(check for check in result.checks if not check.passed)
        checked.confirmed = True
        checked.lines.append(
            f"the check {result.failed} fails here too ({failed.figure:g} against "
            f"{failed.threshold:g}): {result.detail}"
        )
    else:
        checked.lines.append(
            f"no proven fault was found here: {result.detail or 'all exact checks pass'}"
        )


async def recheck(fault: Fault, model: Path, aside: Path) -> Report:
    """Inspect `aside`/submission as its validator did; `model`: a folder with tokenizer and
    config.json. Raises `UserError` without tokenizer or environment, and for a step with states."""
    manifest = fault.manifest
    if fault.order.states:
        raise UserError(
            f"step {fault.order.step} continues the states {fault.order.states.hex()}, which are "
            "not part of the evidence, so its submissions cannot be checked again here; ask the "
            "validator that refused this one"
        )
    service = InspectorService(InspectionSetup(environments=manifest.environments))
    job = Inspect(
        order=submission_order(
            fault.announced.body.run,
            manifest,
            fault.order,
            worker=fault.worker,
            number=fault.submission.number,
            entry=fault.submission.entry,
            groups=fault.submission.groups,
        ),
        path=str(aside / "submission"),
        digest=fault.submission.digest,
        canonical_path=str(aside / "canonical"),
        tokenizer_folder=str(model),
        bytes_max=manifest.limits.submission_bytes_max,
        environment_peers=manifest.environment_ids(),
    )
    async with alongside(service.run):
        found: Report = await service.inspect(job)
        if not found.failed:
            found = await service.grade(Grade(digest=job.digest))
    return found


def _problem(archive: Archive, eviction: Eviction, fault: Fault, file: bytes) -> str | None:
    if fault.worker != eviction.peer:
        return f"the announcement is signed by {fault.worker}"
    if fault.submission.digest != eviction.submission:
        return "it is about another submission"
    if blake3(file).digest() != fault.submission.digest:
        return "the file is not the announced one"
    if (fault.signed.sender, fault.signed.body.run) != (archive.signed.sender, archive.run):
        return "it is from another run"
    return None


def _model(fault: Fault, tokenizer: Path | None) -> Path:
    """A folder with the run's tokenizer; raises `UserError` if this machine renders otherwise."""
    folder = tokenizer or Path(fault.manifest.model)
    if not folder.is_dir():
        raise UserError(
            f"the checks need the run's tokenizer and config.json; give --tokenizer the folder of "
            f"the model {fault.manifest.model}"
        )
    hashes = probe_hashes(folder, fault.manifest.environments)
    if hashes.tokenizer != fault.manifest.tokenizer_hash:
        raise UserError(
            f"{folder} has another tokenizer than the run; give --tokenizer the right one"
        )
    for reference, probe in zip(fault.manifest.environments, hashes.probes, strict=True):
        if probe != reference.probe_hash:
            raise UserError(
                f"the environment {reference.name} draws other tasks on this machine than the "
                f"run's; install its version {reference.version}"
            )
    return folder


# --- finding the evidence --------------------------------------------------------------------


def find_evidence(
    archive: Archive, found: Eviction, source: Path | None, bootstrap: Sequence[str] | None
) -> Evidence:
    """A proven fault's evidence, from a home or the trusted peers; raises `UserError`."""
    submission, worker = found.submission, found.peer
    if source is None:
        entry = bootstrap or last_bootstrap()
        return run_until_interrupted(_fetch, entry, archive.run, submission, worker)
    home = source.expanduser()
    if not home.is_dir():
        raise UserError("an export holds no files; ask the network, or give the validator's home")
    rows = home_rows(
        home / "ledger.sqlite",
        "SELECT record FROM proven_faults WHERE submission = ? AND worker = ?",
        submission,
        worker,
    )
    if not rows or not (home / path_of(submission)).exists():
        raise _missing(submission, [])
    try:
        fault = decode_record(rows[0][0]).opened
    except ValueError as error:
        raise UserError(f"the evidence cannot be used: {error}") from error
    return fault, (home / path_of(submission)).read_bytes()


async def _fetch(bootstrap: Sequence[str], run: str, submission: bytes, worker: str) -> Evidence:
    async with visit(bootstrap, run, looks_on=True) as (node, joined):
        return await fetch_evidence(node, joined, submission, worker)


async def fetch_evidence(node: Node, run: Run, submission: bytes, worker: str) -> Evidence:
    """Fetch the evidence of a fault from any trusted peer that keeps it; raises `UserError`."""
    found: list[Evidence] = []
    problems: list[str] = []

    async def ask(client: LedgerClient) -> None:
        kept = await client.fault(submission, worker)
        if kept is not None and not found:
            record, size = kept
            try:
                fault = record.opened
            except ValueError as error:
                raise PeerError(f"{client.peer} keeps unusable evidence: {error}") from error
            if size != fault.submission.size_bytes:
                raise PeerError(f"{client.peer} keeps a file of another size than announced")
            found.append((fault, await client.fault_file(submission, size)))

    await ask_all(node, run.manifest.trusted_ids(), ask, problems)
    if not found:
        raise _missing(submission, problems)
    return found[0]


def _missing(submission: bytes, problems: Sequence[str]) -> UserError:
    reasons = f" ({'; '.join(problems)})" if problems else ""
    return UserError(
        f"no trusted peer keeps the evidence of the fault in {submission.hex()}{reasons}; "
        "validators keep it for the last 64 evicted peers"
    )
