"""One screen about an inference peer before it works: what it found, and what it will do.

The running peer shows it at its start, and `swarm preflight` without joining a run. Imports no
torch: the child has surveyed the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peers.engines.config import ITEM_BYTES
from peers.proofs.format import CHUNK_TOKENS, PROOF_BYTES
from swarm.findings import Finding
from swarm.jobs.inference import Loaded, Surveyed
from swarm.manifest import RunManifest
from swarm.messages import Checkpoint, StepOrder
from swarm.run.run import Run
from swarm.settings import PeerSettings
from swarm.untrusted import printable

TOKEN_BYTES = 8 + PROOF_BYTES / CHUNK_TOKENS
"""Bytes of a token in a submission's file before compression: id, log-probability, proof."""


@dataclass(frozen=True)
class Work:
    """A run, as far as it is known."""

    run: Run
    checkpoint: Checkpoint | None = None
    order: StepOrder | None = None


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
    findings.append(_uplink(settings))
    if line is not None:
        findings.append(_addresses(line))
    if work is not None:
        findings += [_run(work), _submission(work.run.manifest)]
    return findings


def machine(surveyed: Surveyed, work: Work | None) -> list[Finding]:
    """The engine, its device, and the device's memory."""
    findings = [_engine(surveyed), _device(surveyed, work)]
    if surveyed.unused_gpu:
        findings.append(Finding("gpu", surveyed.unused_gpu, {"unused": surveyed.unused_gpu}))
    return [*findings, _memory(surveyed, work)]


def room(loaded: Loaded) -> Finding:
    """How many completions the engine generates at once with the policy that it has loaded."""
    text = (
        f"weights {_bytes(loaded.weights_bytes)}, cache {_bytes(loaded.row_bytes)} per completion "
        f"of {loaded.row_tokens:,} tokens, {_bytes(loaded.free_bytes)} were free"
    )
    if loaded.slots:
        text += f": up to {loaded.slots:,} completions at once"
    names = ("weights_bytes", "row_bytes", "row_tokens", "slots", "free_bytes")
    return Finding("model", text, {name: getattr(loaded, name) for name in names})


def _engine(found: Surveyed) -> Finding:
    torch = f" (PyTorch {found.torch_version})" if found.torch_version else ""
    return Finding(
        "engine",
        f"{found.engine} {found.engine_version}".strip() + torch,
        {
            "name": found.engine,
            "version": found.engine_version,
            "torch": found.torch_version,
        },
    )


def _device(found: Surveyed, work: Work | None) -> Finding:
    measured = work.run.manifest.thresholds.measured_dtypes if work is not None else []
    unmeasured = bool(measured) and found.dtype not in measured
    advice = f"; the run measured {' and '.join(measured)} alone: set dtype to one of them, or "
    advice += "honest work may be refused"
    driver = f", {found.driver}" if found.driver else ""
    threads = f"{found.threads} thread{'s' * (found.threads != 1)}"
    return Finding(
        "device",
        f"{found.device} ({found.device_title}){driver}, computing in {found.dtype}, {threads}"
        + (printable(advice) if unmeasured else ""),
        {
            "name": found.device,
            "title": found.device_title,
            "driver": found.driver,
            "dtype": found.dtype,
            "threads": found.threads,
        },
        advice=unmeasured,
    )


def _memory(found: Surveyed, work: Work | None) -> Finding:
    figures: dict[str, Any] = {"free_bytes": found.free_bytes}
    text = f"{_bytes(found.free_bytes)} free on {found.device}"
    if work is None or work.checkpoint is None:
        return Finding("memory", text, figures)
    total = work.checkpoint.total_bytes + work.checkpoint.base_bytes
    # Policies of a run are published in bfloat16, or in float32 where the base policy was.
    most = total * ITEM_BYTES.get(found.dtype, 2) // 2
    figures |= {"weights_bytes_min": total, "weights_bytes_max": most}
    needs = _bytes(total) if most <= total else f"{_bytes(total)} to {_bytes(most)}"
    text += f"; the weights need {needs}, and each completion its cache besides"
    return Finding("memory", text, figures, problem=total > found.free_bytes)


def disk(settings: PeerSettings, free_bytes: int, work: Work | None) -> Finding:
    """The room for the policies that the run keeps."""
    whose = "left of the quota" if settings.quota_bytes is not None else "free"
    figures: dict[str, Any] = {"free_bytes": free_bytes, "home": str(settings.home_path)}
    text = f"{_bytes(free_bytes)} {whose} in {settings.home_path}"
    if work is None or work.checkpoint is None:
        return Finding("disk", text, figures)
    size, kept = work.checkpoint.total_bytes, work.run.checkpoints_kept
    base = work.checkpoint.base_bytes
    needed = base + size * kept
    figures |= {"policy_bytes": size, "policies_kept": kept, "needed_bytes": needed}
    adapted = f" and their base of {_bytes(base)}" if base else ""
    text += f"; {kept} policies of {_bytes(size)}{adapted} are kept, {_bytes(needed)} in all"
    return Finding("disk", text, figures, problem=base + size > free_bytes)


def _uplink(settings: PeerSettings) -> Finding:
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


def _submission(manifest: RunManifest) -> Finding:
    sampling, limit = manifest.sampling, manifest.limits.submission_bytes_max
    rows = sampling.groups_per_submission * sampling.group_size
    size = int(rows * sampling.max_new_tokens * TOKEN_BYTES)
    names = ", ".join(dict.fromkeys(each.name for each in manifest.environments))
    return Finding(
        "submission",
        f"{rows:,} completions of up to {sampling.max_new_tokens:,} tokens for {names}: at most "
        f"about {_bytes(size)} to push (the run takes {_bytes(limit)})",
        {
            "completions": rows,
            "tokens_max": sampling.max_new_tokens,
            "bytes_max": size,
            "limit_bytes": limit,
        },
    )


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
