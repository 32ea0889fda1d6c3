"""An environment reduced to the tasks that `swarm dataset filter` kept.

A lab registers it like any environment of its own: as a class without arguments, under the
entry-point group `swarm.environments`, in a package that installs the file on every machine:

    class Filtered(Listed):
        def __init__(self) -> None:
            super().__init__(SortDigits(), Path(__file__).with_name("kept.jsonl"), "sort-kept")
"""

from __future__ import annotations

import json
from pathlib import Path

import blake3

from peers.environments.base import Environment, Split, Task
from swarm.errors import UserError


class Listed:
    """Draws training tasks from a file, and held-out tasks from the inner environment."""

    def __init__(self, inner: Environment, path: Path, name: str) -> None:
        """Read the kept tasks; raises `UserError`. The version includes a hash of the file."""
        try:
            raw = path.read_bytes()
            rows = [json.loads(line) for line in raw.splitlines()[1:]]
            self._seeds = [bytes.fromhex(row["seed"]) for row in rows if row["kept"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no file of `swarm dataset filter` ({error})") from error
        if not self._seeds:
            raise UserError(f"{path} keeps no task; filter with wider bounds")
        self.name = name
        self.version = f"{inner.version}+{blake3.blake3(raw).hexdigest(length=8)}"
        self.inner = inner

    def task(self, seed: bytes, split: Split = "train") -> Task:
        """Draw one of the kept tasks, uniformly; see `Environment.task`."""
        if split == "held_out":
            return self.inner.task(seed, split)
        chosen = int.from_bytes(blake3.blake3(seed).digest(), "big") % len(self._seeds)
        return self.inner.task(self._seeds[chosen])

    def reward(self, task: Task, completion_text: str, finished: bool) -> float:
        """The inner environment's grade."""
        return self.inner.reward(task, completion_text, finished)
