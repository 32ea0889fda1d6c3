"""One screen about an inference peer before it works: what it found, and what it will do.

The running peer shows it at its start, and `swarm doctor` without joining a run. Imports no torch:
the child has surveyed the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.engines.doctor import disk, machine, readable
from peers.proofs.format import TOKEN_BYTES
from swarm.jobs.inference import Surveyed
from swarm.run.findings import Finding, Work
from swarm.settings import PeerSettings
from swarm.wire.manifest import RunManifest


@dataclass(frozen=True)
class Line:
    """This peer's line to the others."""

    addresses: Sequence[str]
    reachability: str
    """A value of `swarm.transport.Reachability`."""


def examine(
    settings: PeerSettings,
    surveyed: Surveyed,
    disk_free_bytes: int,
    *,
    work: Work | None = None,
    line: Line | None = None,
) -> list[Finding]:
    """What can be said before a policy is loaded."""
    findings = machine(surveyed, work)
    findings.append(disk(settings, disk_free_bytes, work))
    findings.append(uplink(settings))
    if line is not None:
        findings.append(_addresses(line))
    if work is not None:
        findings += [_run(work), submission(work.run.manifest)]
    return findings


def uplink(settings: PeerSettings) -> Finding:
    """The limit that the settings have for this peer's line."""
    limit = settings.uplink_mbps
    text = "no limit for pieces (set uplink_mbps to share the line)"
    if limit is not None:
        text = f"at most {limit:g} Mbit/s for pieces of policies"
    return Finding("uplink", text, {"limit_mbps": limit})


def _addresses(line: Line) -> Finding:
    meaning = {
        "public": "others can dial it",
        "port mapped": "others can dial it, at a forwarded port",
        "punched": "others reach this peer through relays, then directly",
        "relay only": "others reach this peer through relays; it needs no configuration",
    }.get(line.reachability, "not known yet whether others can dial it; either will do")
    shown = ", ".join(line.addresses[:2]) or "none"
    return Finding(
        "address",
        f"{shown}: {meaning}",
        {"addresses": list(line.addresses), "reachability": line.reachability},
    )


def _run(work: Work) -> Finding:
    manifest, order = work.run.manifest, work.order
    text = f"{manifest.name} ({manifest.model})"
    if order is not None:
        text += f", step {order.step} of {manifest.schedule.steps:,} with policy {order.policy}"
    figures = {
        "id": work.run.id,
        "model": manifest.model,
        "step": order.step if order else None,
        "policy": order.policy if order else None,
    }
    return Finding("run", text, figures)


def submission(manifest: RunManifest) -> Finding:
    """What one submission is, and how large."""
    sampling, limit = manifest.sampling, manifest.limits.submission_bytes_max
    rows = sampling.groups_per_submission * sampling.group_size
    size = int(rows * sampling.max_new_tokens * TOKEN_BYTES)
    names = ", ".join(dict.fromkeys(each.name for each in manifest.environments))
    return Finding(
        "submission",
        f"{rows:,} completions of up to {sampling.max_new_tokens:,} tokens for {names}: at most "
        f"about {readable(size)} to push (the run takes {readable(limit)})",
        {
            "completions": rows,
            "tokens_max": sampling.max_new_tokens,
            "bytes_max": size,
            "limit_bytes": limit,
        },
    )
