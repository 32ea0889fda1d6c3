"""Submission files for people: rows with their text.

`tokenizers` is imported only where text is wanted: it takes a while to load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import BadSubmission, Header, ReadLimits, read


@dataclass(frozen=True)
class Row:
    """One completion, to be looked at."""

    group: int
    sample: int
    target_length: int
    prompt_tokens: list[int]
    completion_tokens: list[int]
    proof_bytes: int
    log_probabilities: list[float]
    prompt: str | None
    """Decoded, where a tokenizer was given; likewise the completion."""
    completion: str | None


def show(path: Path, tokenizer_folder: Path | None = None) -> tuple[Header, Iterator[Row]]:
    """A submission for people: its header and its rows, with text if a tokenizer is given.

    Raises `UserError` when the file is missing or no submission, or the tokenizer is missing.
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
        submission = read(path, ReadLimits(size, size, size, size))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except BadSubmission as error:
        raise UserError(f"{path} is no submission: {error.detail}") from error
    return submission.header, _rows(submission.rollouts, decode_text)


def _rows(rollouts: Rollouts, decode_text: Any) -> Iterator[Row]:
    def text(tokens: list[int]) -> str | None:
        return decode_text(tokens, skip_special_tokens=False) if decode_text else None

    for row in range(len(rollouts)):
        prompt, completion = rollouts.prompt(row), rollouts.completion(row)
        yield Row(
            group=int(rollouts.group[row]),
            sample=int(rollouts.sample[row]),
            target_length=int(rollouts.target_length[row]),
            prompt_tokens=prompt,
            completion_tokens=completion,
            proof_bytes=int(rollouts.proof_offsets[row + 1] - rollouts.proof_offsets[row]),
            log_probabilities=rollouts.row_log_probabilities(row),
            prompt=text(prompt),
            completion=text(completion),
        )
