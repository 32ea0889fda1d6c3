"""What an inference peer would find on this machine, and whether the run takes its work."""

import shutil
from dataclasses import replace

from peers.engines.doctor import compute_findings, disk, task_findings
from peers.engines.installed import interpreter_for
from peers.inference.settings import InferenceSettings
from peers.proofs.format import TOKEN_BYTES
from swarm.errors import UserError
from swarm.run.findings import Finding, Work
from swarm.settings import PeerSettings
from swarm.terminal.figures import readable_bytes
from swarm.terminal.untrusted import printable
from swarm.wire.manifest import RunManifest, Thresholds
from swarm.world.home import existing


def interpreter_of(settings: PeerSettings) -> str | None:
    """The Python of the settings' engine; None: this one; raises `UserError` if not installed."""
    own = settings.of("inference", InferenceSettings)
    return interpreter_for(settings.engine, settings.home_path, own.interpreter, own.device)


async def findings(settings: PeerSettings, work: Work | None, model: str | None) -> list[Finding]:
    """See `swarm.roles.Role.doctor`."""
    own = settings.of("inference", InferenceSettings)
    try:
        interpreter = interpreter_of(settings)
    except UserError as error:
        return [Finding("engine", str(error), {}, problem=True)]
    found = await compute_findings(
        own,
        work,
        engine=settings.engine,
        interpreter=interpreter,
        model=model,
        allowed=settings.allowed,
    )
    free = shutil.disk_usage(existing(settings.home_path)).free
    found.append(replace(disk(settings, free, work), topic="space"))
    found.append(uplink(settings))
    if work is not None:
        manifest = work.run.manifest
        found += task_findings(settings, work)
        found.append(submission(manifest))
        text = f"the run takes {settings.engine}; {tolerated(manifest.thresholds)}"
        found.append(Finding("thresholds", text, {}))
    return found


def tolerated(thresholds: Thresholds) -> str:
    """What differences a run tolerates, as the rest of a sentence."""
    if thresholds.observes:
        return "it only observes how engines differ, and refuses and evicts nobody for that"
    measured = " and ".join(printable(each, 40) for each in thresholds.measured_dtypes)
    return (
        f"it tolerates what {measured or 'honest engines'} differ by (measured on "
        f"{thresholds.measured_tokens:,} tokens)"
    )


def uplink(settings: PeerSettings) -> Finding:
    """The limit that the settings have for this peer's line."""
    limit = settings.uplink_mbps
    text = "no limit for pieces (set uplink_mbps to share the line)"
    if limit is not None:
        text = f"at most {limit:g} Mbit/s for pieces of policies"
    return Finding("uplink", text, {"limit_mbps": limit})


def submission(manifest: RunManifest) -> Finding:
    """What one submission is, and how large."""
    sampling, limit = manifest.sampling, manifest.limits.submission_bytes_max
    rows = sampling.groups_per_submission * sampling.group_size
    size = int(rows * sampling.max_new_tokens * TOKEN_BYTES)
    names = ", ".join(dict.fromkeys(each.name for each in manifest.environments))
    return Finding(
        "submission",
        f"{rows:,} completions of up to {sampling.max_new_tokens:,} tokens for {names}: at most "
        f"about {readable_bytes(size)} to push (the run takes {readable_bytes(limit)})",
        {
            "completions": rows,
            "tokens_max": sampling.max_new_tokens,
            "bytes_max": size,
            "limit_bytes": limit,
        },
    )
