"""The reward that an agent's harness posted for a session that `swarm endpoint` recorded."""

from __future__ import annotations

from pathlib import Path

import msgspec

from swarm.errors import DECODE_ERRORS

FILE_BYTES_MAX = 64 << 20


class _Note(msgspec.Struct):
    session: str
    file: str
    reward: float | None = None
    parts: dict[str, float] = {}


def posted_reward(path: Path) -> tuple[float | None, dict[str, float]]:
    """The reward and its parts in the JSON file beside a recorded submission, if there are any."""
    note = path.with_suffix(".json")
    try:
        if note.stat().st_size > FILE_BYTES_MAX:
            return None, {}
        found = msgspec.json.decode(note.read_bytes(), type=_Note)
    except (OSError, *DECODE_ERRORS):
        return None, {}
    return (found.reward, found.parts) if found.file == path.name else (None, {})
