"""The figures of an evaluation: as tables to read, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from peers.evaluation.options import Evaluation
from peers.evaluation.run import Measured
from peers.evaluation.statistics import Estimate, difference, estimate, pass_at_k
from swarm.jobs.evaluation import Sample

SOLVED = 1.0
"""Reward from which on a sample counts as right."""


def figures_of(wanted: Evaluation, measured: Measured) -> dict[str, dict[str, Any]]:
    """By environment: pass@k and mean reward with their intervals, and the samples' lengths."""
    found: dict[str, dict[str, Any]] = {}
    for label, tasks in zip(wanted.labels, measured.samples, strict=True):
        every = [sample for samples in tasks for sample in samples]
        found[label] = {
            "tasks": len(tasks),
            "samples": wanted.samples,
            "pass_at": {k: estimate(_passes(tasks, k)) for k in wanted.pass_at},
            "reward": estimate(_rewards(tasks)),
            "tokens": sum(sample.tokens for sample in every) / len(every),
            "finished": sum(sample.finished for sample in every) / len(every),
        }
    return found


def gains_of(wanted: Evaluation, measured: Measured, base: Measured) -> dict[str, dict[str, Any]]:
    """By environment: what a checkpoint gained over its base, task by task."""
    return {
        label: {
            "pass_at": {
                k: difference(_passes(tasks, k), _passes(others, k)) for k in wanted.pass_at
            },
            "reward": difference(_rewards(tasks), _rewards(others)),
        }
        for label, tasks, others in zip(wanted.labels, measured.samples, base.samples, strict=True)
    }


def report(wanted: Evaluation, measured: Measured, base: Measured | None = None) -> dict[str, Any]:
    """Everything, for `--json`."""
    found: dict[str, Any] = {
        "split": wanted.split,
        "temperature": None if wanted.greedy else wanted.temperature,
        "seed": wanted.seed,
        "checkpoint": _described(wanted, measured),
    }
    if base is not None:
        found["base"] = _described(wanted, base)
        found["difference"] = _plain(gains_of(wanted, measured, base))
    return found


def _described(wanted: Evaluation, measured: Measured) -> dict[str, Any]:
    return {
        "name": measured.name,
        "hash": measured.drawn.checkpoint,
        "engine": measured.drawn.engine,
        "max_new_tokens": measured.drawn.max_new_tokens,
        "environments": _plain(figures_of(wanted, measured)),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        return asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def tables(wanted: Evaluation, measured: Measured, base: Measured | None = None) -> list[str]:
    """The checkpoint's figures, and the comparison with its base."""
    found = [details(wanted, measured)]
    return found if base is None else [*found, comparison(wanted, measured, base)]


def details(wanted: Evaluation, measured: Measured) -> str:
    """One checkpoint's figures, a line per environment; shares in percent."""
    head = ["", "tasks", "samples", *(f"pass@{k}" for k in wanted.pass_at)]
    rows = [[*head, "reward", "tokens", "finished"]]
    for label, found in figures_of(wanted, measured).items():
        rows.append(
            [
                label,
                str(found["tasks"]),
                str(found["samples"]),
                *(_percent(found["pass_at"][k]) for k in wanted.pass_at),
                _figure(found["reward"]),
                f"{found['tokens']:.1f}",
                f"{100 * found['finished']:.1f} %",
            ]
        )
    return aligned(rows)


def comparison(wanted: Evaluation, measured: Measured, base: Measured) -> str:
    """Models as rows and environments as columns, with pass@1 (the first of `pass_at`) in percent:
    the form of INTELLECT-2's Table 1 (arXiv 2505.07291)."""
    k = wanted.pass_at[0]
    gains = gains_of(wanted, measured, base)
    rows = [[f"pass@{k}, %", *wanted.labels]]
    for each in (measured, base):
        found = figures_of(wanted, each)
        rows.append([each.name, *(_percent(found[name]["pass_at"][k]) for name in wanted.labels)])
    rows.append(
        ["difference", *(_percent(gains[name]["pass_at"][k], "+") for name in wanted.labels)]
    )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _percent(found: Estimate, sign: str = "") -> str:
    return (
        f"{100 * found.value:{sign}.1f} [{100 * found.low:{sign}.1f}, {100 * found.high:{sign}.1f}]"
    )


def _figure(found: Estimate) -> str:
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _passes(tasks: Sequence[Sequence[Sample]], k: int) -> list[float]:
    return [
        pass_at_k(len(samples), sum(each.reward >= SOLVED for each in samples), k)
        for samples in tasks
    ]


def _rewards(tasks: Sequence[Sequence[Sample]]) -> list[float]:
    return [sum(each.reward for each in samples) / len(samples) for samples in tasks]
