"""Responses in the form of genesys: the attempts of `swarm dataset filter`, one record each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from swarm.errors import UserError
from swarm.jobs.offline import MeasuredTask
from swarm.terminal.strict_json import to_json


class ResponseFile:
    """JSON lines of responses, in the order of the tasks."""

    def __init__(self, path: Path, kept: int, shared: Mapping[str, Any]) -> None:
        """Begin or resume a file that has the responses of `kept` attempts.

        `shared` are the fields that all records have. Raises `UserError`.
        """
        self._path, self._shared = path, dict(shared)
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            if len([line for line in lines[:kept] if line.endswith(b"\n")]) < kept:
                raise UserError(
                    f"--responses {path} has fewer responses than the {kept} attempts of --out; "
                    "choose another --out to begin anew"
                )
            if kept == 0 and lines:
                raise UserError(f"--responses {path} exists; choose another file, or remove it")
            self._file = path.open("ab")
            self._file.truncate(sum(map(len, lines[:kept])))
        except OSError as error:
            raise UserError(
                f"--responses {path} cannot be written ({error.strerror}); choose another file"
            ) from error

    def add(self, row: MeasuredTask) -> None:
        """Append the attempts at a task; raises `UserError` on a full disk."""
        lines = [
            to_json({**record_of(row), **self._shared, **response}) + "\n"
            for response in _responses(row)
        ]
        try:
            self._file.write("".join(lines).encode())
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"--responses {self._path} cannot be written ({error.strerror}); free some space "
                "and give the same command"
            ) from error

    def close(self) -> None:
        """Make the file durable."""
        with suppress(OSError):
            os.fsync(self._file.fileno())
        self._file.close()


def record_of(row: MeasuredTask) -> dict[str, Any]:
    """The task's record; of another environment than `genesys`, one made from the task."""
    data = row.data
    info = data.get("verification_info")
    return {
        "problem_id": data.get("problem_id", row.seed),
        "source": data.get("source", ""),
        "task_type": data.get("task_type", ""),
        "in_source_id": data.get("in_source_id"),
        "prompt": row.prompt,
        "gold_standard_solution": row.answer,
        "verification_info": to_json(info if info is not None else data),
        "metadata": to_json(data.get("metadata", {})),
    }


def _responses(row: MeasuredTask) -> list[dict[str, Any]]:
    return [
        {
            "llm_response": attempt.text,
            "response_id": blake3(f"{row.seed}/{number}".encode()).hexdigest(length=16),
            "score": attempt.reward,
            "finished": attempt.finished,
        }
        for number, attempt in enumerate(row.responses)
    ]
