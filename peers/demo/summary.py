"""The results of a demo: the policy, a summary as JSON, the reward curve, a page on the screen."""

import shutil
from pathlib import Path
from typing import Any

import trio
from rich.table import Table
from rich.text import Text

from peers.demo.setup import DemoOptions
from peers.demo.state import SwarmState
from peers.engines.adapter_config import is_adapter
from swarm.terminal.figures import readable_bytes, readable_seconds
from swarm.terminal.output import write_json

OUTPUT = Path("demo-output")

SHOWN_CHARACTERS = 60
"""Of a question or an answer."""

SMOOTHING_STEPS = 15
"""Window, in steps, of the moving average that the picture shows as a smooth line."""


def write_results(state: SwarmState, options: DemoOptions) -> dict[str, Any]:
    """Write the results to their folder; returns the summary."""
    output = options.out or OUTPUT
    output.mkdir(parents=True, exist_ok=True)
    policy = output / "policy"
    if state.finished_folder:
        shutil.rmtree(policy, ignore_errors=True)
        if is_adapter(Path(state.finished_folder)):
            from peers.merging.merge import Recipe, merge  # which imports torch

            merge(Recipe([Path(state.finished_folder)]), policy, lambda _done, _all: None)
        else:
            shutil.copytree(state.finished_folder, policy)
    summary = summarise(
        state,
        trio.current_time(),
        seed=options.seed,
        environment=options.environment,
        model=options.model,
        policy_folder=str(policy) if policy.exists() else None,
    )
    draw_rewards(summary, output / "reward.png")
    summary["seconds"] = round(trio.current_time() - state.started, 2)
    summary["seconds_by_phase"] = seconds_by_phase(state, trio.current_time())
    write_json("--out", summary, output / "summary.json")
    return summary


def seconds_by_phase(state: SwarmState, now: float) -> dict[str, float]:
    """Return the seconds of each phase. Phases do not overlap, so they add up to the total."""
    begins = sorted(state.marks.items(), key=lambda item: item[1])
    ends = [begin for _, begin in begins[1:]] + [now]
    return {phase: round(end - begin, 2) for (phase, begin), end in zip(begins, ends, strict=True)}


def summarise(
    state: SwarmState,
    now: float,
    *,
    seed: int,
    environment: str = "sort-digits",
    model: str | None = None,
    policy_folder: str | None = None,
) -> dict[str, Any]:
    """The summary as plain data: accuracies as shares of `held_out_prompts`, times in seconds, byte
    counts of the bodies of blobs. A value is None if the run ended too early to know it."""
    rewards = state.rewards()
    return {
        "reward_first": rewards[0][1] if rewards else None,
        "reward_last": rewards[-1][1] if rewards else None,
        **{
            f"{kind}_accuracy_{moment}": state.accuracy.get(moment, {}).get(kind)
            for kind in ("sampled", "greedy")
            for moment in ("before", "after")
        },
        "steps": state.step,
        "seconds": round(now - state.started, 2),
        "seconds_by_phase": seconds_by_phase(state, now),
        "bytes_by_peer": {
            peer.name: {"sent": peer.sent, "received": peer.received}
            for peer in state.peers.values()
        },
        "verdicts": {"accepted": 0, "quarantined": 0} | dict(sorted(state.counts.items())),
        "seed": seed,
        "environment": environment,
        "title": state.title,
        "model": model,
        "held_out_prompts": state.held_out,
        "answers": {
            moment: [{"question": a.question, "answer": a.text, "right": a.right} for a in answers]
            for moment, answers in state.measured.items()
        },
        "peers": {
            peer.name: {"role": peer.role, "id": identifier, "state": peer.state}
            for identifier, peer in state.peers.items()
        },
        "restarts": {peer.name: peer.restarts for peer in state.peers.values() if peer.restarts},
        "evicted": dict(sorted(state.evicted.items())),
        "policy_folder": policy_folder,
        "warning": state.warning,
        "rewards": [round(reward, 4) for _, reward in rewards],
    }


def draw_rewards(summary: dict[str, Any], path: Path) -> None:
    """Draw the reward curve as a PNG. Imports matplotlib, which takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rewards: list[float] = summary["rewards"]
    half = SMOOTHING_STEPS // 2
    windows = [rewards[max(0, at - half) : at + half + 1] for at in range(len(rewards))]
    smooth = [sum(window) / len(window) for window in windows]
    drawing = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = drawing.add_subplot()
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="#9ecae1", linewidth=0.8, label="mean reward of a step")
    axes.plot(steps, smooth, color="#08519c", linewidth=2.0, label="smoothed")
    for moment, place in (("before", 1), ("after", max(1, len(rewards)))):
        accuracy = summary[f"sampled_accuracy_{moment}"]
        if accuracy is not None:
            axes.plot(
                place,
                accuracy,
                marker="D",
                linestyle="none",
                color="#d94801",
                label="sampled accuracy, held-out prompts" if moment == "before" else None,
            )
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02), xlim=(0, max(2, len(rewards)) + 1))
    axes.set_title(
        f"{summary['title']}: {summary['steps']} steps in {readable_seconds(summary['seconds'])}, "
        f"seed {summary['seed']}"
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _answer(answer: dict[str, Any]) -> Text:
    return Text(answer["answer"][:SHOWN_CHARACTERS], style="green" if answer["right"] else "red")


def page(summary: dict[str, Any], files: dict[str, Path]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def change(before: float | None, after: float | None) -> Text:
        return (
            Text(_share(before), style="bright_black")
            + Text(" → ", style="bright_black")
            + Text(_share(after), style="bold green")
        )

    table.add_row("reward", change(summary["reward_first"], summary["reward_last"]))
    for kind in ("sampled", "greedy"):
        before, after = (summary[f"{kind}_accuracy_{when}"] for when in ("before", "after"))
        line = change(before, after)
        line.append(f"  on {summary['held_out_prompts']} held-out prompts", style="bright_black")
        table.add_row(f"{kind} accuracy", line)
    answers = summary["answers"]
    for before, after in zip(answers.get("before", ()), answers.get("after", ()), strict=False):
        table.add_row(
            "asked",
            Text(f"{before['question'][:SHOWN_CHARACTERS]}  ")
            + _answer(before)
            + Text("  →  ", style="bright_black")
            + _answer(after),
        )
    phases = ", ".join(
        f"{phase} {readable_seconds(seconds)}"
        for phase, seconds in summary["seconds_by_phase"].items()
    )
    table.add_row(
        "steps", f"{summary['steps']} in {readable_seconds(summary['seconds'])} ({phases})"
    )
    verdicts = ", ".join(
        f"{count:,} {'' if cause in ('accepted', 'quarantined') else 'refused: '}{cause}"
        for cause, count in summary["verdicts"].items()
    )
    table.add_row("verdicts", Text(verdicts))
    table.add_row(
        "bytes sent",
        ", ".join(
            f"{name} {readable_bytes(moved['sent'])}"
            for name, moved in summary["bytes_by_peer"].items()
            if moved["sent"]
        )
        or "none",
    )
    if summary["restarts"]:
        restarts = (f"{name} {count}" for name, count in summary["restarts"].items())
        table.add_row("restarts", ", ".join(restarts))
    for name, reason in summary["evicted"].items():
        table.add_row("evicted", Text(f"{name}: {reason}", style="bold red"))
    if summary["warning"]:
        table.add_row("WARNING", Text(summary["warning"], style="bold red"))
    for what, path in files.items():
        table.add_row(what, Text(str(path)))
    return table
