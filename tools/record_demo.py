"""Record a command with a full-screen view, such as the demo, as an animated SVG.

    python tools/record_demo.py docs/demo.svg -- swarm demo --seed 0

Runs the command in a terminal of its own and shows what it says here, too. Frames are taken evenly
over its time and shown two a second, however long it took; the screen after its end stays longest.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import shutil
import struct
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH, HEIGHT = 100, 40
"""Characters of the recorded terminal."""
FRAMES = 24
FRAME_SECONDS, LAST_SECONDS = 0.5, 6.0
CELL_WIDTH, CELL_HEIGHT, MARGIN = 8.4, 17, 12
"""Pixels of one character, and around the screen."""
HOME = "\x1b[H"
ALTERNATE_ON, ALTERNATE_OFF = "\x1b[?1049h", "\x1b[?1049l"


def record(command: Sequence[str]) -> tuple[list[tuple[float, str]], str]:
    """Run a command in a terminal; return its screens by seconds, and what it said at the end."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        os.execvp(command[0], list(command))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    begun, pieces = time.monotonic(), []
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the command has ended
            break
        if not data:
            break
        pieces.append((time.monotonic() - begun, data))
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    _, status = os.waitpid(process, 0)
    if status:
        raise SystemExit(
            f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}"
        )
    screens, said, view = [], "", ""
    for seconds, data in pieces:
        view += data.decode(errors="replace")
        *whole, view = view.split(HOME)
        screens += [(seconds, each) for each in whole if each.strip()]
    view, _, said = view.rpartition(ALTERNATE_OFF)
    before = screens[0][1].partition(ALTERNATE_ON)[0] if screens else ""
    return screens[1:], before + said


def chosen(screens: Sequence[tuple[float, str]]) -> list[str]:
    """The screens at even distances of time."""
    last = screens[-1][0]
    wanted = [last * (number + 1) / FRAMES for number in range(FRAMES)]
    return [max((s for s in screens if s[0] <= at), default=screens[0])[1] for at in wanted]


def lines_of(screen: str) -> list[str]:
    return screen.replace("\r", "").split("\n")[:HEIGHT]


def drawn(line: str) -> str:
    """The spans of one line with terminal codes, as SVG."""
    console = Console(width=WIDTH, color_system="truecolor", legacy_windows=False)
    return "".join(_spans(console.render(Text.from_ansi(line, end="", no_wrap=True))))


def _spans(segments: Iterator[Segment]) -> Iterator[str]:
    column = 0
    for text, style, _ in segments:
        if not text.strip():
            column += len(text)
            continue
        style = style or Style.null()
        colour = style.color.get_truecolor(MONOKAI).hex if style.color else "#d9d9d9"
        weight = ' font-weight="bold"' if style.bold else ""
        faint = ' opacity="0.6"' if style.dim else ""
        yield (
            f'<tspan x="{MARGIN + column * CELL_WIDTH:.1f}" fill="{colour}"{weight}{faint} '
            f'textLength="{len(text) * CELL_WIDTH:.1f}">{escape(text)}</tspan>'
        )
        column += len(text)


def animated(screens: Sequence[list[str]], title: str) -> str:
    """One SVG that shows screens in turn; lines that screens share are drawn once."""
    ids: dict[str, int] = {}
    seconds = FRAME_SECONDS * (len(screens) - 1) + LAST_SECONDS
    groups, rules = [], []
    for number, screen in enumerate(screens):
        begin = number * FRAME_SECONDS / seconds * 100
        end = 100.0 if number == len(screens) - 1 else (number + 1) * FRAME_SECONDS / seconds * 100
        rules.append(
            f"@keyframes f{number}{{0%{{visibility:{'visible' if not number else 'hidden'}}}"
            f"{begin:.3f}%{{visibility:visible}}{end:.3f}%,100%"
            f"{{visibility:{'visible' if end == 100 else 'hidden'}}}}}"
            f"#s{number}{{animation:f{number} {seconds}s step-end infinite}}"
        )
        uses = "".join(
            f'<use href="#l{ids.setdefault(line, len(ids))}" y="{row * CELL_HEIGHT}"/>'
            for row, line in enumerate(screen)
            if line.strip()
        )
        groups.append(f'<g id="s{number}">{uses}</g>')
    shared = "".join(
        f'<text id="l{number}" y="{MARGIN + CELL_HEIGHT}" xml:space="preserve">{drawn(line)}</text>'
        for line, number in ids.items()
    )
    width, height = WIDTH * CELL_WIDTH + 2 * MARGIN, HEIGHT * CELL_HEIGHT + 2 * MARGIN + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="ui-monospace,Menlo,Consolas,monospace" font-size="14"><title>{escape(title)}'
        f"</title><style>{''.join(rules)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#101418"/>'
        f"<defs>{shared}</defs>{''.join(groups)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="the SVG")
    parser.add_argument("command", nargs="+", help="after --")
    asked = parser.parse_args()
    if not shutil.which(asked.command[0]):
        parser.error(f"{asked.command[0]} is no command here; is the virtual environment active?")
    screens, said = record(asked.command)
    if not screens:
        parser.error(f"{' '.join(asked.command)} showed no full screen")
    frames = [*map(lines_of, chosen(screens)), lines_of(said.lstrip())]
    asked.out.write_text(animated(frames, " ".join(asked.command)), encoding="utf-8")


if __name__ == "__main__":
    main()
