"""Choosing a run to join, whose owner's key is pinned on first use."""

import json
from collections.abc import Mapping, Sequence

import msgspec

from swarm.errors import DECODE_ERRORS, UserError
from swarm.run.manifest import run_id
from swarm.run.run import Run
from swarm.terminal.untrusted import printable
from swarm.wire.envelope import Envelope
from swarm.world import Disk


def topics(run: Run) -> list[tuple[str, str]]:
    """The run, its tasks and who may join, each with its topic; texts of strangers are as sent."""
    manifest = run.manifest
    environments = ", ".join(
        f"{each.name} {each.version}" + (", served" if each.where == "served" else "")
        for each in manifest.environments
    )
    sampling = manifest.sampling
    rows = sampling.groups_per_submission * sampling.group_size
    return [
        ("run", f"{manifest.name} ({manifest.model}), version {manifest.version} of its manifest"),
        ("tasks", f"{environments}; up to {sampling.max_new_tokens:,} tokens each"),
        ("work", f"{rows:,} completions in a submission, for {manifest.schedule.steps:,} steps"),
        ("admission", manifest.admissions.policy),
    ]


def terms(run: Run) -> list[str]:
    """The same as lines for a log."""
    return [f"{topic:<10} {printable(text)}" for topic, text in topics(run)]


_PINS = "pinned-runs.json"

NAMES_MAX = 10
"""Most runs that an error names."""


def choose_run(
    manifests: Sequence[Envelope], wanted: str | None, joined: Mapping[str, str] | None = None
) -> Envelope:
    """Choose the run to join: the one that `wanted` (`--run`) names, or the only one.

    `joined`: owners of the runs that this home has joined, by name; without `wanted`, the only one
    among these. Raises `UserError`."""
    names = ", ".join(run_id(envelope) for envelope in manifests[:NAMES_MAX]) or "none"
    if len(manifests) > NAMES_MAX:
        names += f" and {len(manifests) - NAMES_MAX} more (see swarm run list)"
    if wanted is None:
        before = [
            each
            for each in manifests
            if (joined or {}).get(run_id(each).partition("/")[2]) == run_id(each).partition("/")[0]
        ]
        if len(manifests) == 1 or len(before) == 1:
            return (before or list(manifests))[0]
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


async def pin_owner(disk: Disk, manifest: Envelope) -> bool:
    """Pin a run's owner; returns whether on first use. Raises `UserError` if another is pinned."""
    owner, _, name = run_id(manifest).partition("/")
    pins = await joined_runs(disk)
    pinned = pins.get(name)
    if pinned is None:
        await disk.write(_PINS, json.dumps({**pins, name: owner}, indent=1).encode())
    elif pinned != owner:
        raise UserError(
            f"the run {name!r} is signed by {owner}, but you joined it before when it was signed "
            f"by {pinned}; if the owner really changed, remove the entry from {_PINS} in --home"
        )
    return pinned is None


async def check_joined(disk: Disk, run: str, wanted: str | None) -> None:
    """Raise `UserError` for a run that the peer with this disk has not joined, if it joined others.

    Whoever can name this peer in a manifest of his own can show it that run. `wanted` (`--run`): a
    run's full id is taken."""
    pins = await joined_runs(disk)
    owner, _, name = run.partition("/")
    if pins and pins.get(name) != owner and wanted != run:
        joined = ", ".join(f"{pins[each]}/{each}" for each in sorted(pins)[:NAMES_MAX])
        raise UserError(
            f"the bootstrap peer shows run {run}, and this home has joined {joined}; give "
            f"--bootstrap of that run's network, or --run {run} if you mean this one"
        )


async def joined_runs(disk: Disk) -> dict[str, str]:
    """Owners of the runs that the peer with this disk has joined, by name; raises `UserError`."""
    if not disk.exists(_PINS):
        return {}
    try:
        return msgspec.json.decode(await disk.read(_PINS), type=dict[str, str])
    except DECODE_ERRORS as error:
        raise UserError(
            f"{_PINS} in --home is damaged ({error}); restore it from a copy, or remove it, and "
            "the bootstrap peer is believed about the run's owner once more"
        ) from error
