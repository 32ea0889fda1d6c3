"""`swarm status`: a run's progress and its peers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.terminal.exit import exits
from swarm.terminal.figures import DIM, ROLE_STYLES, STATE_STYLES, readable_bytes
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import AsJson, Bootstrap, WhichRun, explained
from swarm.terminal.output import plain, print_json, print_lines
from swarm.terminal.untrusted import printable

if TYPE_CHECKING:
    from rich.text import Text

    from swarm.look.onlooker import RunStatus
    from swarm.wire.messages import PeerState, Present

WIDTH = 80
"""Columns of the output. A complete id takes 52 and leaves room for roles and standing."""

PEERS_LISTED = 16
"""Most peers that are listed one by one without `--all`. A larger run has a summary."""

ROLES_SHOWN = 7
"""Most rows of the table of roles. Peers name their roles themselves."""

PEERS_NAMED = 4
"""Peers named in each part of a summary."""

STATES: tuple[PeerState, ...] = ("live", "suspected", "gone", "left", "finished", "evicted")


@exits
@explained(__file__, MOST=str(PEERS_LISTED))
def status(
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    home: Path | None = None,
    every: bool = False,
    as_json: AsJson = False,
) -> None:
    """Show a run's progress and its peers. ✓ marks the peers that the owner trusts."""
    from swarm.look.onlooker import status_of
    from swarm.node.local import last_bootstrap, visit

    async def ask() -> RunStatus:
        async with visit(bootstrap or last_bootstrap(home), run, looks_on=True) as (node, joined):
            return await status_of(node, joined)

    found = run_until_interrupted(ask, waiting="asking the run's trusted peers")
    if as_json:
        print_json(status_object(found))
        return
    from rich.console import Console

    print_lines(status_lines(found, len(found.present) if every else PEERS_LISTED), Console())


def status_object(status: RunStatus) -> dict[str, Any]:
    """Convert the status to plain data."""
    order, checkpoint, evaluation = status.order, status.checkpoint, status.evaluation
    return {
        "run": status.run.id,
        "step": order.step if order else None,
        "steps": status.run.manifest.schedule.steps,
        "policy": checkpoint.step if checkpoint else None,
        "reward": checkpoint.reward if checkpoint else None,
        "evaluation": {
            "policy": evaluation.reference.step,
            "tasks": evaluation.tasks,
            "reward": evaluation.reward,
            "environments": [plain(each) for each in evaluation.environments],
            "by": status.evaluator,
        }
        if evaluation
        else None,
        "state": status.state,
        "forks": dict(sorted(status.forks.items())),
        "peers": {
            peer: {"standing": entry.state, "age_seconds": round(entry.age_seconds, 1)}
            | plain(entry.heartbeat)
            for peer, entry in sorted(status.present.items())
        },
    }


def status_lines(status: RunStatus, listed_max: int = PEERS_LISTED) -> list[Text]:
    """Format the status as lines of text: the run, then two lines per peer.

    Ids are complete, so that they can be copied. With more than `listed_max` peers, the run is
    followed by a summary of them."""
    from rich.text import Text

    told = status_object(status)
    step = "–" if told["step"] is None else f"{told['step']} of {told['steps']}"
    progress = f"step {step} · {told['state']}"
    if told["policy"] is not None:
        progress += f" · newest policy {told['policy']} · reward {told['reward']:.3f}"
    evaluation = told["evaluation"]
    if evaluation is not None:
        progress += f" · held-out tasks {evaluation['reward']:.3f} at policy {evaluation['policy']}"
    lines = [Text(f"run {status.run.id}", style="bold"), Text(progress)]
    if evaluation is not None:
        lines += [Text(_evaluation_line(each)) for each in evaluation["environments"]]
    lines += [
        Text(f"the log of {printable(peer)} is forked: {reason}", style="red")
        for peer, reason in told["forks"].items()
    ]
    lines.append(Text())
    if len(status.present) > listed_max:
        return lines + _summary(status)
    trusted = status.run.manifest.trusted_ids()
    for peer, entry in sorted(
        status.present.items(), key=lambda item: (item[1].heartbeat.roles, item[0])
    ):
        lines += _peer_lines(peer, entry, trusted=peer in trusted)
    return lines


