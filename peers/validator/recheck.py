"""Checking a proven fault again, on anyone's machine: the same checks on the same signed bytes."""

from __future__ import annotations

from pathlib import Path

import trio

from peers.validator.inspector import InspectorService
from swarm.errors import UserError
from swarm.jobs.validation import Grade, Inspect, InspectionSetup, Report
from swarm.ledger.faults import Fault
from swarm.run.work import submission_order


async def recheck(fault: Fault, file: Path, model: Path, aside: Path) -> Report:
    """Inspect a kept file as the validator that refused it did.

    `model` is a folder with the run's tokenizer and config.json; `aside` is a folder for temporary
    files. Raises `UserError` if the tokenizer or an environment is missing here, and for a
    submission of a step with states.
    """
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
        path=str(file),
        digest=fault.submission.digest,
        canonical_path=str(aside / "canonical"),
        tokenizer_folder=str(model),
        bytes_max=manifest.limits.submission_bytes_max,
        environment_peers=manifest.environment_ids(),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.run)
        found: Report = await service.inspect(job)
        if not found.failed:
            found = await service.grade(Grade(digest=job.digest))
        nursery.cancel_scope.cancel()
    return found
