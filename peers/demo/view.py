"""The demo's live view: the state as lines of text that exactly fill a terminal of any size.

Without tables or layouts of rich it keeps its shape, and drawing takes a few milliseconds."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import IO

import trio
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from peers.demo.state import Note, PeerState, ShownAnswer, SwarmState, VerdictLine
from swarm.sentences import numbered
from swarm.terminal.figures import (
    DIM,
    ROLE_STYLES,
    STATE_STYLES,
    figure,
    readable_bytes,
    readable_seconds,
)

REFRESH_SECONDS = 0.5

STEP_LINE_SECONDS = 10.0
"""Between two lines about steps where no terminal shows a live view, and nobody asked for lines."""

WIDTH_MIN, HEIGHT_MIN = 40, 12
INDENT = 10
"""Columns before the text of a verdict or a note, which its time takes."""
NARROW = 66
"""Below this many columns, words and figures that matter least are left out."""
PLOT_HEIGHT_MAX = 14
LOG_LINES_MAX = 20
ANSWERS_MAX = 5
ANSWER_CHARACTERS_MAX = 200

PHASES = {
    "preparing": "preparing the base policy",
    "joining": "peers are joining",
    "training": "training",
    "ending": "evaluating and saving",
}


# --- small figures -----------------------------------------------------------------------------


def paste_lines(line: str, width: int) -> list[str]:
    """Cut a shell command into lines of `width` that backslashes join when they are pasted."""
    lines = []
    while len(line) > width:
        lines.append(line[: width - 1] + "\\")
        line = line[width - 1 :]
    return [*lines, line]


# --- the reward curve --------------------------------------------------------------------------

_BRAILLE_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot in a Braille cell: [row 0..3 from the top][column 0..1]."""