def _evaluation_line(found: dict[str, Any]) -> str:
    return (
        f"held-out tasks of {printable(found['label'])}: {found['reward']:.3f} "
        f"[{found['low']:.3f}, {found['high']:.3f}], {found['tokens']:.1f} tokens"
    )


def _summary(status: RunStatus) -> list[Text]:
    """Peers by role and state, and by name the trusted and the troubled."""
    from rich.text import Text

    trusted = set(status.run.manifest.trusted_ids())
    peers = sorted(status.present.values(), key=lambda entry: entry.peer)
    owners = [each for each in peers if each.standing == "live" and each.peer in trusted]
    owners.sort(key=lambda each: each.heartbeat.roles)
    troubled = [each for each in peers if each.state not in ("live", "left", "finished")]
    # Trusted peers first, then those that fell silent last.
    troubled.sort(key=lambda e: (e.peer not in trusted, STATES.index(e.state), e.age_seconds))
    lines = [Text(line) for line in _table(peers)]
    for title, part in (("trusted by the owner", owners), ("silent or evicted", troubled)):
        shown = part[:PEERS_NAMED]
        if shown:
            more = f" ({len(shown)} of {len(part):,})" if len(part) > len(shown) else ""
            lines += [Text(), Text(title + more, style="bold")]
        for entry in shown:
            lines += _peer_lines(entry.peer, entry, trusted=entry.peer in trusted)
    return [*lines, Text(), Text("every peer: swarm status --all", style=DIM)]


def _table(peers: list[Present]) -> list[str]:
    """Count peers by role and state; a peer counts under each of its roles."""
    counts = Counter((role, entry.state) for entry in peers for role in set(entry.heartbeat.roles))
    roles = Counter(role for entry in peers for role in set(entry.heartbeat.roles))
    rows = {
        role: [counts[role, state] for state in STATES]
        for role, _ in sorted(roles.items(), key=lambda item: (-item[1], item[0]))[:ROLES_SHOWN]
    }
    every = Counter(entry.state for entry in peers)
    rows["all peers"] = [every[state] for state in STATES]
    header = f"{'':<14}" + "".join(f"{state:>11}" for state in STATES)
    return [header] + [
        f"{printable(name, 14):<14}" + "".join(f"{count:>11,}" for count in row)
        for name, row in rows.items()
    ]


def _peer_lines(peer: str, entry: Present, *, trusted: bool) -> list[Text]:
    from rich.text import Text

    beat = entry.heartbeat
    roles = printable(", ".join(beat.roles), 14)
    first = Text(f"{printable(peer, 52):<52} ")
    first.append(roles, style=ROLE_STYLES.get(beat.roles[0] if beat.roles else "", ""))
    first.append(" ✓" if trusted else "")
    first.append(f" {entry.state}", style=STATE_STYLES.get(entry.state, ""))
    figures = [
        printable(beat.doing),
        f"policy {beat.policy}" if beat.policy >= 0 else "",
        f"step {beat.step}" if beat.step >= 0 else "",
        f"{beat.tokens_per_second:,.0f} tokens/s" if beat.tokens_per_second else "",
        f"sent {readable_bytes(beat.bytes_sent)}" if beat.bytes_sent else "",
        f"received {readable_bytes(beat.bytes_received)}" if beat.bytes_received else "",
        printable(beat.reached),
    ]
    figures = [each for each in figures if each]
    while len(figures) > 1 and len("  " + " · ".join(figures)) > WIDTH:
        figures.pop()  # what matters least stands last
    return [first, Text(printable("  " + " · ".join(figures), WIDTH), style=DIM)]
