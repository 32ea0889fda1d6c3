"""An environment reduced to the tasks that `swarm dataset filter` kept.

A lab registers it like any environment of its own: as a class without arguments, under the
entry-point group `swarm.environments`, in a package that installs the file on every machine:

    class Filtered(Listed):
        def __init__(self) -> None:
            super().__init__(SortDigits(), Path(__file__).with_name("kept.jsonl"), "sort-kept")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import blake3

from peers.environments.interface import Environment, Split, Task, Tasks, Wrapper
from swarm.errors import UserError


class Listed(Wrapper):
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
        super().__init__(inner)
        self.name = name
        self.version = f"{inner.version}+{blake3.blake3(raw).hexdigest(length=8)}"

    def tasks(self) -> Tasks:
        return _Kept(self.inner.cached_tasks, self._seeds)


@dataclass(frozen=True)
class _Kept:
    inner: Tasks
    seeds: Sequence[bytes]

    def draw(self, seed: bytes, split: Split, step: int) -> Task:
        """One of the kept tasks, uniformly."""
        if split == "held_out":
            return self.inner.draw(seed, split, step)
        chosen = int.from_bytes(blake3.blake3(seed).digest(), "big") % len(self.seeds)
        return self.inner.draw(self.seeds[chosen], "train", 0)