def plot(points: Sequence[tuple[int, float]], steps: int, width: int, height: int) -> list[str]:
    """Draw a curve of (step, value in [0, 1]) over 0..steps, in `height` lines of `width` columns:
    the mean of each column's steps, connected by lines, also across empty columns."""
    columns, rows = 2 * width, 4 * height
    sums: dict[int, tuple[float, int]] = {}
    for step, value in points:
        column = min(columns - 1, step * columns // max(1, steps))
        total, count = sums.get(column, (0.0, 0))
        sums[column] = (total + min(1.0, max(0.0, value)), count + 1)
    heights = {column: total / count * (rows - 1) for column, (total, count) in sums.items()}
    cells = [[0] * width for _ in range(height)]

    def dot(column: int, level: int) -> None:
        row = rows - 1 - level
        cells[row // 4][column // 2] |= _BRAILLE_BITS[row % 4][column % 2]

    previous: tuple[int, float] | None = None
    for column in sorted(heights):
        level = heights[column]
        if previous is None:
            dot(column, round(level))
        else:
            start, before = previous
            for between in range(start + 1, column + 1):
                share = (between - start) / (column - start)
                here = round(before + (level - before) * share)
                last = round(before + (level - before) * (between - 1 - start) / (column - start))
                for step_level in range(min(last, here), max(last, here) + 1):
                    dot(between, step_level)
        previous = (column, level)
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]


# --- parts of the screen -----------------------------------------------------------------------


def _rule(title: str, aside: Text, width: int) -> Text:
    """Compose a heading: `── title ───────────── aside ──`, without the title if it is narrow."""
    line = Text("── ", style=DIM) + Text(title, style="bold")
    if aside.plain and len(line.plain) + len(aside.plain) + 6 > width:
        return Text("─ ", style=DIM) + aside
    tail = Text(" ") + aside + Text(" ──", style=DIM) if aside.plain else Text("─", style=DIM)
    line.append(" ")
    line.append("─" * max(1, width - len(line.plain) - len(tail.plain)), style=DIM)
    return line + tail


def _header(state: SwarmState, now: float, width: int) -> list[Text]:
    done, wanted = state.step, state.steps_wanted
    left = state.seconds_left()
    doing = PHASES.get(state.phase, state.phase)
    if state.phase == "training" and left is not None:
        doing = f"{readable_seconds(left)} left"
    so_far = f" · {readable_seconds(now - state.started)}"
    wide = width >= NARROW
    right = Text.assemble((doing, "bold"), (f"{so_far} so far" if wide else so_far, DIM))
    step = (" step ", DIM), (str(done), "bold"), (f"/{wanted}", DIM)
    line = Text.assemble(" swarm demo " if wide else "", *step, style="bold cyan")
    if len(line.plain) + len(right.plain) + 3 > width:
        right = Text(doing, style="bold")
    line.append(" " * max(2, width - len(line.plain) - len(right.plain) - 1)).append_text(right)

    speed = Text(f" {state.tokens_per_second(now):,.0f} tokens/s ", style="bold")
    share = done / wanted if wanted else 0.0
    percent = f" {share:4.0%} "
    room = max(4, width - 2 - len(percent) - len(speed.plain))
    full, part = divmod(round(share * room * 8), 8)
    bar = "█" * full + ("▏▎▍▌▋▊▉"[part - 1] if part and full < room else "")
    colour = "green" if state.phase == "ending" else "cyan"
    rest = ("░" * (room - len(bar)), DIM)
    return [line, Text.assemble(" ", (bar, colour), rest, (percent, "bold"), speed)]


def _reward(state: SwarmState, width: int, height: int) -> list[Text]:
    rewards = state.rewards()
    aside = Text()
    if rewards:
        recent = [reward for _, reward in rewards[-10:]]
        now = f"{sum(recent) / len(recent):.2f}"
        aside = Text.assemble((f"{rewards[0][1]:.2f} → ", DIM), (now, "bold green"))
    lines = [_rule("reward", aside, width)]
    for row, dots in enumerate(plot(rewards, state.steps_wanted, width - 7, height)):
        label = "1.0" if row == 0 else "0.0" if row == height - 1 else "   "
        if row == height // 2 and height >= 5:
            label = "0.5"
        axis = f" {label} {'┤' if label.strip() else '│'}"
        lines.append(Text.assemble(axis, (dots, "green"), style=DIM))
    return lines


_STEP_AT_END = re.compile(r"( of)?( step)? \d+$")
"""A step number at the end of an activity; the table shows it in a column of its own."""


def _peer_columns(peer: PeerState, width: int) -> Text:
    doing = _STEP_AT_END.sub("", peer.doing)
    speed = f"{peer.tokens_per_second:,.0f}" if peer.tokens_per_second >= 1 else ""
    line = Text(" ")
    line.append(f"{peer.name[:13]:<13} ", style=ROLE_STYLES.get(peer.role, "white"))
    line.append(f"{peer.state:<9} ", style=STATE_STYLES.get(peer.state, "white"))
    if width >= NARROW:
        line.append(f"{peer.policy if peer.policy >= 0 else '–':>7} ")
        line.append(f"{peer.step if peer.step >= 0 else '–':>5} ")
    for moved in (peer.sent, peer.received) if width >= NARROW else ():
        # A guest reports its traffic only to the peer that gets its heartbeats.
        shown = readable_bytes(moved) if peer.own else "–"
        line.append(f"{shown:>8} ", style="" if moved else DIM)
    if width >= 90:
        line.append(f"{speed:>8} ")
    if peer.restarts:
        line.append(f" {peer.restarts}× restarted", style="yellow")
    line.append(f" {doing}", style=DIM)
    return line


def _peers(state: SwarmState, width: int, rows: int) -> list[Text]:
    head = f" {'peer':<13} {'state':<9} "
    if width >= NARROW:
        head += f"{'policy':>7} {'step':>5} {'sent':>8} {'received':>8} "
    if width >= 90:
        head += f"{'tokens/s':>8} "
    peers = list(state.peers.values())
    lines = [Text(head + " doing", style=DIM)]
    shown = peers if len(peers) <= rows else peers[: max(1, rows - 1)]
    lines += [_peer_columns(peer, width) for peer in shown]
    if len(shown) < len(peers):
        lines.append(Text(f" and {len(peers) - len(shown)} more", style=DIM))
    return lines


def _verdict(verdict: VerdictLine, state: SwarmState, width: int) -> Text:
    line = Text(f" {readable_seconds(verdict.at - state.started):>7}  ", style=DIM)
    if width < NARROW:
        line.append(f"{verdict.worker[:13]} ")
        line.append(f"step {verdict.step} ", style=DIM)
    else:
        line.append(f"{verdict.worker[:13]:<13} ")
        line.append(f"step {verdict.step:<4} #{verdict.number:<3} ", style=DIM)
    if verdict.outcome == "accepted":
        line.append("accepted", style="green")
    else:
        style = "bold red" if verdict.outcome == "refused" else "bold yellow"
        line.append(verdict.outcome, style=style)
        if verdict.failed:
            line.append(f"  {verdict.failed} ")
            line.append(figure(verdict.figure), style=style)
            line.append(f" against {figure(verdict.threshold)}", style=DIM)
        if verdict.detail:
            line.append(f"  {verdict.detail}", style=DIM)
    return line


def _note(note: Note, state: SwarmState) -> Text:
    at = f" {readable_seconds(note.at - state.started):>7}  "
    return Text.assemble((at, DIM), (note.text, "bold yellow" if note.grave else ""))


def _wrapped(line: Text, width: int) -> list[Text]:
    """Cut a line between words; the rest is indented."""
    lines = []
    while len(line.plain) > width:
        cut = line.plain.rfind(" ", INDENT + 1, width + 1)
        cut = cut if cut > 0 else width
        first, rest = line.divide([cut])
        lines.append(first)
        line = Text(" " * INDENT) + rest[1:] if rest.plain.startswith(" ") else rest
    return [*lines, line]


def _log(state: SwarmState, width: int, rows: int) -> list[Text]:
    """Compose the newest verdicts and notes in order of time, whole if there is room. Refusals stay
    longest."""
    important: list[VerdictLine | Note] = [
        *state.refusals,
        *(note for note in state.notes if note.grave),
    ]
    important.sort(key=lambda entry: entry.at)
    routine: list[VerdictLine | Note] = [
        *state.verdicts,
        *(note for note in state.notes if not note.grave),
    ]
    routine.sort(key=lambda entry: entry.at)
    kept_important = important[-max(1, rows - (1 if rows < 6 else 2)) :]
    if state.refusals and state.refusals[-1] not in kept_important:
        # The newest refusal with a figure always stays.
        kept_important = [state.refusals[-1], *kept_important[1:]]
    kept: list[VerdictLine | Note] = [
        *kept_important,
        *routine[len(routine) - min(len(routine), rows - len(kept_important)) :],
    ]
    kept.sort(key=lambda entry: entry.at)
    blocks = [
        (
            each,
            _wrapped(
                _note(each, state) if isinstance(each, Note) else _verdict(each, state, width),
                width,
            ),
        )
        for each in kept[-rows:]
    ]
    while (over := sum(len(lines) for _, lines in blocks) - rows) > 0:
        spare = [each for each in blocks[:-1] if each[0] not in important]
        accepted = [each for each in spare if getattr(each[0], "outcome", "") == "accepted"]
        long = [lines for _, lines in blocks[:-1] if len(lines) > 1]
        if accepted or (spare and not long):
            blocks.remove((accepted or spare)[0])
        else:
            lines = long[0] if long else blocks[-1][1]
            del lines[max(1, len(lines) - over) :]
            lines[-1].append("…")
    return [line for _, lines in blocks for line in lines]


def _answer(answer: ShownAnswer) -> Text:
    asked = f" {answer.policy:>9}  {_one_line(answer.question)}  "
    colour = "green" if answer.right else "red"
    return Text.assemble(asked, (_one_line(answer.text), colour), style=DIM)


def _one_line(words: str) -> str:
    return " ".join(words.split())[:ANSWER_CHARACTERS_MAX]


def _answers(state: SwarmState, width: int, rows: int) -> list[Text]:
    """Compose the newest answers; none if there are none yet."""
    shown = list(state.answers)[-rows:] if rows > 0 else []
    if not shown:
        return []
    return [_rule("answers", Text(), width), *map(_answer, shown)]


def _counts(state: SwarmState, width: int) -> Text:
    line = Text(f"{state.counts['accepted']:,} accepted", style="green")
    counts = Counter(state.counts)
    if width < NARROW:  # without the causes
        counts = Counter({name: counts[name] for name in ("quarantined",) if counts[name]})
        if others := sum(state.counts.values()) - counts.total() - state.counts["accepted"]:
            counts["refused"] = others
    for cause, count in sorted(counts.items()):
        if cause != "accepted":
            style = "yellow" if cause == "quarantined" else "red"
            line.append(" · ", style=DIM)
            refused = "" if cause in ("quarantined", "refused") else "refused: "
            line.append(f"{count:,} {refused}{cause}", style=style)
    restarts = state.restarts()
    if restarts:
        line.append(" · ", style=DIM)
        line.append(numbered(f"{restarts} restarts"), style="yellow")
    return line


def _join(state: SwarmState, width: int) -> list[Text]:
    if not state.join_line:
        return []
    title = _rule("join from another terminal", Text(), width)
    return [title, *(Text(line, style="cyan") for line in paste_lines(state.join_line, width))]


# --- the screen --------------------------------------------------------------------------------


def compose(state: SwarmState, now: float, width: int, height: int) -> list[Text]:
    """Compose at most `height` lines for a screen `width` columns wide."""
    if width < WIDTH_MIN or height < HEIGHT_MIN:
        return [_header(state, now, max(width, 20))[0]]
    header = _header(state, now, width)
    join = _join(state, width)
    room = height - len(header) - len(join)
    # Peers, the screen's main content, get lines first. Verdicts and the plot get at least 2 each
    # and share the rest. Each part has one line for its title.
    peer_rows = min(len(state.peers), max(2, room - 3 - 4))
    room -= peer_rows + 3
    answers = _answers(state, width, min(ANSWERS_MAX, room // 3 - 1))
    room -= len(answers)
    plot_rows = max(2, min(PLOT_HEIGHT_MAX, room // 2)) if state.trained else 2
    log_rows = max(1, min(LOG_LINES_MAX, room - plot_rows))
    plot_rows = max(2, min(PLOT_HEIGHT_MAX, room - log_rows))
    body = [
        *_reward(state, width, plot_rows),
        *answers,
        *_peers(state, width, peer_rows),
        _rule("verdicts", _counts(state, width), width),
        *_pad(_log(state, width, log_rows), log_rows),
    ]
    above = height - len(join)
    return _pad(header + body, above)[:above] + join


def _pad(lines: list[Text], rows: int) -> list[Text]:
    return lines + [Text("")] * (rows - len(lines))


class Screen:
    """A rich renderable that composes the screen for the terminal's current size."""

    def __init__(self, state: SwarmState, clock: Callable[[], float]) -> None:
        self._state = state
        self._clock = clock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        for index, line in enumerate(compose(self._state, self._clock(), width, height)):
            if index:
                yield Segment.line()
            line.truncate(width, overflow="ellipsis")
            yield from line.render(console, end="")


async def draw(state: SwarmState, console: Console) -> None:
    screen = Screen(state, trio.current_time)
    with Live(
        screen,
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as live:
        while True:
            live.update(screen, refresh=True)
            await trio.sleep(REFRESH_SECONDS)


class PlainLines:
    """Formats the demo's progress: a line per refusal and note, and one for a step."""

    def __init__(self, state: SwarmState, step_seconds: float = STEP_LINE_SECONDS) -> None:
        """`step_seconds`: the least between two lines about steps."""
        self._state, self._step_seconds = state, step_seconds
        self._shown_join = False
        self._last_step = -1
        self._step_at = 0.0
        self._last_note = 0.0
        self._last_verdict = 0.0
        self._last_answer = 0.0

    def lines(self) -> list[str]:
        """Format the steps, refusals and notes since the last call."""
        state = self._state
        lines = []
        if state.join_line and not self._shown_join:
            self._shown_join = True
            lines.append(f"to join from another terminal: {state.join_line}")
        for note in [note for note in state.notes if note.at > self._last_note]:
            lines.append(f"{readable_seconds(note.at - state.started)}: {note.text}")
            self._last_note = note.at
        for answer in [each for each in state.answers if each.at > self._last_answer]:
            self._last_answer = answer.at
            lines.append(
                f"{answer.policy}: {_one_line(answer.question)} → {_one_line(answer.text)} "
                f"({'right' if answer.right else 'wrong'})"
            )
        for verdict in [v for v in state.refusals if v.at > self._last_verdict]:
            self._last_verdict = verdict.at
            lines.append(
                f"{verdict.worker} step {verdict.step} #{verdict.number} {verdict.outcome}: "
                f"{verdict.failed} {figure(verdict.figure)} against {figure(verdict.threshold)}"
                f"{f' ({verdict.detail})' if verdict.detail else ''}"
            )
        for step in sorted(step for step in state.trained if step > self._last_step):
            trained = state.trained[step]
            self._last_step = step
            ends = step + 1 in (1, state.steps_wanted)
            if not ends and trained.at - self._step_at < self._step_seconds:
                continue
            self._step_at = trained.at
            left = state.seconds_left()
            speed = state.tokens_per_second(trained.at)
            lines.append(
                f"step {step + 1}/{state.steps_wanted} reward {trained.reward:.3f} "
                f"gradient norm {trained.gradient_norm:.3g} groups {trained.groups} "
                f"{speed:,.0f} tokens/s accepted {state.counts['accepted']}"
                + (f" · {readable_seconds(left)} left" if left is not None else "")
            )
        return lines


async def print_lines(state: SwarmState, file: IO[str], step_seconds: float) -> None:
    plain = PlainLines(state, step_seconds)
    try:
        while True:
            for line in plain.lines():
                print(line, file=file, flush=True)
            await trio.sleep(REFRESH_SECONDS)
    finally:
        for line in plain.lines():
            print(line, file=file, flush=True)
