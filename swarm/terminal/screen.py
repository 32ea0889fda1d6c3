"""What a peer shows a person while it works.

A worker does the same few things many times a minute, and a line for each would bury what matters:
a refusal, a lost neighbour. So of `ROUTINE` events the first of each kind is a line, and later ones
only where they come slowly; the others are counted. The counts stand in a few lines at the bottom
of a terminal, which are drawn anew, and elsewhere in one line a minute."""

import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import TextIO

from swarm.events import Event
from swarm.sentences import numbered, sentence
from swarm.terminal.figures import readable_bytes
from swarm.terminal.untrusted import shown

LINE_SECONDS = 60.0
"""Between two lines of counts where there is no terminal, and of one kind of routine event."""

REDRAW_SECONDS = 0.5

WIDTH_MIN = 20
NO_BREAK = "\u00a0"
"""Between the words of one count, so that a line ends between two."""

ROUTINE = {
    "inference.policy_loaded": "",
    "inference.submission_made": "submissions made",
    "inference.submission_delivered": "",
    "inference.receipt": "",
    "inference.device": "",
    "shardcast.checkpoint_complete": "policies fetched",
    "shardcast.delta_applied": "policies fetched",
    "validator.verdict": "submissions judged",
    "trainer.step_opened": "",
    "trainer.step_trained": "steps trained",
    "trainer.checkpoint_published": "",
    "evaluation.done": "",
    "ledger.sealed": "",
    "ledger.pruned": "",
    "membership.peer_admitted": "peers joined",
    "membership.peer_suspected": "",
    "membership.peer_returned": "",
    "membership.peer_gone": "peers left",
    "membership.peer_left": "peers left",
    "membership.peer_finished": "peers left",
}
"""Events that come again and again, with what the screen calls their number; empty: not counted."""


class Earned:
    """Event sink that adds up the receipts of this process."""

    def __init__(self) -> None:
        self.submissions = Counter[str]()
        self._groups = 0
        self._completions = 0

    def __call__(self, event: Event) -> None:
        if event.name == "inference.receipt":
            self.submissions[event.fields["outcome"]] += 1
            self._groups += event.fields["groups"]
            self._completions += event.fields["completions"]

    def totals(self) -> dict[str, int]:
        """Submissions by outcome, and the groups and completions credited."""
        outcomes = {name: self.submissions[name] for name in ("accepted", "refused", "quarantined")}
        return {**outcomes, "groups": self._groups, "completions": self._completions}


class Screen:
    """A sink that tells a person what the peer does; it counts what is routine."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._earned = Earned()
        self._counts = Counter[str]()
        self._status: dict[str, str | int | float] = {}
        self._last: dict[str, float] = {}
        """When the last event of each routine kind came."""
        self._counted = False
        """Whether something was counted since the last line of counts."""
        self._drawn_at = 0.0
        self._lines = 0
        """Lines at the bottom of the terminal that are to be drawn anew."""

    def __call__(self, event: Event) -> None:
        self._earned(event)
        fields = shown(event.fields)  # strangers wrote some of them
        if event.name == "peer.status":
            self._status = fields
        elif event.name == "peer.earned":  # the last word, in place of the counts
            self._erase()
            self._lines, self._counted = 0, False
        self._counts[ROUTINE.get(event.name, "")] += 1
        line = sentence(event.name, fields)
        if line is not None and self._is_news(event):
            self.say(line, event.wall_time)
        self._draw(event.wall_time)

    def say(self, text: str, wall_time: float | None = None) -> None:
        """Print a text, with the time if it is given, above the lines that are drawn anew."""
        if self._terminal:
            clock = "%H:%M:%S "
            self._erase()
        else:
            clock = "%Y-%m-%d %H:%M:%S "
        if wall_time is not None:
            text = datetime.fromtimestamp(wall_time).strftime(clock) + text
        if self._terminal:
            text = "\n".join(line for each in text.split("\n") for line in self._wrapped(each))
        self._write(text + "\n")
        if self._lines:
            self._lines = 0
            self._write_counts()

    def _is_news(self, event: Event) -> bool:
        if event.name not in ROUTINE or event.fields.get("outcome", "accepted") != "accepted":
            return True
        before = self._last.get(event.name)
        self._last[event.name] = event.wall_time
        if before is None or abs(event.wall_time - before) >= LINE_SECONDS:
            return True
        self._counted = True
        return False

    def _draw(self, now: float) -> None:
        """Show the counts, if it is time."""
        if not self._counted:
            self._drawn_at = now
        elif self._terminal and abs(now - self._drawn_at) >= REDRAW_SECONDS:
            self._drawn_at = now
            self._erase()
            self._write_counts()
        elif not self._terminal and abs(now - self._drawn_at) >= LINE_SECONDS:
            self._drawn_at, self._counted = now, False
            self.say(" · ".join(self._parts()), now)

    def _write_counts(self) -> None:
        parts = (part.replace(" ", NO_BREAK) for part in self._parts())
        lines = self._wrapped(f"{NO_BREAK}· ".join(parts), exactly=True)
        self._lines = len(lines)
        self._write("".join(f"{line}\n" for line in lines).replace(NO_BREAK, " "))

    def _parts(self) -> Iterator[str]:
        """What the peer does, its counts, and what it has earned, in words."""
        status = self._status
        if doing := str(status.get("doing", "")):
            yield doing
        for name in ("step", "policy"):
            if int(status.get(name, -1)) >= 0 and f"{name} " not in doing:
                yield f"{name} {status[name]}"
        if speed := status.get("tokens_per_second"):
            yield f"{speed:,.0f} tokens/s"
        for what, count in self._counts.items():
            if what:
                yield numbered(f"{count:,} {what}")
        for name in ("sent", "received"):
            if count := int(status.get(f"bytes_{name}", 0)):
                yield f"{name} {readable_bytes(count)}"
        told = self._earned.totals()
        if self._earned.submissions:
            yield numbered(f"earned: {told['completions']:,} completions")
        for outcome in ("accepted", "refused", "quarantined"):
            if told[outcome]:
                yield f"{told[outcome]:,} {outcome}"

    def _wrapped(self, line: str, *, exactly: bool = False) -> list[str]:
        """A line as lines of the terminal's width, cut between words; `exactly`: also within a
        word that is longer, such as an address, which could then not be copied."""
        lines = textwrap.wrap(
            line.replace(" %", "\N{NO-BREAK SPACE}%"),
            max(WIDTH_MIN, _columns(self._stream) - 1),
            subsequent_indent="  ",
            break_long_words=exactly,
            break_on_hyphens=False,
        ) or [line]
        return [each.replace("\N{NO-BREAK SPACE}%", " %") for each in lines]

    def _erase(self) -> None:
        above = f"\x1b[{self._lines}A" if self._lines else ""
        self._write(f"\r{above}\x1b[J")  # also a ^C that the terminal has echoed

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
