"""Rules of the protocol about submissions that more than one role follows."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.jobs import SubmissionOrder
from swarm.rollouts.continuations import State, continued_groups
from swarm.rollouts.seeds import nonce_of, rendezvous
from swarm.run.curriculum import environments_of
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import StepOrder


def judges_of(validators: Sequence[str], nonce: bytes, worker: str, number: int) -> list[str]:
    """The validators in the order in which a worker has to ask them to judge a submission.

    `nonce` is that of the step order.
    """
    return rendezvous(validators, nonce, worker.encode(), number.to_bytes(8, "big"))


def submission_order(
    run: str,
    manifest: RunManifest,
    order: StepOrder,
    *,
    worker: str,
    number: int,
    entry: bytes,
    groups: int | None = None,
    states: Sequence[State] = (),
) -> SubmissionOrder:
    """The fields that determine a submission's content, all of them signed.

    `entry` is that of the worker's admission, `groups` the submission's (None: as the manifest
    has it), `states` those that the step order names.
    """
    nonce = nonce_of(order.nonce, entry)
    if groups is None:
        groups = manifest.sampling.groups_per_submission
    return SubmissionOrder(
        run=run,
        policy=order.checkpoint,
        step=order.step,
        nonce=nonce,
        worker=worker,
        number=number,
        groups=groups,
        environments=environments_of(manifest, order),
        sampling=manifest.sampling,
        continued=continued_groups(states, manifest.values.share, nonce, worker, number, groups),
    )
