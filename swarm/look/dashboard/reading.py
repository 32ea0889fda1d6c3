"""Reads the newest rollouts of a trusted peer's home, in a process of its own.

`python -m swarm.look.dashboard.reading HOME RUN STEP` prints a JSON array of `RolloutShown`.
Files of submissions are strangers' work: no process that holds keys or serves a page parses them.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from pathlib import Path

import msgspec
import trio

from swarm.errors import PeerError
from swarm.terminal.untrusted import printable

ROLLOUTS_SHOWN = 24
PER_GROUP = 2
PER_SUBMISSION = 4
"""Rollouts of one group and of one submission: a page shows several workers' work."""

TEXT_CHARACTERS_MAX = 4000
"""Longest text of one turn; the rest is in `swarm rollouts browse`."""

TURNS_MAX = 32

MEMORY_BYTES_MAX = 4 << 30
OUTPUT_BYTES_MAX = 16 << 20
"""More than all texts at their longest, in characters of four bytes."""

SECONDS_MAX = 60.0


class TurnShown(msgspec.Struct, frozen=True):
    """A segment of a rollout; token ids stand for text where no tokenizer is at hand."""

    kind: str
    text: str


class RolloutShown(msgspec.Struct, frozen=True):
    """A rollout, as the page shows it."""

    step: int
    policy: int
    worker: str
    group: int
    sample: int
    environment: str
    fate: str
    verdict: str
    detail: str
    reward: float | None
    parts: dict[str, float]
    advantage: float | None
    turns: list[TurnShown]


def newest_rollouts(home: Path, run: str, step: int | None) -> list[RolloutShown]:
    """Some rollouts of the newest steps, or of one step; raises `UserError` if there are none."""
    from swarm.look.rollouts.filters import Filters
    from swarm.look.rollouts.sources import open_source

    source = open_source(home, run=run)
    source.files.reverse()
    filters = Filters(step=None if step is None else (step, step))
    shown: list[RolloutShown] = []
    taken: Counter[tuple[str, int] | str] = Counter()
    for seen in source.rollouts(filters):
        submission = seen.submission
        if taken[seen.group_key] >= PER_GROUP or taken[submission.digest] >= PER_SUBMISSION:
            continue
        taken.update([seen.group_key, submission.digest])
        shown.append(
            RolloutShown(
                step=submission.step,
                policy=submission.policy,
                worker=printable(submission.worker),
                group=seen.group,
                sample=seen.sample,
                environment=printable(seen.environment),
                fate=printable(seen.fate),
                verdict=submission.verdict,
                detail=printable(submission.detail),
                reward=seen.reward,
                parts={printable(name): value for name, value in seen.parts.items()},
                advantage=seen.advantage,
                turns=[
                    TurnShown(
                        kind=turn.kind,
                        text=shown_text(turn.text if turn.text is not None else str(turn.tokens)),
                    )
                    for turn in seen.turns[:TURNS_MAX]
                ],
            )
        )
        if len(shown) == ROLLOUTS_SHOWN:
            break
    return shown


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
        raise PeerError(
            f"reading took more than {SECONDS_MAX:g} s; use swarm rollouts browse {home}"
        )
    if done.returncode or len(done.stdout) > OUTPUT_BYTES_MAX:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["it failed"]
        raise PeerError(f"no rollouts could be read: {last[0].removeprefix('error: ')}")
    return done.stdout


def main() -> None:
    """Print the rollouts."""
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
