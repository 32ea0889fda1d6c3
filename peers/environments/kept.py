"""Tasks that `swarm dataset filter` kept, as options of any environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from peers.environments import interface
from peers.environments.dataset import Hash, prompt_in, text_in
from peers.environments.rows import Rows
from peers.environments.tasks import Indexed
from swarm.errors import UserError
from swarm.wire.manifest import OptionValue

COLUMNS = ("prompt", "answer", "data")


class KeptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that training draws."""

    kept: Annotated[str, Meta(min_length=1, max_length=1000)]
    """A file that `swarm dataset filter` wrote for this environment."""
    kept_hash: Hash | None = None
    """BLAKE3 of the file; `swarm run create` fills it in."""


@dataclass(frozen=True, kw_only=True)
class KeptTasks(Indexed):
    """The kept tasks; the environment's own are held out, as before."""

    inner: interface.Tasks

    def draw(self, seed: bytes, split: interface.Split) -> interface.Task:
        return (self.inner.draw if split == "held_out" else super().draw)(seed, split)


class Kept(interface.Wrapper):
    """An environment whose training tasks are those of a file, graded as its own."""

    def __init__(self, inner: interface.Environment, options: KeptOptions) -> None:
        """Open the file and check its hash; raises `UserError`."""
        super().__init__(inner)
        self._rows = Rows.at(options.kept)
        self._rows.check_columns(COLUMNS, f"environment {self.name!r}: options: kept")
        if options.kept_hash is not None:
            self._rows.check_hash(options.kept_hash, "kept_hash")

    def tasks(self) -> interface.Tasks:
        rows, inner = self._rows, self.inner.cached_tasks
        return KeptTasks(len(rows), self._at, rows.place, inner=inner)

    def pins(self) -> Mapping[str, OptionValue]:
        return {**self.inner.pins(), "kept_hash": self._rows.hash()}

    def _at(self, index: int) -> interface.Task:
        self._rows.check_unchanged(index)
        place = self._rows.place(index)
        try:
            row = self._rows.row(index, COLUMNS)
            if not isinstance(row["data"], dict):
                raise UserError(f"{place}: 'data' is {row['data']!r:.60}; it must be a table")
            prompt, answer = prompt_in(row, "prompt", place), text_in(row, "answer", place)
            return interface.Task(prompt, answer, row["data"], place=place)
        except UserError as error:
            raise interface.UnusableTask(str(error)) from error


def kept_row(task: interface.Task) -> dict[str, Any]:
    """The row of a file of kept tasks for an environment's own task."""
    chat = [each.fields() for each in interface.messages_of(task.prompt)]
    prompt = task.prompt if isinstance(task.prompt, str) else chat
    return {"prompt": prompt, "answer": task.answer, "data": task.data}
