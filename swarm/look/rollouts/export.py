"""Rollouts as data: JSON lines, or a Hugging Face data set folder."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from swarm.data import beside
from swarm.errors import UserError, file_errors
from swarm.look.rollouts.seen import SeenRollout, as_row
from swarm.terminal.output import removed_on_failure, to_json

ROWS_PER_WRITE = 256
"""Rollouts held in memory while a table is written."""

JSON_LINES = ".jsonl"

_TURN = pa.struct(
    {
        "kind": pa.string(),
        "text": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "in_loss": pa.bool_(),
        "finish": pa.string(),
        "log_probabilities": pa.list_(pa.float32()),
        "policies": pa.list_(pa.int64()),
        "policy_tokens": pa.list_(pa.int64()),
    }
)

_PART = pa.struct({"name": pa.string(), "value": pa.float64()})

_NESTED = {"turns": pa.list_(_TURN), "parts": pa.list_(_PART)}

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    name: (_NESTED.get(kind) or pa.type_for_alias(kind), meaning)
    for name, (kind, meaning) in beside(__file__, dict[str, tuple[str, str]]).items()
}
"""Type and meaning of each column, from `export.toml`."""


def check_target(to: Path, option: str = "--out", files: Sequence[str] = (JSON_LINES,)) -> None:
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
    with file_errors(f"--out {to}", "written"):
        if to.suffix == JSON_LINES:
            return _write_lines(rollouts, to)
        return _write_folder(rollouts, to)


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
    card = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    text = card.format(tags=tags, title=title, text=table.text, columns=columns)
    (to / "README.md").write_text(text, encoding="utf-8")
