"""Rollouts as data: JSON lines, or a Hugging Face data set folder."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from swarm.errors import UserError
from swarm.look.rollouts.seen import SeenRollout, as_row
from swarm.terminal.output import removed_on_failure, to_json

ROWS_PER_WRITE = 256
"""Rollouts held in memory while a table is written."""

JSON_LINES = ".jsonl"

_TURN = pa.struct(
    [
        pa.field("kind", pa.string()),
        pa.field("text", pa.string()),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("in_loss", pa.bool_()),
        pa.field("finish", pa.string()),
        pa.field("log_probabilities", pa.list_(pa.float32())),
        pa.field("policies", pa.list_(pa.int64())),
        pa.field("policy_tokens", pa.list_(pa.int64())),
    ]
)

_PART = pa.struct([pa.field("name", pa.string()), pa.field("value", pa.float64())])

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "run": (pa.string(), "run id: the owner's peer id and the run's name"),
    "lineage": (pa.int64(), "lineage of the policies; a rollback begins a new one"),
    "step": (pa.int64(), "rollout step that the work was done for"),
    "policy": (pa.int64(), "policy that the step asked for"),
    "worker": (pa.string(), "peer id of the worker"),
    "number": (pa.int64(), "number of the submission among the worker's of this step"),
    "submission": (pa.string(), "BLAKE3-256 of the submission, hexadecimal"),
    "group": (pa.int64(), "group in the submission: one prompt with several completions"),
    "sample": (pa.int64(), "index in the group"),
    "environment": (pa.string(), "environment of the task"),
    "environment_version": (pa.string(), "its version"),
    "engine": (pa.string(), "the worker's engine, by its own account; empty if unknown"),
    "temperature": (pa.float64(), "sampling temperature"),
    "turns": (
        pa.list_(_TURN),
        "segments in order: kind (prompt, model or environment), text, tokens, in_loss (whether "
        "the loss covers them), finish, log_probabilities (the worker's), policies that the "
        "tokens were sampled from and how many from each",
    ),
    "reward": (pa.float64(), "the validator's reward; null without a verdict"),
    "parts": (pa.list_(_PART), "what the reward is made of, by the environment's account"),
    "advantage": (pa.float64(), "the reward relative to its group; without process rewards"),
    "verdict": (pa.string(), "accepted, quarantined or refused; null if no log has it"),
    "failed": (pa.string(), "the check that failed"),
    "detail": (pa.string(), "the validator's words on it"),
    "outcome": (
        pa.string(),
        "what the trainer did: consumed, zero-advantage, stale, carried or unreadable",
    ),
    "consumed_at": (pa.int64(), "the step at which the trainer did so"),
}
"""Type and meaning of each column."""


def check_target(to: Path, option: str = "--to", files: Sequence[str] = (JSON_LINES,)) -> None:
    """Raise `UserError` if a new folder, or a file with one of these suffixes, cannot be made."""
    is_file = to.suffix in files
    if to.suffix and not is_file:
        ends = "".join(f"end with {suffix}, or " for suffix in files)
        raise UserError(f"{option} {to} must {ends}name a folder without a suffix")
    if to.exists() and (is_file or not to.is_dir() or any(to.iterdir())):
        what = "exists" if is_file else "exists and is not an empty folder"
        raise UserError(f"{option} {to} {what}; choose another")
    if not to.absolute().parent.is_dir():
        raise UserError(f"{option} {to} cannot be written: there is no folder {to.parent}")


def export(rollouts: Iterable[SeenRollout], to: Path) -> int:
    """Write rollouts to a file or folder; return how many. Raises `UserError`."""
    try:
        if to.suffix == JSON_LINES:
            return _write_lines(rollouts, to)
        return _write_folder(rollouts, to)
    except OSError as error:
        raise UserError(f"--to {to} cannot be written ({error.strerror or error})") from error


def _write_lines(rollouts: Iterable[SeenRollout], to: Path) -> int:
    partial = to.with_name(to.name + ".partial")
    count = 0
    with partial.open("w", encoding="utf-8") as file:
        for seen in rollouts:
            file.write(to_json(as_row(seen)) + "\n")
            count += 1
    partial.replace(to)
    return count


@dataclass(frozen=True)
class Table:
    """A kind of data set."""

    columns: Mapping[str, tuple[pa.DataType, str]]
    """Type and meaning of each column."""
    tags: Sequence[str]
    text: str
    """The README's words between title and table."""

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(name, type_) for name, (type_, _) in self.columns.items()])


ROLLOUTS = Table(COLUMNS, ("reinforcement-learning", "rollouts"), "")


def write_parquet(rows: Iterator[dict[str, Any]], to: Path, schema: pa.Schema) -> int:
    """Write rows as Parquet in the folder `to`/data of a Hugging Face data set; return how many."""
    data = to / "data"
    data.mkdir(parents=True)
    count = 0
    with pq.ParquetWriter(data / "train-00000.parquet", schema, compression="zstd") as writer:
        while part := list(itertools.islice(rows, ROWS_PER_WRITE)):
            writer.write_table(pa.Table.from_pylist(part, schema=schema))
            count += len(part)
    return count


def _write_folder(rollouts: Iterable[SeenRollout], to: Path) -> int:
    with removed_on_failure(to):
        count = write_parquet(map(as_row, rollouts), to, ROLLOUTS.schema)
    text = f"{count:,} rollouts of a Swarm run, one per row. Texts come from untrusted workers."
    write_card(to, "Rollouts", replace(ROLLOUTS, text=text))
    return count


def write_card(to: Path, title: str, table: Table) -> None:
    """Write the README that the `datasets` library and the hub read."""
    columns = "\n".join(
        f"| `{name}` | {'list of structures' if pa.types.is_list(type_) else type_} | {meaning} |"
        for name, (type_, meaning) in table.columns.items()
    )
    tags = "\n".join(f"- {tag}" for tag in table.tags)
    text = f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
tags:
{tags}
---

# {title}

{table.text}

```python
from datasets import load_dataset

rows = load_dataset("path/to/this/folder", split="train")
```

| Column | Type | Meaning |
|---|---|---|
{columns}
"""
    (to / "README.md").write_text(text, encoding="utf-8")
