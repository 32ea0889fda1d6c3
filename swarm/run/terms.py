"""What a person reads of a run before he takes part in it."""

from __future__ import annotations

from swarm.run.run import Run
from swarm.terminal.untrusted import printable


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
