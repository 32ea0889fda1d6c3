"""Submission files in a form for people: rows with their text.

`tokenizers` is imported lazily, only if text is wanted, because it loads slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.rollouts.rollout import Finish, Kind, Segment
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import BadSubmission, Header, ReadLimits, read


@dataclass(frozen=True)
class ShownSegment:
    """One segment, for display."""

    kind: Kind
    tokens: list[int]
    finish: Finish | None
    log_probabilities: list[float] | None
    text: str | None
    """The decoded tokens; None without a tokenizer."""


@dataclass(frozen=True)
class ShownRollout:
    """One rollout, for display."""

    group: int
    sample: int
    environment: int
    segments: list[ShownSegment]
    proof_bytes: int


def show(path: Path, tokenizer_folder: Path | None = None) -> tuple[Header, Iterator[ShownRollout]]:
    """Read a submission's header and its rows, with text if a tokenizer is given.

    Raises `UserError` when the file is missing or not a submission, or the tokenizer is missing.
    """
    decode_text = None
    if tokenizer_folder is not None:
        import tokenizers

        try:
            raw = (tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8")
            decode_text = tokenizers.Tokenizer.from_str(raw).decode
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(
                f"{tokenizer_folder} holds no tokenizer.json that can be read ({error})"
            ) from error
    try:
        size = path.stat().st_size
        # Nothing in an uncompressed file is longer than the file.
        submission = read(path, ReadLimits(size, size, size, size, size))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except BadSubmission as error:
        raise UserError(f"{path} is no submission: {error.detail}") from error
    return submission.header, _rows(submission.rollouts, decode_text)


def _rows(rollouts: Rollouts, decode_text: Any) -> Iterator[ShownRollout]:
    for index in range(len(rollouts)):
        row = rollouts.row(index)
        yield ShownRollout(
            group=row.group,
            sample=row.sample,
            environment=row.environment,
            segments=[_segment(each, decode_text) for each in row.rollout.segments],
            proof_bytes=len(row.proof),
        )


def _segment(segment: Segment, decode_text: Any) -> ShownSegment:
    tokens, values = list(segment.tokens), segment.log_probabilities
    return ShownSegment(
        kind=segment.kind,
        tokens=tokens,
        finish=segment.finish,
        log_probabilities=None if values is None else list(values),
        text=decode_text(tokens, skip_special_tokens=False) if decode_text else None,
    )
