"""Rollouts as lines of a terminal, each behind a bar: no text can pass for a line of ours."""

from collections.abc import Iterable, Iterator

from rich.cells import chop_cells
from rich.text import Text

from swarm.look.rollouts.seen import SeenRollout, Turn
from swarm.sentences import numbered
from swarm.terminal.untrusted import printable

TURN_CHARACTERS_MAX = 4_000
"""Longest text of a turn on the terminal; exports hold all of it."""

NAME_CHARACTERS_MAX = 60
PARTS_CHARACTERS_MAX = 200
"""Longest name of an environment on the terminal: a worker writes it."""

TAB = 4

LABEL_WIDTH = 14

TEXT_WIDTH_MIN = 10
"""Narrowest column of text; on a narrower terminal lines are longer than the terminal."""

GROUP_MARK = "━━"
"""Begins the line of each group."""

IN_LOSS, OUTSIDE = "┃", "│"
LEGEND = f"{IN_LOSS} in the loss   {OUTSIDE} outside the loss"

_STYLES = {"prompt": "bright_black", "environment": "yellow", "model": ""}
_VERDICT_STYLES = {"accepted": "green", "quarantined": "yellow", "refused": "red"}


def visible_lines(text: str, limit: int) -> list[str]:
    """Split untrusted text at its line ends, cut and made safe to show."""
    lines = [printable(each.expandtabs(TAB), limit * TAB) for each in text[:limit].split("\n")]
    if len(text) > limit:
        lines.append(f"… {len(text) - limit:,} more characters")
    return lines


def text_of(turn: Turn) -> str:
    """The turn's text, or its token ids without a tokenizer."""
    return " ".join(map(str, turn.tokens)) if turn.text is None else turn.text


def lines(rollouts: Iterable[SeenRollout], width: int | None = None) -> Iterator[Text]:
    """The lines of some rollouts; a group's rollouts follow each other below its prompt.

    Text is wrapped here, not by the terminal of `width` columns: each part stands behind a bar."""
    group: tuple[str, int] | None = None
    for seen in rollouts:
        if seen.group_key != group:
            if group is not None:
                yield Text()
            group = seen.group_key
            yield from _group_lines(seen, width)
        yield from _rollout_lines(seen, width)


def _group_lines(seen: SeenRollout, width: int | None) -> Iterator[Text]:
    origin = seen.origin
    worker = f"…{origin.worker[-8:]}"  # all ids begin alike
    environment = printable(
        f"{seen.environment} {seen.environment_version}".rstrip(), NAME_CHARACTERS_MAX
    )
    head = (
        f"{GROUP_MARK} step {origin.step}  policy {origin.policy}  {environment}  "
        f"group {seen.group} of number {origin.number} by {printable(worker)}"
    )
    line = Text(head, "bold")
    if seen.fate:
        line.append("  ").append(
            printable(seen.fate), _VERDICT_STYLES.get(origin.verdict or "", "")
        )
    yield line
    if origin.detail:
        yield Text(f"   {printable(origin.detail)}", "red")
    yield from turn_lines(seen.turns[0], width)


def _rollout_lines(seen: SeenRollout, width: int | None) -> Iterator[Text]:
    yield Text("   ").append("  ".join([f"sample {seen.sample}", *figures(seen)]), "cyan")
    for turn in seen.turns[1:]:
        yield from turn_lines(turn, width)


def figures(seen: SeenRollout) -> list[str]:
    """Reward by part, advantage, length and ending, each in a few words."""
    found = []
    if seen.reward is not None:
        made_of = [f"{name} {value:.4g}" for name, value in seen.parts.items()]
        parts = f" ({printable('; '.join(made_of), PARTS_CHARACTERS_MAX)})" if made_of else ""
        found.append(f"reward {seen.reward:.4g}{parts}")
    if seen.advantage is not None:
        found.append(f"advantage {seen.advantage:+.3f}")
    found.append(numbered(f"{seen.model_tokens:,} tokens"))
    if seen.log_probability is not None:
        found.append(f"log p {seen.log_probability:.3f}")
    found.append(f"{seen.turns[-1].finish}")
    if seen.policies not in ([], [seen.origin.policy]):
        found.append("policies " + " → ".join(map(str, seen.policies)))
    return found


def turn_lines(turn: Turn, width: int | None) -> Iterator[Text]:
    """The lines of one turn, each behind its bar."""
    bar = IN_LOSS if turn.in_loss else OUTSIDE
    shown = visible_lines(text_of(turn), TURN_CHARACTERS_MAX)
    if width is not None:
        room = max(TEXT_WIDTH_MIN, width - LABEL_WIDTH - len(" ┃ "))
        shown = [part for line in shown for part in chop_cells(line, room) or [""]]
    for number, content in enumerate(shown):
        label = "" if number else turn.kind
        line = Text(f"{label:>{LABEL_WIDTH}} ", "bright_black")
        line.append(f"{bar} ", "green" if turn.in_loss else "bright_black")
        yield line.append(content, _STYLES[turn.kind])
