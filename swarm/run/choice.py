"""Choosing a run to join.

The owner's key is pinned on first use, so that a bootstrap peer cannot later hand out another run
under the same name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from swarm.envelope import Envelope
from swarm.errors import UserError
from swarm.run.manifest import run_id
from swarm.world import Disk

_PINS = "pinned-runs.json"

NAMES_MAX = 10
"""Most runs that an error names."""


def choose_run(manifests: Sequence[Envelope], wanted: str | None) -> Envelope:
    """Choose the run to join: the one that `wanted` (`--run`) names, or the only one.

    Raises `UserError`.
    """
    names = ", ".join(run_id(envelope) for envelope in manifests[:NAMES_MAX]) or "none"
    if len(manifests) > NAMES_MAX:
        names += f" and {len(manifests) - NAMES_MAX} more (swarm runs lists them)"
    if wanted is None:
        if len(manifests) == 1:
            return manifests[0]
        if not manifests:
            raise UserError(
                "the bootstrap peer knows no run; ask its operator, or start it with "
                "--manifest FILE"
            )
        raise UserError(f"the bootstrap peer knows several runs; choose one with --run: {names}")
    matching = [
        envelope
        for envelope in manifests
        if wanted in (run_id(envelope), run_id(envelope).partition("/")[2])
    ]
    owner, _, name = wanted.rpartition("/")
    others = [each for each in map(run_id, manifests) if each.partition("/")[2] == name]
    if owner and not matching and others:
        raise UserError(
            f"the run {name!r} is another owner's here ({', '.join(others[:NAMES_MAX])}), "
            f"not that of {owner}; ask whoever gave you the run's id or link, and check the "
            "bootstrap addresses"
        )
    if len(matching) != 1:
        problem = "no run" if not matching else "several runs"
        raise UserError(f"the bootstrap peer knows {problem} named {wanted!r}; it knows: {names}")
    return matching[0]


async def pin_owner(disk: Disk, manifest: Envelope) -> None:
    """Remember a run's owner on first use; raises `UserError` if the name has another owner."""
    run = run_id(manifest)
    owner, _, name = run.partition("/")
    pins = json.loads(await disk.read(_PINS)) if disk.exists(_PINS) else {}
    pinned = pins.get(name)
    if pinned is None:
        await disk.write(_PINS, json.dumps({**pins, name: owner}, indent=1).encode())
    elif pinned != owner:
        raise UserError(
            f"the run {name!r} is signed by {owner}, but you joined it before when it was signed "
            f"by {pinned}; if the owner really changed, remove the entry from {_PINS} in --home"
        )
