"""`python -m swarm.look.dashboard.reading HOME RUN STEP`: a peer's newest rollouts, as JSON.

Files of submissions are strangers' work: no process that holds keys or serves a page parses them.
"""

import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarm.errors import PeerError
from swarm.terminal.untrusted import printable

ROLLOUTS_SHOWN = 24
PER_GROUP = 2
PER_SUBMISSION = 4
"""Rollouts of one group and of one submission: a page shows several workers' work."""

TEXT_CHARACTERS_MAX = 4000
"""Longest text of one turn; the rest is in `swarm rollouts export`."""

TURNS_MAX = 32

MEMORY_BYTES_MAX = 4 << 30
OUTPUT_BYTES_MAX = 16 << 20
"""More than all texts at their longest, in characters of four bytes."""

SECONDS_MAX = 60.0


SHOWN = ("step", "policy", "worker", "group", "sample", "environment", "reward", "advantage")
"""Columns of a rollout's row that the page shows as they are."""


def newest_rollouts(home: Path, run: str, step: int | None) -> list[dict[str, Any]]:
    """Some rollouts of the newest steps, or of one step; raises `UserError` if there are none."""
    from swarm.look.rollouts.filters import Filters
    from swarm.look.rollouts.screen import text_of
    from swarm.look.rollouts.seen import as_row
    from swarm.look.rollouts.sources import open_source

    source = open_source(home, run=run)
    source.files.reverse()
    filters = Filters(step=None if step is None else (step, step))
    shown: list[dict[str, Any]] = []
    taken: Counter[tuple[str, int] | str] = Counter()
    for seen in source.rollouts(filters):
        origin = seen.origin
        if taken[seen.group_key] >= PER_GROUP or taken[origin.submission] >= PER_SUBMISSION:
            continue
        taken.update([seen.group_key, origin.submission])
        row = as_row(seen)
        shown.append(
            {name: _printable(row[name]) for name in SHOWN}
            | {
                "fate": printable(seen.fate),
                "verdict": origin.verdict,
                "detail": printable(origin.detail or ""),
                "parts": {printable(name): value for name, value in seen.parts.items()},
                "turns": [
                    {"kind": turn.kind, "text": shown_text(text_of(turn))}
                    for turn in seen.turns[:TURNS_MAX]
                ],
            }
        )
        if len(shown) == ROLLOUTS_SHOWN:
            break
    return shown


def _printable(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def shown_text(text: str) -> str:
    """A turn's text, cut to what the page shows, without control characters but line ends."""
    lines = text[:TEXT_CHARACTERS_MAX].split("\n")
    shown = "\n".join(printable(line, TEXT_CHARACTERS_MAX) for line in lines)
    return shown[:TEXT_CHARACTERS_MAX]  # an escape takes up to ten characters


async def read_rollouts(home: Path, run: str, step: int | None) -> bytes:
    """The child's answer, as JSON; raises `PeerError` when it fails or takes too long."""
    where = [str(home), run, "" if step is None else str(step)]
    with trio.move_on_after(SECONDS_MAX) as patience:
        done = await trio.run_process(
            [sys.executable, "-m", __name__, *where],
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    if patience.cancelled_caught:
        raise PeerError(f"reading took more than {SECONDS_MAX:g} s; use swarm rollouts show {home}")
    if done.returncode or len(done.stdout) > OUTPUT_BYTES_MAX:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it failed"]
        raise PeerError(f"no rollouts could be read: {last[0].removeprefix('error: ')}")
    return done.stdout


def main() -> None:
    from swarm.errors import UserError

    home, run, step = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    try:
        shown = newest_rollouts(Path(home), run, int(step) if step else None)
    except UserError as error:
        sys.exit(f"error: {error}")
    sys.stdout.buffer.write(msgspec.json.encode(shown))


if __name__ == "__main__":
    main()
