"""Orders and verdicts for tests: small honest ones, with any field changed by name."""

from __future__ import annotations

from typing import Any

import msgspec

from swarm.jobs import SubmissionOrder
from swarm.wire.identity import Identity
from swarm.wire.manifest import EnvironmentReference, Sampling
from swarm.wire.messages import CheckpointReference, StepOrder, Verdict

ORDER = SubmissionOrder(
    run="owner/run",
    policy=CheckpointReference(lineage=0, step=1, digest=bytes(32), size_bytes=1),
    step=3,
    nonce=bytes(32),
    worker=Identity(bytes(32)).peer_id,
    number=0,
    groups=4,
    environments=[EnvironmentReference(name="sort-digits", version="1")],
    sampling=Sampling(
        temperature=1.0, max_new_tokens=8, stop_ids=[2], group_size=4, groups_per_submission=4
    ),
)


def reference(name: str = "sort-digits", version: str = "1", **fields: Any) -> EnvironmentReference:
    """An environment as a run manifest names it."""
    return EnvironmentReference(name=name, version=version, **fields)


def policy(step: int, lineage: int = 0) -> CheckpointReference:
    return msgspec.structs.replace(ORDER.policy, step=step, lineage=lineage)


def submission_order(base: SubmissionOrder = ORDER, **changes: Any) -> SubmissionOrder:
    """`base` with other values of its own fields, or of its sampling's."""
    sampling = {name: changes.pop(name) for name in Sampling.__struct_fields__ if name in changes}
    replaced = msgspec.structs.replace(base.sampling, **sampling)
    return msgspec.structs.replace(base, **{"sampling": replaced, **changes})


def step_order(step: int, lineage: int = 0, **differs: Any) -> StepOrder:
    """The order of a step, whose rollouts come from policy `step`."""
    fields: dict[str, Any] = {
        "step": step,
        "revision": 0,
        "checkpoint": policy(step, lineage),
        "nonce": bytes(32),
        "groups_wanted": 8,
        "submissions_max": 9,
    }
    return StepOrder(**fields | differs)


def verdict(number: int = 0, **differs: Any) -> Verdict:
    """An accepted one on four groups for step 0, unless it `differs`."""
    fields: dict[str, Any] = {
        "submission": bytes([number]) * 32,
        "size_bytes": 1000,
        "worker": ORDER.worker,
        "lineage": 0,
        "step": 0,
        "policy": 0,
        "number": number,
        "outcome": "accepted",
        "rewards": [[0.0, 1.0]] * 4,
    }
    return Verdict(**fields | differs)
